"""A plan: decisions, forecast, probed values, the child's parameters, and what its key depends on."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.base.errors import ModelFileError, RuleViolationError
from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Rig, make_host
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import Layout, Run, single_device
from engine.planning.memory import model_memory
from engine.planning.memory.context_memory import ContextMemory
from engine.planning.memory.estimate import DeviceMemory, Grade
from engine.planning.memory.side_files import Projector, SideFiles
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.plan.report import DeviceRow, make_row
from engine.planning.settings.context_settings import AUTO_CONTEXT, ContextSettings
from engine.runtime.plan_requests import environment, load_request, probe_request
from engine.runtime.protocol.requests import OFFLOAD_VARIABLE
from tests.support.models import write_tiny_llama
from tests.support.plans import make_plan

CONTEXT = ContextSettings(n_ctx=1024, n_batch=64, n_ubatch=64)
N_LAYERS = 4
CARD = Device("CUDA0", "card", "CUDA", "gpu", 8 * GIB, free_bytes=7 * GIB)
RIG = Rig((CARD,), make_host("host", 8 * GIB, 8 * GIB))


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    model = read_model(write_tiny_llama(tmp_path / "tiny.gguf", n_layers=N_LAYERS, n_ctx_train=32768))
    return make_plan(model, RIG, Edit(single_device(N_LAYERS, "CUDA0"), CONTEXT))


def with_free(rig: Rig, free_bytes: int) -> Rig:
    return Rig(tuple(replace(device, free_bytes=free_bytes) for device in rig.devices), rig.host)


def probed_rows(plan: Plan, compute_bytes: int = 77 * MIB) -> tuple[DeviceRow, ...]:
    return tuple(
        make_row(device, DeviceMemory(compute_bytes=compute_bytes), Grade.PROBED) for device in RIG.all_devices
    )


def settings(plan: Plan, **changed: object) -> Plan:
    return plan.with_edit(replace(plan.edit, context=msgspec.structs.replace(plan.edit.context, **changed)))


def test_what_is_left_open_is_decided_once_and_told_to_the_child(plan: Plan) -> None:
    open_plan = settings(plan, n_ctx=AUTO_CONTEXT)
    assert open_plan.settings.n_ctx > 0
    assert open_plan.settings.load_mode != "auto"
    assert load_request(open_plan).context == probe_request(open_plan).context == open_plan.settings
    assert open_plan.report.context == open_plan.settings
    assert {each.setting for each in open_plan.decisions} >= {"n_ctx", "threads", "load_mode"}
    assert open_plan.edit.context.n_ctx == AUTO_CONTEXT


def test_probed_rows_are_laid_over_whatever_is_free_now(plan: Plan) -> None:
    assert {row.grade for row in plan.forecast} == {Grade.ESTIMATED}
    tight = plan.on(with_free(RIG, 70 * MIB)).with_probed(probed_rows(plan))
    row = tight.forecast[0]
    assert (row.grade, row.compute_bytes, row.free_bytes) == (Grade.PROBED, 77 * MIB, 70 * MIB)
    assert row.shortfall_bytes == 7 * MIB
    assert not tight.report.fits
    assert plan.with_probed(probed_rows(plan)).report.fits
    assert tight.report.decisions == plan.on(tight.rig).report.decisions


def test_another_edit_or_rig_is_not_probed(plan: Plan) -> None:
    probed = plan.with_probed(probed_rows(plan))
    assert probed.with_layout(single_device(N_LAYERS, CPU_ID)).probed is None
    assert probed.on(with_free(RIG, GIB)).probed is None


def test_the_key_is_what_the_engine_plans_for(plan: Plan) -> None:
    assert plan.key is not None
    assert plan.with_own_tables().key == plan.key
    assert plan.on(with_free(RIG, 6 * GIB)).key == plan.key
    assert settings(plan, threads=3, threads_batch=5).key == plan.key
    others = [
        settings(plan, n_ctx=2048),
        settings(plan, type_k="q8_0"),
        settings(plan, op_offload_min_batch=96),
        plan.with_layout(single_device(N_LAYERS, CPU_ID)),
        plan.on(Rig((replace(CARD, overhead_bytes=300 * MIB),), RIG.host)),
        plan.on(Rig((replace(CARD, pci_bus_id="0000:01:00.0"),), RIG.host)),
    ]
    assert len({plan.key, *(each.key for each in others)}) == 1 + len(others)


def test_a_length_left_open_has_the_key_of_the_length_that_is_used(plan: Plan) -> None:
    open_plan = settings(plan, n_ctx=AUTO_CONTEXT)
    short = open_plan.on(with_free(RIG, CARD.margin_bytes + open_plan.forecast[0].need_bytes - MIB))
    assert short.settings.n_ctx < open_plan.settings.n_ctx
    assert short.key != open_plan.key
    assert settings(plan, n_ctx=short.settings.n_ctx).key == short.key


def test_a_file_that_changed_has_another_key_and_one_that_went_none(plan: Plan) -> None:
    (path,) = plan.model.paths
    before = plan.key
    os.utime(path, ns=(1, 1))
    assert plan.with_edit(plan.edit).key != before
    path.unlink()
    assert plan.with_edit(plan.edit).key is None


def test_the_device_that_a_projector_goes_to_is_part_of_the_key(plan: Plan) -> None:
    projector = Projector(Path("mmproj.gguf"), plan.model.tensors)
    beside = plan.with_edit(replace(plan.edit, side_files=SideFiles(projector)))
    full = beside.on(with_free(RIG, 0))
    assert (beside.resolved.projector_device, full.resolved.projector_device) == ("CUDA0", CPU_ID)
    assert plan.key != beside.key != full.key


def test_an_edit_that_breaks_a_rule_is_told_to_nobody(plan: Plan) -> None:
    broken = plan.with_layout(single_device(N_LAYERS, "GONE"))
    assert [each.rule for each in broken.violations] == ["unknown_device"]
    assert broken.report.violations == broken.violations
    assert broken.key is None
    with pytest.raises(RuleViolationError, match="GONE"):
        load_request(broken)
    with pytest.raises(RuleViolationError):
        probe_request(broken)


def test_a_path_that_is_no_text_cannot_be_loaded(plan: Plan) -> None:
    odd = replace(plan.model, paths=(Path("\udcff.gguf"),))
    with pytest.raises(ModelFileError, match="UTF-8"):
        load_request(make_plan(odd, plan.rig, plan.edit))


def test_a_chosen_threshold_is_said_in_the_environment(plan: Plan) -> None:
    assert environment(plan) == {}
    assert environment(settings(plan, op_offload_min_batch=96)) == {OFFLOAD_VARIABLE: "96"}


def test_the_workers_of_a_plan_are_those_of_its_layout_and_its_projector(plan: Plan) -> None:
    workers = tuple(
        Device(f"RPC{number}", "attic", "RPC", "gpu", GIB, endpoint=f"attic:{number // 2}") for number in range(4)
    )
    rig = Rig(workers, RIG.host)
    layout = Layout(N_LAYERS, (Run("RPC0", 0, 1), Run("RPC1", 2, 3)), CPU_ID)
    found = plan.on(rig).with_layout(layout)
    assert found.used_endpoints == {"attic:0": workers[:2]}
    projector = Projector(Path("mmproj.gguf"), (), device="RPC3")
    beside = found.with_edit(replace(found.edit, side_files=SideFiles(projector)))
    assert beside.used_endpoints == {"attic:0": workers[:2], "attic:1": workers[3:]}


@pytest.mark.parametrize(("n_ctx", "n_kept"), [(1024, 4), (AUTO_CONTEXT, 12)])
def test_tables_of_a_search_are_let_go_as_it_goes_on(plan: Plan, n_ctx: int, n_kept: int) -> None:
    memory = settings(plan, n_ctx=n_ctx).with_own_tables().memory
    layout = plan.edit.layout
    tables = []
    for each in range(1, 2 * n_kept):
        context = msgspec.structs.replace(CONTEXT, n_ctx=256 * each)
        memory.estimate(layout, context, RIG)
        tables.append(weakref.ref(memory.for_context(context)))
    # At once, without a search for garbage: the latest.
    assert [each() is not None for each in tables] == [False] * (n_kept - 1) + [True] * n_kept


def test_a_drag_with_everything_left_open_makes_no_tables_twice(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ContextSettings] = []

    class CountedMemory(ContextMemory):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(arguments[-1])

    monkeypatch.setattr(model_memory, "ContextMemory", CountedMemory)
    full = replace(CARD, total_bytes=48 * GIB, free_bytes=0)
    opened = settings(plan, n_ctx=AUTO_CONTEXT, op_offload="auto").on(Rig((full,), RIG.host))
    for n_on_cpu in (1, 2, 3, 1):
        layout = Layout(N_LAYERS, (Run(CPU_ID, 0, n_on_cpu - 1), Run("CUDA0", n_on_cpu, N_LAYERS - 1)), "CUDA0")
        assert not opened.with_layout(layout).report.fits
    lengths = [context.n_ctx for context in made]
    assert lengths == sorted(set(lengths), reverse=True)
    assert lengths[0] == 32768
    assert lengths[-1] == 256


def test_moving_the_output_layer_is_only_advised_if_its_device_has_room(plan: Plan) -> None:
    def is_advised(of: Plan) -> bool:
        return "output_on_cpu" in {each.rule for each in of.advice}

    on_cpu = plan.with_layout(plan.edit.layout.move_output(CPU_ID))
    assert is_advised(on_cpu)
    taken_bytes = on_cpu.forecast[0].need_bytes
    assert not is_advised(on_cpu.on(with_free(RIG, taken_bytes)))
    last_on_cpu = plan.with_layout(plan.edit.layout.move_range(2, 3, CPU_ID))
    assert not is_advised(last_on_cpu), "there the output layer is on the device of the last layers"
