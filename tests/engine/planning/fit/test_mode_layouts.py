"""Changing the split mode of a layout: the chosen device, and the overrides."""

from __future__ import annotations

import pytest

from engine.base.units import GIB
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Rig, make_host
from engine.planning.fit.mode_layouts import layout_in_split_mode, without_refused_overrides
from engine.planning.layout.layout import Layout, Override, make_layout
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.settings.context_settings import ContextSettings
from tests.support.previews import make_gpu
from tests.support.truth import truth_model

NEW = make_gpu("CUDA0", 24, name="NVIDIA GeForce RTX 4090", used_gib=0.9)
OLD = make_gpu("CUDA1", 24, name="NVIDIA GeForce RTX 3090", used_gib=0.1)
LARGE = make_gpu("CUDA2", 80, name="NVIDIA A100", used_gib=0.1)


def plan_on(name: str, *devices: Device, mostly: str = "CUDA1") -> Plan:
    """Return a plan with most layers on one device, and the first on another."""
    model = truth_model(name)
    layout = make_layout(model.n_layers, ["CUDA0"] + [mostly] * (model.n_layers - 1))
    rig = Rig(devices, make_host("host", 256 * GIB, 250 * GIB))
    return Plan(ModelMemory(model), rig, Edit(layout, ContextSettings(n_ctx=4096)))


@pytest.mark.parametrize(
    ("name", "devices", "expected"),
    [
        ("llama-3.1-8b", (OLD, NEW), "CUDA0"),  # Both hold it: the faster one.
        ("gpt-oss-120b", (OLD, NEW), "CUDA0"),  # Neither holds it, and the slower one has a little more free.
        ("mixtral-8x7b", (OLD, NEW, LARGE), "CUDA2"),  # One holds it.
        ("llama-3.1-8b", (), CPU_ID),
    ],
)
def test_one_device_is_the_fastest_that_holds_the_model(name: str, devices: tuple[Device, ...], expected: str) -> None:
    layout = layout_in_split_mode(plan_on(name, *devices), "none")
    assert layout.split_mode == "none"
    assert layout.devices == (expected,)


def test_one_device_keeps_overrides_to_the_cpu_only() -> None:
    plan = plan_on("gpt-oss-120b", NEW, OLD)
    kept = Override(CPU_ID, part="experts", first=10, last=20)
    mixed = replace(plan.edit.layout, overrides=(Override("CUDA1", part="experts", first=0, last=1), kept))
    assert layout_in_split_mode(plan.with_layout(mixed), "none").overrides == (kept,)


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        ((Override("CUDA1", part="experts"),), 0),
        ((Override("CUDA1", part="experts", first=0, last=1), Override(CPU_ID, part="experts", first=3, last=5)), 1),
        ((Override("CUDA1", pattern="ffn_up_exps"), Override(CPU_ID, pattern="ffn_up_exps")), 0),
    ],
)
def test_overrides_that_tensor_mode_cannot_have_can_be_dropped(overrides: tuple[Override, ...], kept: int) -> None:
    plan = plan_on("mixtral-8x7b", NEW, OLD)
    mixed = replace(plan.edit.layout, overrides=overrides)
    assert without_refused_overrides(plan.with_layout(mixed)) is None, "mode layer takes them"
    refused: Layout = layout_in_split_mode(plan.with_layout(mixed), "tensor")
    assert {each.rule for each in plan.with_layout(refused).violations} == {"split_override"}
    found = without_refused_overrides(plan.with_layout(refused))
    assert found is not None
    assert len(found.edit.layout.overrides) == kept
    assert plan.with_edit(found.edit).violations == ()
    assert found.edit.layout.split_mode == "tensor"
    assert found.text == f"Drop {len(overrides) - kept} override{'' if len(overrides) - kept == 1 else 's'}"
