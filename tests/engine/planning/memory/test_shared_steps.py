"""Graphs that are built whole: what was simulated for some devices holds for others of the same kinds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.base.units import GIB
from engine.devices.device import Device, Rig, make_host
from engine.planning.layout.layout import Override, make_layout
from engine.planning.memory.compute_graph.ggml import simulation
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.settings.context_settings import ContextSettings
from tests.support.truth import truth_model

IDS = ("G0", "G1", "G2", "G3")
RIG = Rig(tuple(Device(each, "card", "CUDA", "gpu", 8 * GIB) for each in IDS), make_host("host", 64 * GIB))


def test_steps_hold_for_other_devices_of_the_same_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[object] = []
    split_graph = simulation.StepCache._split_graph

    def counting(*arguments: object) -> object:
        computed.append(arguments)
        return split_graph(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(simulation.StepCache, "_split_graph", counting)
    memory = ModelMemory(truth_model("qwen3-vl-30b"))
    n_layers = memory.model.n_layers
    found = []
    for first, second in (("G0", "G1"), ("G2", "G3")):
        places = [first] * 20 + [second] * (n_layers - 20)
        layout = make_layout(n_layers, places)
        for overrides in ((), (Override(first, pattern=r"^blk\.30\.ffn_up_exps"), Override("CPU", part="experts"))):
            moved = replace(layout, overrides=overrides)
            devices = memory.estimate(moved, ContextSettings(n_ctx=4096), RIG).devices
            found.append((devices[first].compute_bytes, devices[second].compute_bytes, len(computed)))
    assert memory.probe_only is None
    assert found[0] == (*found[2][:2], found[0][2])
    assert found[1][:2] == found[3][:2]
    assert all(size > 0 for row in found for size in row[:2])
    assert found[3][2] == found[1][2]
