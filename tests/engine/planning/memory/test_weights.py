"""Weights and state, compared with the engine's numbers; weights that a device leaves to the host."""

from __future__ import annotations

import pytest

from engine.base.values import replace
from engine.devices.device import CPU_ID, Fault, Findings
from engine.planning.layout.layout import Layout, Override, Run
from engine.planning.memory.estimate import DeviceMemory
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.settings.context_settings import ContextSettings, LoadMode
from tests.support.selection import some
from tests.support.truth import MODEL_NAMES, stand_in_rig, truth_cases, truth_model
from tests.zoo.compare import compare_model


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_weights_and_state_are_exact(name: str) -> None:
    tally = compare_model(name, some(truth_cases(name)))
    assert tally.n_cases > 0
    assert [str(difference) for difference in tally.differences] == []
    assert tally.unknown == []


# What a dry run of Mixtral 8x7B on llvmpipe tells of the host, with all layers on one device.
REPACKED_BYTES, PLAIN_BYTES, PINNED_BYTES = 21_139_292_160, 6_165_626_880, 73_728_000
_HEADER_BYTES = 32
"""Memory that the device reads directly is larger by this once it is taken."""


def _host(load_mode: LoadMode, *, overrides: tuple[Override, ...] = (), extra_buffers: bool = True) -> DeviceMemory:
    model = truth_model("mixtral-8x7b")
    rig = stand_in_rig("vulkan")
    if not extra_buffers:
        rig = replace(rig, host=replace(rig.host, findings=Findings((Fault("extra_buffers", "they crash"),))))
    layout = Layout(model.n_layers, (Run("D0", 0, model.n_layers - 1),), "D0", overrides=overrides)
    return ModelMemory(model).estimate(layout, ContextSettings(load_mode=load_mode), rig).devices[CPU_ID]


@pytest.mark.parametrize("overrides", [(), (Override("D0", pattern="output_norm"),)])
def test_what_a_device_leaves_to_the_host_is_repacked_there(overrides: tuple[Override, ...]) -> None:
    host = _host("none", overrides=overrides)
    assert host.weights_bytes == REPACKED_BYTES + PLAIN_BYTES + PINNED_BYTES + _HEADER_BYTES
    assert host.mapped_bytes == 0


@pytest.mark.parametrize("overrides", [(), (Override("D0", pattern="output_norm"),)])
def test_repacked_weights_are_memory_of_our_own_where_the_file_is_mapped(overrides: tuple[Override, ...]) -> None:
    assert _host("mmap", overrides=overrides).weights_bytes == REPACKED_BYTES


def test_nothing_is_repacked_where_that_is_switched_off() -> None:
    assert _host("mmap", extra_buffers=False).weights_bytes == 0
