"""The numbers of threads that are tried, and the choice from made-up timings."""

from __future__ import annotations

import msgspec
import pytest

from engine.base.errors import BusyError, UnreachableError
from engine.base.processor import Processor
from engine.base.units import GIB, MIB
from engine.devices.device import MeasuredChoice, make_host
from engine.machines.bench import thread_counts
from engine.machines.bench.thread_counts import (
    ROUNDS,
    Quiet,
    Round,
    choose_bound,
    choose_threads,
    measured_threads,
    thread_counts_to_try,
    thread_lines,
    with_threads,
)
from engine.planning.fit.speed_book import EMPTY_BOOK
from engine.runtime.process.blocking_child import BlockingChild, request_child
from engine.runtime.protocol.messages import ThreadSpeeds
from engine.runtime.protocol.requests import MeasureThreads
from tests.support.patience import DEADLINE_S

HOST = make_host("host", 16 * GIB, 8 * GIB)


def rounds_of(speeds: dict[str, tuple[float, float]], jitter: float = 0.01) -> list[Round]:
    """Return as many rounds as are measured, each a little faster than the one before."""
    return [
        {name: (answer * (1 + jitter * at), prompt * (1 + jitter * at)) for name, (answer, prompt) in speeds.items()}
        for at in range(ROUNDS)
    ]


@pytest.mark.parametrize(
    ("processor", "n_processors", "counts"),
    [
        (Processor(1, 1), 1, (1,)),
        (Processor(2, 2), 2, (1, 2)),
        (Processor(8, 8), 16, (4, 8, 16)),
        # Six fast cores with two threads each, eight slow ones.
        (Processor(14, 6), 20, (6, 7, 14, 20)),
        (Processor(64, 64), 128, (16, 32, 64, 128)),
        # A quota of three cores.
        (Processor(8, 8, 3), 16, (3,)),
        (Processor(8, 8, 6), 16, (4, 6)),
        (Processor(400, 400), 800, (100, 200, 400, 512)),
    ],
)
def test_which_numbers_are_tried(processor: Processor, n_processors: int, counts: tuple[int, ...]) -> None:
    assert thread_counts_to_try(processor, n_processors) == counts


def test_answers_and_prompts_have_numbers_of_their_own() -> None:
    rounds = rounds_of({"4": (1.3, 0.6), "8": (1.0, 1.0), "16": (0.7, 1.2)})
    answers, prompts = choose_threads(rounds, (4, 8, 16), 8, "here")
    assert (answers.setting, answers.value, answers.base) == ("threads", 4, 8)
    assert answers.ratio == pytest.approx(1.3)
    assert answers.low > 1
    assert (prompts.setting, prompts.value, prompts.machine) == ("threads_batch", 16, "here")


def test_the_default_stays_if_the_gain_is_small_or_not_sure() -> None:
    small = rounds_of({"4": (1.02, 1.0), "8": (1.0, 1.0)})
    unsure = [
        {"4": (1.4 if at % 2 else 0.9, 1.0), "8": (1.0, 1.0)} for at in range(ROUNDS)
    ]  # the median of an odd number of rounds is 0.9 or 1.4
    for rounds in (small, unsure):
        assert [each.value for each in choose_threads(rounds, (4, 8), 8, "here")] == [8, 8]


def test_threads_are_bound_where_answers_gain_and_prompts_lose_nothing() -> None:
    gain = rounds_of({"free": (1.0, 1.0), "bound": (1.2, 1.0)})
    assert choose_bound(gain, "free", "bound", "here").value == 1
    loss = rounds_of({"free": (1.0, 1.0), "bound": (1.2, 0.8)})
    assert choose_bound(loss, "free", "bound", "here").value == 0
    same = rounds_of({"free": (1.0, 1.0), "bound": (1.01, 1.0)})
    assert choose_bound(same, "free", "bound", "here").value == 0


def test_the_child_measures_each_number_of_threads() -> None:
    request = MeasureThreads(counts=(1, 2, 1), size_bytes=4 * MIB, measured_s=0.001)
    speeds = request_child(request, ThreadSpeeds, timeout_s=DEADLINE_S)
    assert [len(speeds.answers), len(speeds.prompts)] == [3, 3]
    assert all(each > 0 for each in (*speeds.answers, *speeds.prompts))


def of_machine(monkeypatch: pytest.MonkeyPatch, speeds: dict[tuple[int, bool], tuple[float, float]]) -> list[bool]:
    """Make a machine of eight cores with made-up speeds by (threads, bound); return what was measured, bound or not."""
    asked: list[bool] = []

    def ask(child: BlockingChild, counts: list[int], _size_bytes: int) -> dict[int, tuple[float, float]]:
        bound = children.index(child) > 0
        asked.append(bound)
        return {count: speeds[count, bound] for count in counts}

    children: list[BlockingChild] = []

    class Child:
        def __init__(self, **_named: object) -> None:
            children.append(self)  # type: ignore[arg-type]

        def __enter__(self) -> Child:
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(thread_counts, "own_processor", lambda: Processor(8, 8))
    monkeypatch.setattr(thread_counts, "usable_processors", lambda: frozenset(range(16)))
    monkeypatch.setattr(thread_counts, "core_cpus", lambda: tuple((at, at + 8) for at in range(8)))
    monkeypatch.setattr(thread_counts, "BlockingChild", Child)
    monkeypatch.setattr(thread_counts, "_ask", ask)
    monkeypatch.setattr(Quiet, "check", lambda _self: None)
    return asked


SPEEDS = {
    (4, False): (1.3, 0.6), (8, False): (1.0, 1.0), (16, False): (0.7, 1.2), (4, True): (1.5, 0.6),
}  # fmt: skip


def test_a_machine_is_measured_and_its_choices_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = of_machine(monkeypatch, SPEEDS)
    book, lines = with_threads(EMPTY_BOOK, HOST)
    assert {each.setting: each.value for each in book.choices} == {
        "threads": 4, "threads_batch": 16, "bound_threads": 1,
    }  # fmt: skip
    assert any(asked)
    assert lines[0].startswith(
        "CPU threads: 4 for answers (1.30 times as fast as with 8 (95 % interval: 1.30 to 1.30)), 16 for prompts"
    )
    assert lines[1].startswith("Threads are bound to physical cores, which was 1.15 times")


def test_unknown_cores_are_not_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = of_machine(monkeypatch, SPEEDS)
    monkeypatch.setattr(thread_counts, "core_cpus", lambda: ())
    assert [each.setting for each in measured_threads(HOST)] == ["threads", "threads_batch"]
    assert not any(asked)


def test_a_busy_machine_is_told_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    of_machine(monkeypatch, SPEEDS)

    def busy(_self: Quiet) -> None:
        raise BusyError("other programs used 43 % of the processors.")

    monkeypatch.setattr(Quiet, "check", busy)
    book, lines = with_threads(EMPTY_BOOK, HOST)
    assert book == EMPTY_BOOK
    assert lines == ("The thread counts were not measured: other programs used 43 % of the processors.",)


def test_other_programs_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([(100.0, 5.0), (110.0, 6.0), (100.0, 5.0), (110.0, 15.0)])
    clock = iter([0.0, 10.0, 0.0, 10.0])
    monkeypatch.setattr(thread_counts, "processor_seconds", lambda: next(readings))
    monkeypatch.setattr("engine.machines.bench.thread_counts.time.monotonic", lambda: next(clock))
    monkeypatch.setattr("engine.machines.bench.thread_counts.os.cpu_count", lambda: 2)
    quiet = Quiet()
    with pytest.raises(BusyError, match="45%"):
        quiet.check()
    Quiet().check()


def test_a_child_that_fails_leaves_the_book(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> tuple[MeasuredChoice, ...]:
        raise UnreachableError("It crashed.")

    known = MeasuredChoice("threads", 4, 8, 1.3, 1.2, 1.4, "here")
    monkeypatch.setattr(thread_counts, "measured_threads", fail)
    book, lines = with_threads(EMPTY_BOOK.with_choices([known]), HOST)
    assert book.choices == (known,)
    assert lines == ("The thread counts were not measured: It crashed.",)


def test_one_number_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_counts, "own_processor", lambda: Processor(1, 1))
    monkeypatch.setattr(thread_counts, "usable_processors", lambda: frozenset({0}))
    assert measured_threads(HOST) == ()
    assert thread_lines(()) == ()


def test_a_request_survives_the_pipe() -> None:
    request = MeasureThreads(counts=(1, 2), size_bytes=MIB, measured_s=0.1)
    assert msgspec.json.decode(msgspec.json.encode(request), type=MeasureThreads) == request
