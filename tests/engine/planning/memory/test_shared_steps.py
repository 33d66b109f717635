"""Results cached for some devices or weights are reused for others of the same kinds."""

from __future__ import annotations

import pytest

from engine.base.units import GIB
from engine.base.values import replace
from engine.devices.device import Device, Rig, make_host
from engine.planning.layout.layout import Override, make_layout
from engine.planning.memory.compute_graph.building.graph_tables import SectionMaker
from engine.planning.memory.compute_graph.ggml import pass_cache
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.settings.context_settings import ContextSettings
from tests.support.truth import truth_model

IDS = ("G0", "G1", "G2", "G3")
RIG = Rig(tuple(Device(each, "card", "CUDA", "gpu", 8 * GIB) for each in IDS), make_host("host", 64 * GIB))


@pytest.mark.parametrize("name", ["qwen3-vl-30b", "granite-4.0-h-small"])  # built whole, built in sections
def test_steps_hold_for_other_devices_of_the_same_kinds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[object] = []
    split_graph = pass_cache.PassCache._split_graph

    def counting(*arguments: object) -> object:
        computed.append(arguments)
        return split_graph(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(pass_cache.PassCache, "_split_graph", counting)
    memory = ModelMemory(truth_model(name))
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


def test_nodes_are_made_once_for_all_places_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[object] = []
    build = SectionMaker._build

    def counting(*arguments: object, **others: object) -> object:
        built.append(arguments)
        return build(*arguments, **others)  # type: ignore[arg-type]

    monkeypatch.setattr(SectionMaker, "_build", counting)
    model = truth_model("granite-4.0-h-small")
    layout = make_layout(model.n_layers, ["G0"] * 20 + ["G1"] * (model.n_layers - 20))
    context, memory, counts = ContextSettings(n_ctx=4096), ModelMemory(model), []
    for matrix in ("up", "gate"):
        rules = (Override("G1", pattern=rf"^blk\.10\.ffn_{matrix}_exps"), Override("CPU", pattern=f"ffn_{matrix}_exps"))
        moved = replace(layout, overrides=rules)
        found = memory.estimate(moved, context, RIG)
        counts.append(len(built))
        assert found == ModelMemory(model).estimate(moved, context, RIG)
        del built[counts[-1] :]
    assert counts[0] > 0
    assert counts[1] == counts[0]
