"""Compute graphs built in sections: the same bytes as the whole graph, and little work for a new layout."""

from __future__ import annotations

import random

import pytest

from engine.devices.device import CPU_ID, Device, Rig, make_host
from engine.planning.layout.layout import Layout, Override, make_layout
from engine.planning.memory.compute_graph.building import graph_tables
from engine.planning.memory.compute_graph.building.graph_tables import SectionMaker
from engine.planning.memory.compute_graph.ggml.allocator import Gallocr
from engine.planning.memory.compute_graph.ggml.sections import partition_graph
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.settings.context_settings import ContextSettings
from tests.support.truth import truth_model

DEVICES = ("A", "B", "C", "D", "E")
RIG = Rig(tuple(Device(name, "card", "CUDA", "gpu", 1 << 40) for name in DEVICES), make_host("host", 1 << 41))
EXPERTS = Override(CPU_ID, pattern=r"\.ffn_(up|down|gate)_exps")
NAMES = (
    "falcon-mamba-7b", "gemma-3-4b", "gpt-oss-20b", "jamba-v0.1-52b", "llama-3.2-1b", "nemotron-nano-9b-v2",
    "nemotron_h-dense", "qwen35-dense",
)  # fmt: skip
FAR_REACHING = ("gemma3n-dense", "hrm_text-dense", "nanbeige-turned", "t5-dense")
"""Models whose layers read what others made that are not their neighbours."""


def _layout(n_layers: int, numbers: random.Random) -> Layout:
    """Return a layout of up to five runs in any order, with an output anywhere and perhaps with overrides."""
    cuts = sorted(numbers.sample(range(1, n_layers), min(4, n_layers - 1)))
    places: list[str] = []
    for start, end in zip([0, *cuts], [*cuts, n_layers], strict=True):
        places += [numbers.choice((CPU_ID, *DEVICES))] * (end - start)
    layout = make_layout(n_layers, places, numbers.choice((None, CPU_ID, *DEVICES)))
    overrides: tuple[Override, ...] = ()
    if numbers.random() < 0.5:
        first = numbers.randrange(n_layers)
        moved = Override(numbers.choice(DEVICES), part="all", first=first, last=numbers.randrange(first, n_layers))
        overrides = numbers.choice(((EXPERTS,), (moved,), (moved, EXPERTS)))
    return Layout(n_layers, layout.runs, layout.output_device, overrides=overrides)


@pytest.mark.parametrize("name", [*NAMES, *FAR_REACHING])
def test_sections_come_to_what_the_whole_graph_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = random.Random(name)
    model = truth_model(name)
    context = ContextSettings(n_ctx=8192, n_ubatch=numbers.choice((16, 512)))
    layouts = [_layout(model.n_layers, numbers) for _ in range(4)]
    in_sections = ModelMemory(model)
    found = [in_sections.estimate(layout, context, RIG).devices for layout in layouts]
    in_one = ModelMemory(model)
    tables = in_one.for_context(context)
    assert tables is not None
    assert tables.compute is not None
    monkeypatch.setattr(tables.compute, "_whole", True)
    monkeypatch.setattr(graph_tables, "partition_graph", lambda graph, _, common: partition_graph(graph, (), common))
    assert found == [in_one.estimate(layout, context, RIG).devices for layout in layouts]


@pytest.mark.parametrize(
    "name",
    [
        "llama-3.1-405b",
        "falcon-mamba-7b",
        "gemma-3-4b",
        "granite-4.0-h-small",
        "qwen3-vl-30b",
    ],
)
def test_a_boundary_that_moves_asks_for_few_new_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    buft = ModelMemory(truth_model(name))
    n_layers = buft.model.n_layers
    work = {"sections": 0, "steps": 0}
    make, fill = SectionMaker._make, Gallocr.fill
    monkeypatch.setattr(SectionMaker, "_make", lambda *a: (work.update(sections=work["sections"] + 1), make(*a))[1])
    monkeypatch.setattr(Gallocr, "fill", lambda *a: (work.update(steps=work["steps"] + 1), fill(*a))[1])
    for cut in range(n_layers // 3, n_layers // 3 + 8):
        places = ["A"] * cut + ["B"] * (n_layers - cut)
        buft.estimate(make_layout(n_layers, places, None), ContextSettings(), RIG)
    first = dict(work)
    assert first["steps"] > 0
    for cut in range(n_layers // 3 + 8, n_layers // 3 + 12):
        places = ["A"] * cut + ["B"] * (n_layers - cut)
        buft.estimate(make_layout(n_layers, places, None), ContextSettings(), RIG)
    assert work["sections"] == first["sections"]
    assert work["steps"] - first["steps"] <= 4 * n_layers // 4


def test_what_was_found_at_one_boundary_holds_at_others(monkeypatch: pytest.MonkeyPatch) -> None:
    buft = ModelMemory(truth_model("qwen3-30b-a3b"))
    n_layers, work = buft.model.n_layers, {"steps": 0}
    fill = Gallocr.fill
    monkeypatch.setattr(Gallocr, "fill", lambda *a: (work.update(steps=work["steps"] + 1), fill(*a))[1])
    counts = []
    for moved in ((0, 0), (1, 0), (0, 1)):
        cuts = [0, 9, 19 + moved[0], 29 + moved[1], 39, n_layers]
        places = [DEVICES[place] for place in range(5) for _ in range(cuts[place + 1] - cuts[place])]
        work["steps"] = 0
        buft.estimate(make_layout(n_layers, places, None), ContextSettings(), RIG)
        counts.append(work["steps"])
    assert counts[0] > 0
    assert counts[2] <= counts[1] // 2
