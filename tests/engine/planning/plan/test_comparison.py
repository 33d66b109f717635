"""Differences of two plans: devices, shares, settings, memory and costs."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine.base.values import replace
from engine.devices.device import Rig
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import Override
from engine.planning.layout.parts import place_embedding, place_part
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.comparison import (
    DeviceChange,
    compare_plans,
    difference_text,
    figure_rows,
    memory_rows,
    side_of,
)
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.speed.speeds import NO_MEASUREMENTS
from tests.support.models import write_tiny_llama, write_tiny_moe
from tests.support.previews import make_gpu, make_layout, make_rig

RIG = make_rig(make_gpu("CUDA0", 24), make_gpu("CUDA1", 12))
ONE = make_layout(4, [("CUDA0", 4)])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    return read_model(write_tiny_moe(tmp_path_factory.mktemp("model") / "m.gguf", n_layers=4))


def plan(model: ModelFile, layout: object = ONE, rig: Rig = RIG, **fields: object) -> Plan:
    context = msgspec.structs.replace(ContextSettings(n_ctx=512), **fields)
    return Plan(ModelMemory(model), rig, Edit(layout, context))  # type: ignore[arg-type]


def test_a_plan_does_not_differ_from_itself(model: ModelFile) -> None:
    found = compare_plans(plan(model), plan(model))
    assert found.is_equal
    assert found.rows() == []


def test_ranges_of_layers_and_parts(model: ModelFile) -> None:
    other = place_embedding(place_part(make_layout(4, [("CUDA0", 1), ("CUDA1", 3)]), "experts", 2, 3, "CPU"), "CUDA0")
    found = compare_plans(plan(model), plan(model, other))
    assert found.devices == (
        DeviceChange("layer", 1, 3, "CUDA0", "CUDA1"),
        DeviceChange("experts", 2, 3, "CUDA0", "CPU"),
        DeviceChange("output", None, None, "CUDA0", "CUDA1"),
        DeviceChange("embedding", None, None, "CPU", "CUDA0"),
    )
    assert found.rows()[1] == ("Experts of layers 2-3", "CUDA0", "CPU")


def test_a_part_that_goes_with_its_layer_is_no_difference_of_its_own(model: ModelFile) -> None:
    found = compare_plans(plan(model), plan(model, make_layout(4, [("CUDA1", 4)])))
    assert [each.part for each in found.devices] == ["layer", "output"]


def test_shares_modes_and_settings(model: ModelFile) -> None:
    shared = replace(ONE, split_mode="tensor", tensor_split=(("CUDA0", 3.0), ("CUDA1", 1.0)))
    found = compare_plans(plan(model), plan(model, shared, n_ctx=1024, offload_kqv=False))
    rows = [(each.key, each.one, each.other) for each in found.values]
    assert rows == [
        ("split_mode", "layer", "tensor"),
        ("tensor_split", "–", "75 %"),
        ("tensor_split", "–", "25 %"),
        ("n_ctx", "512", "1024"),
        ("offload_kqv", "on", "off"),
    ]


def test_attention_and_feed_forward_are_compared_alone_if_they_are_apart(tmp_path: Path) -> None:
    model = read_model(write_tiny_llama(tmp_path / "m.gguf", n_layers=4))
    dense = place_part(ONE, "dense", 3, 3, "CUDA1")
    other = replace(ONE, overrides=(*dense.overrides, Override("CPU", "ffn", 0, 1)))
    found = compare_plans(plan(model), plan(model, other))
    assert found.devices == (
        DeviceChange("dense", 3, 3, "CUDA0", "CUDA1"),
        DeviceChange("ffn", 0, 1, "CUDA0", "CPU"),
    )
    assert compare_plans(plan(model, other), plan(model, other)).is_equal


def test_layouts_in_modes_tensor_and_row_are_compared_besides_their_shares(model: ModelFile) -> None:
    shares = (("CUDA0", 3.0), ("CUDA1", 1.0))
    row = replace(make_layout(4, [("CPU", 1), ("CUDA0", 3)]), split_mode="row", tensor_split=shares)
    other = replace(
        row,
        runs=ONE.runs,
        main_device="CUDA1",
        overrides=(Override("CPU", "experts", 0, 2), Override("CUDA1", "experts", 2, 3)),
    )
    rows = [(each.key, each.one, each.other) for each in compare_plans(plan(model, row), plan(model, other)).values]
    assert rows == [
        ("cpu_layers", "1", "0"),
        ("overrides", "–", "experts of layers 0-2: CPU; experts of layer 3: CUDA1"),
        ("main_device", "CUDA0", "CUDA1"),
    ]
    assert compare_plans(plan(model, row), plan(model, replace(row, main_device="CUDA0"))).is_equal


def test_other_patterns_are_told(model: ModelFile) -> None:
    other = replace(ONE, overrides=(Override("CPU", pattern=r"ffn_down"),))
    found = compare_plans(plan(model), plan(model, other))
    assert found.has_other_patterns
    assert found.rows() == [("Overrides by regular expression", "different", "different")]


def test_memory_and_costs_of_both_sides(model: ModelFile) -> None:
    two = plan(model, make_layout(4, [("CUDA0", 2), ("CUDA1", 2)]))
    sides = side_of(plan(model), NO_MEASUREMENTS), side_of(two, NO_MEASUREMENTS, 12.5)
    memory = {device: words for device, *words in memory_rows(*sides)}
    assert memory["CUDA0"][2].startswith("−")
    assert memory["CUDA1"][2].startswith("+")
    figures = {name: words for name, *words in figure_rows(*sides)}
    assert figures["answer speed, measured"] == ["", "12 tokens/s"]
    assert sides[0].costs is not None
    assert sides[1].costs is not None
    assert sides[1].costs.transfers == sides[0].costs.transfers + 2, "from CUDA0 and to CUDA1"
    assert sides[1].costs.token_bytes > sides[0].costs.token_bytes


def test_a_device_that_a_rig_lacks_has_no_memory(model: ModelFile) -> None:
    bigger = make_rig(make_gpu("CUDA0", 24), make_gpu("CUDA1", 12), make_gpu("CUDA7", 48))
    there = plan(model, make_layout(4, [("CUDA7", 4)]), bigger)
    rows = {
        device: words for device, *words in memory_rows(*(side_of(p, NO_MEASUREMENTS) for p in (plan(model), there)))
    }
    assert rows["CUDA7"][0] == ""
    assert rows["CUDA7"][1]


def test_a_layout_that_breaks_a_rule_has_its_sentences_and_no_costs(model: ModelFile) -> None:
    side = side_of(plan(model, make_layout(4, [("CUDA9", 4)])), NO_MEASUREMENTS)
    assert side.costs is None
    assert "CUDA9" in side.advice[0]


@pytest.mark.parametrize(("size_bytes", "words"), [(0, "="), (1 << 30, "+1.00 GiB"), (-(1 << 20), "−1.0 MiB")])
def test_differences_have_a_sign(size_bytes: int, words: str) -> None:
    assert difference_text(size_bytes) == words
