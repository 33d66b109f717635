"""Splits in the order of a backend that has one of its own: taken section by section it is that of the whole graph."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from engine.memory.compute_graph.building import graph_tables
from engine.memory.compute_graph.ggml.sections import FarReachError, Section, take_apart
from engine.memory.compute_graph.ggml.simulation import SectionName
from engine.memory.model_memory import ModelMemory
from engine.settings.context_settings import FlashAttention
from tests.support.selection import some
from tests.support.truth import TruthCase, stand_in_rig, truth_cases, truth_model

NAMES = ("falcon-dense", "gemma4-moe", "llama-dense", "mamba2-dense", "qwen3next-moe")


def _cases(name: str, flash_attn: FlashAttention) -> list[TruthCase]:
    """Return real loads of a model as Vulkan devices would have them."""
    rig = stand_in_rig("vulkan")
    cases = [case for case in truth_cases(name) if case.name.startswith("rpc real ") and case.refused is None]
    return [
        replace(case, rig=rig, context=msgspec.structs.replace(case.context, flash_attn=flash_attn))
        for case in some([case for case in cases if case.layout.split_mode == "layer"])
    ]


def _sizes(name: str, cases: list[TruthCase]) -> list[dict[str, int]]:
    memory = ModelMemory(truth_model(name))
    found = (memory.estimate(case.layout, case.context, case.rig).devices for case in cases)
    return [{device_id: each.compute_bytes for device_id, each in devices.items()} for devices in found]


def _refuse(chain: graph_tables.SectionMaker, name: SectionName) -> Section:
    """Have the graph made as a whole."""
    raise FarReachError


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("flash_attn", ["auto", "off"])
def test_sections_are_put_in_order_as_the_whole_graph_is(
    name: str, flash_attn: FlashAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = _cases(name, flash_attn)
    found = _sizes(name, cases)
    assert all(found)
    monkeypatch.setattr(graph_tables.SectionMaker, "section", _refuse)
    monkeypatch.setattr(graph_tables, "take_apart", lambda graph, _, common: take_apart(graph, (), common))
    assert _sizes(name, cases) == found
