"""The decode loop without an engine: memory that runs out, heartbeats, and copies of states."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.devices.host_memory import HostMemory
from engine.runtime.child.generate import checkpoints, decode_loop
from engine.runtime.child.generate.checkpoints import CheckpointTaker
from engine.runtime.child.generate.decode_loop import DecodeLoop
from engine.runtime.child.generate.slots import Slots
from engine.runtime.child.generate.tasks import StandaloneTask
from engine.runtime.child.handlers.generate import Generation
from engine.runtime.child.load.loaded_context import ABORTED, LoadedContext
from engine.runtime.child.native.stop import StopFlag
from engine.runtime.protocol.messages import Failure, FinalMessage, Message, Reading, Tokenised
from engine.runtime.protocol.requests import Tokenise

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture
def loaded() -> LoadedContext:
    """A context with two slots and recurrent state of 1 GiB, in a computer with 32 GiB of free memory."""
    low = SimpleNamespace(
        LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY=1,
        llama_batch=lambda **_: SimpleNamespace(),
        llama_model_n_swa=lambda _model: 0,
        llama_state_seq_get_size_ext=lambda *_: GIB,
    )
    return cast("LoadedContext", SimpleNamespace(
        engine=SimpleNamespace(low=low), model=0, context=0, memory=0, devices=SimpleNamespace(remote=()), draft=None,
        n_sequences=2, batch_tokens=8, decoded_tokens=8, context_tokens=64, needs_checkpoints=True,
        has_recurrent_state=True, settings=SimpleNamespace(kv_unified=False, n_ubatch=8),
    ))  # fmt: skip


@pytest.fixture
def sent() -> list[Message]:
    return []


@pytest.fixture
def loop(loaded: LoadedContext, sent: list[Message], monkeypatch: pytest.MonkeyPatch) -> DecodeLoop:
    def send(messages: Iterable[Message]) -> None:
        sent.extend(messages)

    monkeypatch.setattr(checkpoints, "read_host_memory", lambda: HostMemory(64 * GIB, 32 * GIB))
    return DecodeLoop(loaded, StopFlag(), send)


class Greedy(StandaloneTask):
    """A task for which memory does not suffice."""

    def run_slice(self, slots: Slots) -> FinalMessage | None:
        raise MemoryError


def test_a_request_for_which_memory_is_short_fails_alone(
    loop: DecodeLoop, sent: list[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(*_: object) -> Any:
        raise MemoryError

    monkeypatch.setattr(decode_loop, "begin", begin)
    loop.take(Tokenise(id=1, text="word"))
    monkeypatch.setattr(decode_loop, "begin", lambda *_: Greedy(2))
    loop.take(Tokenise(id=2, text="word"))
    loop.step()
    assert [(each.request, each.kind) for each in sent if isinstance(each, Failure)] == [
        (1, "argument"),
        (2, "argument"),
    ]
    assert not loop.busy


def test_a_request_that_is_being_taken_has_heartbeats_until_its_answer(
    loop: DecodeLoop, sent: list[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Tokenised(request=1, tokens=(), pieces=())

    def begin(*_: object) -> Any:
        loop.send_progress()
        return answer

    monkeypatch.setattr(decode_loop, "begin", begin)
    loop.take(Tokenise(id=1, text="word"))
    loop.send_progress()
    assert sent == [Reading(request=1, read_tokens=0, prompt_tokens=0), answer]


def test_the_progress_of_a_request_is_known_while_its_slot_is_taken_away() -> None:
    class Run:
        id, _prompt_tokens, _cached = 1, 9, 0

        def __init__(self) -> None:
            self._slots = [SimpleNamespace(tokens=[1, 2])]

        @property
        def slot(self) -> object:
            return self._slots.pop() if self._slots else None

        def _cells(self, tokens: list[int]) -> int:
            return len(tokens)

    reading = cast("property", Generation.__dict__["reading"]).fget
    assert reading is not None
    assert reading(Run()).read_tokens == 2


def test_no_state_is_copied_if_host_memory_became_short(
    loop: DecodeLoop, loaded: LoadedContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = Slots(loaded)
    monkeypatch.setattr(checkpoints, "read_host_memory", lambda: HostMemory(64 * GIB, GIB))

    def allocate(*_: object) -> Any:
        raise AssertionError("memory was taken for the copy")

    monkeypatch.setattr(checkpoints.CheckpointTaker, "take", allocate)
    assert slots.copy_state(slots.all[0]) is None


@pytest.mark.parametrize(("remote", "longest_s", "since_s", "may_wait"), [
    ({"RPC0"}, 20.0, 199.0, True),
    ({"RPC0"}, 20.0, 201.0, False),
    ({"RPC0"}, 20.0, None, False),
    (set(), 20.0, 199.0, False),
])  # fmt: skip
def test_workers_may_take_several_times_as_long_as_for_the_longest_batch(
    remote: set[str], longest_s: float, since_s: float | None, may_wait: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.runtime.child.load.loaded_context.time.monotonic", lambda: 1000.0)
    devices = SimpleNamespace(remote=frozenset(remote))
    begun_s = None if since_s is None else 1000.0 - since_s
    loaded = SimpleNamespace(devices=devices, longest_s=longest_s, computing_since_s=begun_s)
    assert LoadedContext.may_wait(cast("LoadedContext", loaded)) is may_wait


def test_the_longest_computation_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 3.0, 3.0, 5.0])
    monkeypatch.setattr("engine.runtime.child.load.loaded_context.time.monotonic", lambda: next(clock))
    context: Any = SimpleNamespace(context=0, limit=None, longest_s=0.0)
    begun: list[float | None] = []

    def decode(*_: object) -> int:
        begun.append(context.computing_since_s)
        return ABORTED

    context.engine = SimpleNamespace(low=SimpleNamespace(llama_decode=decode))
    for _ in range(2):
        assert LoadedContext.compute(context, None) == ABORTED
    assert (begun, context.computing_since_s, context.longest_s) == ([0.0, 3.0], None, 3.0)


@pytest.mark.parametrize(("state_bytes", "free_bytes", "is_taken"), [
    (200 * MIB, 3 * GIB, True),  # a large model has left less than 1/16 of the memory
    (200 * MIB, GIB, False),
    (GIB, 32 * GIB, False),
])  # fmt: skip
def test_drafts_and_checkpoints_need_some_free_host_memory(
    loaded: LoadedContext, monkeypatch: pytest.MonkeyPatch, state_bytes: int, free_bytes: int, is_taken: bool
) -> None:
    monkeypatch.setattr(checkpoints, "read_host_memory", lambda: HostMemory(64 * GIB, free_bytes))
    monkeypatch.setattr(loaded.engine.low, "llama_state_seq_get_size_ext", lambda *_: state_bytes)
    slots = Slots(loaded)
    assert slots.can_roll_back(slots.all[0]) == is_taken
    taker = CheckpointTaker(loaded)
    assert (taker.size_bytes(0) <= taker.most_bytes) == (free_bytes > GIB)
