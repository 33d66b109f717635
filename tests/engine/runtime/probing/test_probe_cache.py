"""The cache of probes: repeated questions, changed files, and its size."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Rig, make_host
from engine.machines.rigs.discovery import host_device
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import single_device
from engine.planning.memory import model_memory
from engine.planning.memory.estimate import DeviceMemory, Grade, MemoryEstimate
from engine.planning.memory.side_files import SideFiles, read_projector
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.plan.report import make_row
from engine.planning.settings.context_settings import AUTO_CONTEXT, ContextSettings
from engine.runtime.probing.probe import ProbeCache, ProbeRun, Probes
from engine.runtime.process.blocking_child import BlockingChild, SpareChild
from engine.runtime.protocol.requests import OFFLOAD_VARIABLE
from tests.support.load_specs import N_LAYERS, made_up_model, plan_of
from tests.support.models import write_tiny_llama
from tests.support.plans import make_plan
from tests.support.side_models import write_tiny_projector

CONTEXT = ContextSettings(n_ctx=256, n_batch=64, n_ubatch=64)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"x" * 100)
    rig = Rig((), make_host("host", 8 * GIB, 8 * GIB))
    return plan_of(made_up_model(path), rig, single_device(N_LAYERS, CPU_ID), CONTEXT)


def probed(plan: Plan, weights_bytes: int = 7) -> Plan:
    return plan.with_probed((make_row(plan.rig.host, DeviceMemory(weights_bytes=weights_bytes), Grade.PROBED),))


def with_settings(plan: Plan, **changes: object) -> Plan:
    return plan.with_edit(replace(plan.edit, context=msgspec.structs.replace(plan.edit.context, **changes)))


def test_the_same_question_has_the_same_answer_against_the_memory_of_now(plan: Plan) -> None:
    cache = ProbeCache()
    assert cache.over(plan) is plan
    cache.keep(probed(plan))
    assert cache.over(plan) == probed(plan)
    other_threads = with_settings(plan, threads=3)
    assert cache.over(other_threads).probed == probed(plan).probed
    (row,) = cache.over(plan.on(Rig((), make_host("host", 8 * GIB, GIB)))).forecast
    assert (row.weights_bytes, row.free_bytes, row.grade) == (7, GIB, Grade.PROBED)


def test_other_settings_and_a_changed_file_are_other_questions(plan: Plan) -> None:
    cache = ProbeCache()
    cache.keep(probed(plan))
    assert cache.over(with_settings(plan, n_ctx=512)).probed is None
    (path,) = plan.model.paths
    path.write_bytes(b"x" * 101)
    assert cache.over(with_settings(plan)).probed is None
    path.unlink()
    assert cache.over(with_settings(plan)).probed is None
    cache.keep(probed(with_settings(plan)))
    assert cache.over(with_settings(plan)).probed is None


def test_a_length_left_open_gets_the_rows_of_the_length_that_is_used(tmp_path: Path) -> None:
    model = read_model(write_tiny_llama(tmp_path / "tiny.gguf", n_ctx_train=32768))
    card = Device("CUDA0", "card", "CUDA", "gpu", 8 * GIB)
    rig = Rig((card,), make_host("host", 8 * GIB))
    layout, context = single_device(model.n_layers, card.id), ContextSettings(n_ctx=AUTO_CONTEXT, n_ubatch=64)
    ample = plan_of(model, rig, layout, context)
    tight = ample.on(Rig((replace(card, free_bytes=ample.forecast[0].need_bytes - MIB),), rig.host))
    cache = ProbeCache()
    cache.keep(probed(ample))
    assert tight.settings.n_ctx < ample.settings.n_ctx
    assert cache.over(tight).probed is None


def test_the_least_used_goes_first(plan: Plan) -> None:
    cache = ProbeCache(capacity=2)
    plans = [with_settings(plan, n_ctx=256 * (1 + number)) for number in range(3)]
    cache.keep(probed(plans[0]))
    cache.keep(probed(plans[1]))
    assert cache.over(plans[0]).probed is not None
    cache.keep(probed(plans[2]))
    assert [cache.over(each).probed is not None for each in plans] == [True, False, True]


def test_a_second_probe_needs_no_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = read_model(write_tiny_llama(tmp_path / "tiny.gguf"))
    rig, layout, cache = Rig((), host_device()), single_device(model.n_layers, CPU_ID), ProbeCache()
    first = ProbeRun(plan_of(model, rig, layout, CONTEXT), cache).run()
    assert {row.grade for row in first.forecast} == {Grade.PROBED}

    def refuse(*_arguments: object, **_options: object) -> None:
        raise AssertionError("a child was asked")

    monkeypatch.setattr("engine.runtime.process.blocking_child.BlockingChild", refuse)
    assert ProbeRun(plan_of(model, rig, layout, CONTEXT), cache).run().report == first.report


def test_a_forecast_that_is_far_off_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def far_off(*_arguments: object) -> MemoryEstimate:
        return MemoryEstimate({CPU_ID: DeviceMemory(weights_bytes=500 * MIB)}, Grade.ESTIMATED)

    model = read_model(write_tiny_llama(tmp_path / "tiny.gguf"))
    layout, rig = single_device(model.n_layers, CPU_ID), Rig((), host_device())
    with caplog.at_level(logging.WARNING):
        ProbeRun(plan_of(model, rig, layout, CONTEXT)).run()
        assert caplog.records == []
        monkeypatch.setattr(model_memory.ModelMemory, "estimate", far_off)
        ProbeRun(plan_of(model, rig, layout, CONTEXT)).run()
    (record,) = caplog.records
    assert record.name == "layerdeck.defects"
    assert str(tmp_path) not in record.getMessage()


def test_a_chosen_threshold_has_a_child_of_its_own(tmp_path: Path) -> None:
    model = read_model(write_tiny_llama(tmp_path / "m.gguf", n_layers=4))
    rig, layout = Rig((), make_host("host", 8 * GIB)), single_device(4, CPU_ID)
    wanted: list[Mapping[str, str]] = []

    class Spare(SpareChild):
        def take(self, environment: Mapping[str, str] | None = None) -> BlockingChild:
            wanted.append(environment or {})
            return super().take(environment)

    spare = Spare(timeout_s=60.0)
    chosen = msgspec.structs.replace(CONTEXT, op_offload_min_batch=96)
    with Probes(spare=spare) as probes:
        for context in (CONTEXT, CONTEXT, chosen, chosen):
            probes.probed(plan_of(model, rig, layout, context))
    spare.close()
    assert wanted == [{}, {OFFLOAD_VARIABLE: "96"}]


def test_another_projector_has_a_child_of_its_own(tmp_path: Path) -> None:
    """The child of the first probe may not read it."""
    model = read_model(write_tiny_llama(tmp_path / "m.gguf", n_layers=4))
    rig, layout = Rig((), make_host("host", 8 * GIB)), single_device(4, CPU_ID)
    projectors = [read_projector(write_tiny_projector(tmp_path / f"p{n}.gguf", n_embd=64)) for n in range(2)]
    taken: list[BlockingChild] = []

    class Spare(SpareChild):
        def take(self, environment: Mapping[str, str] | None = None) -> BlockingChild:
            taken.append(super().take(environment))
            return taken[-1]

    spare = Spare(timeout_s=60.0)
    with Probes(spare=spare) as probes:
        for projector in (None, projectors[0], projectors[0], projectors[1]):
            probes.probed(make_plan(model, rig, Edit(layout, CONTEXT, SideFiles(projector))))
    spare.close()
    assert len(taken) == 3
