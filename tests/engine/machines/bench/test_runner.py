"""The speed comparison with a stand-in for the engine: turns, warm-up, failures, cancel, sleep, search."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import msgspec
import pytest

from engine.base.units import MIB
from engine.base.values import replace
from engine.devices.device import CPU_ID
from engine.devices.telemetry.sample import CardState
from engine.devices.telemetry.sample import Sample as Reading
from engine.machines.bench.candidates import Candidate, Predictor
from engine.machines.bench.readings import Window
from engine.machines.bench.results import FULL
from engine.machines.bench.runner import Bench, BenchProgress
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import single_device
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.settings.context_settings import ContextSettings
from tests.support.bench import PRESET, FakePredictor, FakeSubject, FakeWatch, candidate
from tests.support.models import write_tiny_llama
from tests.support.previews import make_gpu, make_rig

RIG = make_rig(make_gpu("CUDA0", 12), make_gpu("CUDA1", 12))


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Plan]:
    memory = ModelMemory(read_model(write_tiny_llama(tmp_path_factory.mktemp("models") / "m.gguf", n_layers=4)))
    context = ContextSettings(n_ctx=1024)
    return {key: Plan(memory, RIG, Edit(single_device(4, key), context)) for key in ("CUDA0", "CUDA1", CPU_ID)}


def bench_of(subject: FakeSubject, watch: FakeWatch | None = None, predictor: FakePredictor | None = None) -> Bench:
    return Bench(subject, watch or FakeWatch(), PRESET, cast(Predictor, predictor or FakePredictor()))


def by_device(**speeds: float) -> FakeSubject:
    return FakeSubject(lambda plan, n: speeds[plan.edit.layout.output_device] * (1 + 0.01 * (n % 3)))


def pair(plans: dict[str, Plan]) -> list[Candidate]:
    return [candidate("first", plans["CUDA0"]), candidate("second", plans["CUDA1"])]


def test_layouts_take_turns_and_stay_loaded_between_two(plans: dict[str, Plan]) -> None:
    subject = by_device(CUDA0=50.0, CUDA1=80.0)
    results = bench_of(subject).run(pair(plans))
    loaded = [plan.edit.layout.output_device for plan in subject.loads]
    assert loaded == ["CUDA0", "CUDA1", "CUDA0", "CUDA1", "CUDA0", "CUDA1"]
    assert [len(each.samples) for each in results.layouts] == [5, 5]
    assert results.winner == "second"
    assert not results.ended


def test_no_prompt_begins_like_one_before(plans: dict[str, Plan]) -> None:
    """The child keeps what it has read, and would not read a prompt a second time."""
    subject = by_device(CUDA0=50.0, CUDA1=80.0)
    bench_of(subject).run(pair(plans))
    for earlier, later in zip(subject.answers, subject.answers[1:], strict=False):
        if earlier[0] is later[0]:
            assert earlier[1].split()[0] != later[1].split()[0]


def test_warm_up_is_not_measured(plans: dict[str, Plan]) -> None:
    speeds = iter([10.0, 20.0, 30.0, 30.0, *[30.0] * 99])
    results = bench_of(FakeSubject(lambda _plan, _n: next(speeds))).run([candidate("first", plans["CUDA0"])])
    assert {each.answer_per_second for each in results.layouts[0].samples} == {30.0}


def test_the_first_answer_of_a_load_has_a_prompt_of_full_length(plans: dict[str, Plan]) -> None:
    """Otherwise the measured prompt would be the first one to touch its compute buffer."""
    subject = by_device(CUDA0=50.0)
    bench_of(subject).run([candidate("first", plans["CUDA0"])])
    lengths = [prompt.split().count("x") for _, prompt in subject.answers]
    assert lengths[0] == PRESET.prompt_tokens
    assert min(lengths) < PRESET.prompt_tokens


def test_a_cancel_keeps_what_was_measured(plans: dict[str, Plan]) -> None:
    subject = by_device(CUDA0=50.0, CUDA1=80.0)
    subject.cancel_after = 7
    results = bench_of(subject).run(pair(plans))
    assert "cancelled" in results.ended
    assert sum(len(each.samples) for each in results.layouts) == 3


def test_a_layout_that_does_not_fit_leaves_the_others(plans: dict[str, Plan]) -> None:
    subject = by_device(CUDA0=50.0, CUDA1=80.0)
    subject.fails = lambda plan, _what: "CUDA0 ran out of memory." if plan is plans["CUDA0"] else ""
    told: list[BenchProgress] = []
    results = Bench(subject, FakeWatch(), PRESET, cast(Predictor, FakePredictor()), told.append).run(pair(plans))
    assert (told[-1].done, told[-1].total) == (6, 6), "one turn that failed, five of the other layout"
    first, second = results.layouts
    assert (first.problem, first.problem_kind, first.samples) == ("CUDA0 ran out of memory.", "does_not_fit", ())
    assert len(second.samples) == 5
    assert results.winner == "second"


def test_a_child_that_dies_keeps_its_samples(plans: dict[str, Plan]) -> None:
    subject = by_device(CUDA0=50.0, CUDA1=80.0)
    subject.fails = lambda plan, what: (
        "It crashed." if plan is plans["CUDA1"] and what == "answer" and len(subject.answers) > 9 else ""
    )
    results = bench_of(subject).run(pair(plans))
    first, second = results.layouts
    assert second.problem == "It crashed."
    assert 0 < len(second.samples) < len(first.samples) == 5


def test_a_sleep_leaves_its_sample_out(plans: dict[str, Plan]) -> None:
    """The first window is that of the load, the second that of the first sample."""
    watch = FakeWatch([Window(), Window(slept_s=3600.0)])
    results = bench_of(by_device(CUDA0=50.0), watch).run([candidate("first", plans["CUDA0"])])
    assert [each.round for each in results.layouts[0].samples] == [1, 2, 3, 4]
    assert results.notes == ("The computer slept for 3600 s; measurements from that time are left out.",)


def test_readings_stand_beside(plans: dict[str, Plan]) -> None:
    def read(power_w: float, heat_c: float, own_bytes: int) -> Reading:
        card = CardState(core_clock_mhz=1500.0, throttled_by=("temperature",))
        return Reading("CUDA0", 0.0, 0, 0, own_bytes, temperature_c=heat_c, power_w=power_w, card=card)

    watch = FakeWatch(
        [Window((read(10, 30, MIB),), 1.0), Window((read(320, 70, 3 * MIB), read(320, 80, 2 * MIB)), 2.0)]
    )
    (layout,) = bench_of(by_device(CUDA0=50.0), watch).run([candidate("first", plans["CUDA0"])]).layouts
    (state,) = layout.devices
    assert (state.clock_mhz, state.temperature_c, state.throttled) == (1500.0, 80.0, "temperature")
    assert state.joules_per_token == pytest.approx(320 * 2.0 / PRESET.answer_tokens)
    memory = next(each for each in layout.memory if each.device == "CUDA0")
    assert memory.peak_bytes == 3 * MIB
    assert memory.forecast_bytes == memory.measured_bytes


def test_a_depth_beyond_the_context_is_told(plans: dict[str, Plan]) -> None:
    preset = msgspec.structs.replace(PRESET, depths=(0, 256, 4096, FULL))
    bench = Bench(by_device(CUDA0=50.0), FakeWatch(), preset, cast(Predictor, FakePredictor()))
    results = bench.run([candidate("first", plans["CUDA0"])])
    assert results.layouts[0].depths == (0, 256, 1024 - 100 - 32 - 256)
    assert any("4096" in note for note in results.notes)


def test_the_search_keeps_the_faster_layout(plans: dict[str, Plan]) -> None:
    subject = by_device(CUDA0=50.0, CUDA1=80.0, CPU=20.0)
    predictor = FakePredictor(lambda plan: {"CUDA0": 3.0, "CUDA1": 1.0, CPU_ID: 2.0}[plan.edit.layout.output_device])
    others = [candidate("host", plans[CPU_ID]), candidate("second", plans["CUDA1"])]
    results = bench_of(subject, predictor=predictor).search(candidate("first", plans["CUDA0"]), others)
    assert [each.name for each in results.layouts] == ["first", "second"], "the better prediction first"
    assert results.winner == "second"
    assert plans[CPU_ID] not in subject.loads, "it is predicted to be slower than what was measured"
    assert "No further layout is predicted to be faster than second." in results.notes
    assert predictor.learnt == [plans["CUDA0"], plans["CUDA1"]]


def test_the_search_measures_layouts_without_a_prediction(plans: dict[str, Plan]) -> None:
    subject = by_device(CUDA0=50.0, CUDA1=80.0, CPU=20.0)
    first = plans["CUDA0"]
    slow = first.with_edit(replace(first.edit, context=msgspec.structs.replace(first.edit.context, flash_attn="off")))
    predicted = [(first, 3.0), (slow, 9.0), (plans[CPU_ID], 2.0)]
    predictor = FakePredictor(lambda plan: next((each for key, each in predicted if key is plan), None))
    others = [candidate("slow", slow), candidate("unknown", plans["CUDA1"]), candidate("host", plans[CPU_ID])]
    results = bench_of(subject, predictor=predictor).search(candidate("first", first), others)
    assert [each.name for each in results.layouts] == ["first", "host", "unknown"], "slow is predicted to be slower"
    assert results.winner == "unknown"
    assert "No further layout is predicted to be faster than unknown." in results.notes


def test_layouts_of_the_same_name_are_told_apart(plans: dict[str, Plan]) -> None:
    subject = by_device(CUDA0=50.0, CUDA1=80.0)
    bench = bench_of(subject)
    results = bench.search(candidate("fewest", plans["CUDA0"]), [candidate("fewest", plans["CUDA1"])])
    assert [(each.name, each.against) for each in results.layouts] == [("fewest", ""), ("fewest 2", "fewest")]
    assert [len(each.samples) for each in results.layouts] == [5, 5]
    assert results.winner == "fewest 2"
    assert [each.name for each in bench.candidates] == ["fewest", "fewest 2"]


def test_the_search_changes_settings_of_the_best(plans: dict[str, Plan]) -> None:
    def flash_off(name: str, plan: Plan) -> list[Candidate]:
        context = msgspec.structs.replace(plan.edit.context, flash_attn="off")
        return [candidate(f"{name}, flash attention off", plan.with_edit(replace(plan.edit, context=context)))]

    def speed(plan: Plan, _n: int) -> float:
        return (80.0 if plan.edit.layout.output_device == "CUDA1" else 50.0) + (plan.settings.flash_attn == "off")

    first, second = pair(plans)
    results = bench_of(FakeSubject(speed)).search(first, [second], [flash_off])
    assert [each.name for each in results.layouts] == ["first", "second", "second, flash attention off"]
    assert [each.against for each in results.layouts] == ["", "first", "second"]
    assert results.winner == "second, flash attention off"


def test_a_search_with_nothing_to_try_measures_the_layout(plans: dict[str, Plan]) -> None:
    results = bench_of(by_device(CUDA0=50.0)).search(candidate("first", plans["CUDA0"]), [])
    assert len(results.layouts[0].samples) == 5


def test_progress_has_results(plans: dict[str, Plan]) -> None:
    told: list[BenchProgress] = []
    predictor = cast(Predictor, FakePredictor())
    bench = Bench(by_device(CUDA0=50.0, CUDA1=80.0), FakeWatch(), PRESET, predictor, told.append)
    bench.run(pair(plans))
    assert (told[-1].done, told[-1].total) == (10, 10)
    assert len(told[-1].results.layouts[1].samples) == 5


def test_the_remaining_time_follows_from_measured_loads_and_answers(plans: dict[str, Plan]) -> None:
    told: list[BenchProgress] = []
    subject = by_device(CUDA0=50.0, CUDA1=50.0)

    def clock() -> float:
        """Count 900 s for a load and 20 s for an answer, as a model of hundreds of GB needs."""
        return 900.0 * len(subject.loads) + 20.0 * len(subject.answers)

    bench = Bench(subject, FakeWatch(), PRESET, cast(Predictor, FakePredictor()), told.append, clock)
    bench.run(pair(plans))
    ends_s = clock()
    assert told[0].left_s is None
    assert told[0].left_words == ""
    (after_first, *_) = [each for each in told if each.done == 1]
    spent_s = 900.0 + 20.0 * next(at for at, (plan, _) in enumerate(subject.answers) if plan is not subject.loads[0])
    assert after_first.left_s == pytest.approx(ends_s - spent_s, rel=0.2)
    assert after_first.left_words == ", about 74 min left"
    assert told[-1].left_s is None, "nothing is left"


def test_results_name_neither_paths_nor_machines(plans: dict[str, Plan], tmp_path: Path) -> None:
    results = bench_of(by_device(CUDA0=50.0)).run([candidate("first", plans["CUDA0"])])
    text = msgspec.json.encode(results).decode()
    assert str(plans["CUDA0"].model.paths[0].parent) not in text
    assert [each.id for each in results.machine.devices] == ["CUDA0", "CUDA1"]
