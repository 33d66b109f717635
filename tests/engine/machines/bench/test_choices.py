"""Settings chosen from made-up timings, and their use in first layouts."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from engine.base.values import replace
from engine.devices.device import CPU_ID, MeasuredChoice, Rig
from engine.machines.bench.candidates import BUSY_LOAD, Candidate
from engine.machines.bench.choices import choices_of
from engine.machines.bench.results import Measured
from engine.model.gguf.reader import read_model
from engine.planning.fit.measured_batches import with_measured_batches
from engine.planning.fit.speed_book import EMPTY_BOOK
from engine.planning.layout.layout import make_layout, single_device
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.plan_requests import environment
from tests.support.bench import measured, results_of
from tests.support.models import write_header_only
from tests.support.previews import make_gpu, make_rig

RIG = make_rig(make_gpu("CUDA0", 24))


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    path = tmp_path_factory.mktemp("models") / "eight.gguf"
    memory = ModelMemory(read_model(write_header_only(path, n_layers=8, n_embd=1024, n_head=8, n_ff=4096)))
    return Plan(memory, RIG, Edit(single_device(8, "CUDA0"), ContextSettings(n_ctx=8192)))


def changed(plan: Plan, name: str, **settings: object) -> Candidate:
    context = msgspec.structs.replace(plan.edit.context, **settings)
    return Candidate(name, plan.with_edit(replace(plan.edit, context=context)))


def chosen(plan: Plan, *layouts: tuple[Candidate, Sequence[float]], other_load: float = 0.0) -> list[MeasuredChoice]:
    """Return the choices of a benchmark in which the first layout took turns with each other one, at these speeds."""
    found: list[Measured] = []
    for candidate, rates in layouts:
        result = measured(candidate.name, rates, against=found[0].name if found else "")
        samples = tuple(msgspec.structs.replace(each, other_load=other_load) for each in result.samples)
        found.append(msgspec.structs.replace(result, samples=samples))
    return list(choices_of(results_of(*found), [candidate for candidate, _ in layouts]))


SLOW, FAST, FASTER = ([rate + 0.1 * at for at in range(5)] for rate in (10.0, 13.0, 14.0))


def test_the_fastest_micro_batch_is_chosen(plan: Plan) -> None:
    base = Candidate("x", plan)
    (choice,) = chosen(
        plan, (base, SLOW), (changed(plan, "1024", n_ubatch=1024), FAST),
        (changed(plan, "4096", n_ubatch=4096, n_batch=4096), FASTER),
    )  # fmt: skip
    assert (choice.setting, choice.value, choice.base) == ("n_ubatch", 4096, 512)
    assert choice.low > 1.05


def test_without_a_gain_the_micro_batch_stays(plan: Plan) -> None:
    base = Candidate("x", plan)
    (choice,) = chosen(plan, (base, SLOW), (changed(plan, "1024", n_ubatch=1024), [rate * 1.03 for rate in SLOW]))
    assert (choice.value, choice.base) == (512, 512)


def test_a_threshold_of_op_offload_is_chosen(plan: Plan) -> None:
    base = Candidate("x", plan.with_layout(make_layout(8, [CPU_ID] * 4 + ["CUDA0"] * 4)))
    (choice,) = chosen(plan, (base, SLOW), (changed(base.plan, "8", op_offload_min_batch=8), FAST))
    assert (choice.setting, choice.value, choice.base) == ("op_offload_min_batch", 8, 32)


def test_what_differs_otherwise_or_was_disturbed_chooses_nothing(plan: Plan) -> None:
    base = Candidate("x", plan)
    other = changed(plan, "both", n_ubatch=1024, flash_attn="off")
    assert chosen(plan, (base, SLOW), (other, FAST)) == []
    larger = changed(plan, "1024", n_ubatch=1024)
    assert chosen(plan, (base, SLOW), (larger, FAST), other_load=2 * BUSY_LOAD) == []
    assert chosen(plan, (base, SLOW[:3]), (larger, FAST[:3])) == [], "too few rounds for an interval"


def learnt(plan: Plan, *layouts: tuple[Candidate, Sequence[float]]) -> Rig:
    """Return the rig with the choices of a benchmark."""
    return EMPTY_BOOK.with_choices(chosen(plan, *layouts)).apply(plan.rig)


def test_a_first_layout_has_the_measured_micro_batch(plan: Plan) -> None:
    rig = learnt(plan, (Candidate("x", plan), SLOW), (changed(plan, "1024", n_ubatch=1024), FAST))
    edit = with_measured_batches(plan.memory, rig, plan.edit)
    assert (edit.context.n_ubatch, edit.context.n_batch) == (1024, 2048)
    found = [each for each in Plan(plan.memory, rig, edit).resolved.decisions if each.setting == "n_ubatch"]
    assert [(each.value, each.reason.partition(" (")[0]) for each in found] == [
        (1024, "Chosen by measuring prompt speed: 1.29 times as fast as with 512")
    ]
    # Other devices, and a micro batch that the user chose.
    elsewhere = replace(plan.edit, layout=single_device(8, CPU_ID))
    assert with_measured_batches(plan.memory, rig, elsewhere) == elsewhere
    by_hand = changed(plan, "", n_ubatch=256).plan.edit
    assert with_measured_batches(plan.memory, rig, by_hand) == by_hand


def test_a_measured_micro_batch_that_does_not_fit_is_not_used(plan: Plan) -> None:
    rig = learnt(plan, (Candidate("x", plan), SLOW), (changed(plan, "4096", n_ubatch=4096, n_batch=4096), FAST))
    need = next(row.need_bytes for row in plan.forecast if row.id == "CUDA0")
    card = replace(rig.devices[0], free_bytes=need + rig.devices[0].margin_bytes + (1 << 20))
    tight = replace(rig, devices=(card,))
    assert Plan(plan.memory, tight, plan.edit).report.fits
    assert with_measured_batches(plan.memory, tight, plan.edit) == plan.edit
    assert with_measured_batches(plan.memory, rig, plan.edit).context.n_ubatch == 4096


def test_a_measured_threshold_is_used_where_none_is_chosen(plan: Plan) -> None:
    mixed = plan.with_layout(make_layout(8, [CPU_ID] * 4 + ["CUDA0"] * 4))
    rig = learnt(plan, (Candidate("x", mixed), SLOW), (changed(mixed, "8", op_offload_min_batch=8), FAST))
    used = mixed.on(rig)
    assert used.settings.op_offload_min_batch == 8
    assert environment(used)["GGML_OP_OFFLOAD_MIN_BATCH"] == "8"
    by_hand = changed(used, "", op_offload_min_batch=64).plan
    assert by_hand.settings.op_offload_min_batch == 64
    decisions = {each.setting: each for each in used.resolved.decisions}
    assert not decisions["op_offload_min_batch"].overridden
    assert decisions["op_offload_min_batch"].reason.startswith("Chosen by measuring prompt speed: 1.29 times")
    assert plan.on(rig).settings.op_offload_min_batch is None, "of another layout"


def test_threads_of_a_measured_machine(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.planning.fit.speed_book import machine_key

    machine = machine_key(RIG.host)
    found = [
        MeasuredChoice("threads", 8, 16, 1.2, 1.1, 1.3, machine),
        MeasuredChoice("threads_batch", 16, 16, 1.0, 1.0, 1.0, machine),
        MeasuredChoice("bound_threads", 1, 0, 1.1, 1.05, 1.2, machine),
    ]
    monkeypatch.setattr("engine.runtime.plan_requests.core_cpus", lambda: ((0, 2), (1, 3)))
    used = plan.on(EMPTY_BOOK.with_choices(found).apply(RIG))
    assert (used.settings.threads, used.settings.threads_batch) == (8, 16)
    assert environment(used)["OMP_PLACES"] == "{0,2},{1,3}"
    by_hand = changed(used, "", threads=3).plan
    assert (by_hand.settings.threads, by_hand.settings.threads_batch) == (3, 3)
    assert "OMP_PLACES" not in environment(by_hand)
    elsewhere = [msgspec.structs.replace(each, machine="elsewhere") for each in found]
    assert EMPTY_BOOK.with_choices(elsewhere).apply(RIG) == RIG
