"""Graphs that must be built as a whole: with moved weights they equal a newly built graph."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from engine.base.units import GIB
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Rig, make_host
from engine.model.gguf.model_file import ModelFile
from engine.planning.layout.engine_parameters import TensorOverride
from engine.planning.layout.layout import Layout, Override, make_layout
from engine.planning.memory.compute_graph.building.graph_tables import SectionMaker
from engine.planning.memory.compute_graph.ggml.graph import Tensor
from engine.planning.memory.compute_graph.ggml.sections import Section
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.settings.context_settings import ContextSettings
from tests.support.selection import examples
from tests.support.truth import truth_model

RIG = Rig(
    (
        *(Device(f"G{number}", "card", "CUDA", "gpu", 64 * GIB) for number in range(3)),
        Device("V0", "card", "Vulkan", "gpu", 64 * GIB),
    ),
    make_host("host", 256 * GIB),
)
CONTEXT = ContextSettings(n_ctx=4096)
NAMES = ("qwen3-vl-30b", "gemma4-dense", "glm5-next-moe")


def random_layout(model: ModelFile, numbers: random.Random) -> Layout:
    ids = [CPU_ID, *numbers.sample(["G0", "G1", "G2", "V0"], 3)]
    cuts = sorted(numbers.choices(range(model.n_layers + 1), k=3))
    places = [
        device
        for device, begin, end in zip(ids, [0, *cuts], [*cuts, model.n_layers], strict=True)
        for _ in range(end - begin)
    ]
    overrides = []
    for _ in range(numbers.randrange(3)):
        name = numbers.choice(numbers.choice(model.blocks).tensors).name.replace(".", r"\.")
        overrides.append(Override(numbers.choice(ids), pattern=f"^{name}$"))
    if numbers.random() < 0.5:
        first = numbers.randrange(model.n_layers)
        last = numbers.randrange(first, model.n_layers)
        overrides.append(Override(CPU_ID, part="experts", first=first, last=last))
    return replace(make_layout(model.n_layers, places, numbers.choice(ids)), overrides=tuple(overrides))


@pytest.mark.parametrize("name", NAMES)
def test_sections_with_moved_weights_equal_those_of_a_new_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, numbers = truth_model(name), random.Random(name)
    layouts = [random_layout(model, numbers) for _ in range(examples(8))]
    memory = ModelMemory(model)
    found = [memory.estimate(layout, CONTEXT, RIG) for layout in layouts]
    assert memory.unknown == ()

    def built_anew(
        maker: SectionMaker, overrides: tuple[TensorOverride, ...], kernel_classes: tuple[int, ...]
    ) -> tuple[Section, ...]:
        return maker._partition(overrides, kernel_classes)[0]

    monkeypatch.setattr(SectionMaker, "_make_parts", built_anew)
    memory = ModelMemory(model)
    assert [memory.estimate(layout, CONTEXT, RIG) for layout in layouts] == found


def test_a_graph_is_built_once_for_all_experts_that_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    model = truth_model("qwen3-vl-30b")
    memory, built = ModelMemory(model), []
    partition = SectionMaker._partition

    def count(
        maker: SectionMaker, overrides: tuple[TensorOverride, ...], kernel_classes: tuple[int, ...]
    ) -> tuple[tuple[Section, ...], Mapping[Tensor, str]]:
        built.append((maker, kernel_classes))
        return partition(maker, overrides, kernel_classes)

    monkeypatch.setattr(SectionMaker, "_partition", count)
    whole = make_layout(model.n_layers, ["G0"] * model.n_layers)
    for last in range(4):
        moved = Override(CPU_ID, part="experts", first=0, last=last)
        memory.estimate(replace(whole, overrides=(moved,)), CONTEXT, RIG)
    assert len(built) == len(set(built)) > 0
