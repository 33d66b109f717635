"""Small compute graphs: allocator, scheduler, and forecasts that depend on the settings."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Rig, make_host
from engine.planning.layout.layout import Layout, Override, Run
from engine.planning.memory.compute_graph.ggml.allocator import DynTallocr
from engine.planning.memory.compute_graph.ggml.graph import Graph
from engine.planning.memory.compute_graph.ggml.pass_cache import PassCache, PlacedSection, SectionGroup
from engine.planning.memory.compute_graph.ggml.scheduler import HOST, Backend, Scheduler
from engine.planning.memory.compute_graph.ggml.sections import partition_graph
from engine.planning.memory.compute_graph.ggml.simulation import Simulation
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.settings.context_settings import ContextSettings
from tests.support.selection import examples
from tests.support.truth import truth_model

RIG = Rig(
    (Device("CUDA0", "card", "CUDA", "gpu", 1 << 35), Device("CUDA1", "card", "CUDA", "gpu", 1 << 35)),
    make_host("host", 1 << 36),
)

MODEL = ModelMemory(truth_model("llama-3.2-1b"))
DEVICES = st.sampled_from((CPU_ID, "CUDA0", "CUDA1"))


def _buffer_bytes(graph: Graph) -> int:
    """Return the compute buffer of a graph on the CPU alone."""
    cpu = Backend(HOST, True, 32, None, frozenset(), False, lambda tensor: tensor.n_bytes)
    scheduler = Scheduler([cpu], pipeline=False, op_offload=False, offload_batch=32)
    placed_sections = (None, *(PlacedSection(section, ()) for section in partition_graph(graph, (), {})), None)
    cache = PassCache(scheduler, lambda name: pytest.fail(f"{name} is asked for"))
    return Simulation([SectionGroup(cache, (HOST,), placed_sections)]).sizes()[HOST].size_bytes


def test_the_smallest_free_block_that_fits_is_taken() -> None:
    buffer = DynTallocr()
    large, _, small, _ = (buffer.alloc(size) for size in (256, 32, 64, 32))
    buffer.free_bytes(large, 256)
    buffer.free_bytes(small, 64)
    assert buffer.alloc(64) == small
    assert buffer.alloc(128) == large
    assert buffer.size_bytes == 384


def test_neighbours_become_one_block() -> None:
    buffer = DynTallocr()
    first, second, _ = (buffer.alloc(size) for size in (64, 64, 32))
    buffer.free_bytes(second, 64)
    buffer.free_bytes(first, 64)
    assert buffer.alloc(128) == first


@given(sizes=st.lists(st.integers(0, 20).map(lambda count: count * 32), min_size=1, max_size=30), data=st.data())
def test_blocks_never_overlap(sizes: list[int], data: st.DataObject) -> None:
    buffer = DynTallocr()
    live: list[tuple[int, int]] = []
    highest = 0
    for size in sizes:
        live.append((buffer.alloc(size), size))
        highest = max(highest, live[-1][0] + size)
        assert buffer.size_bytes == highest
        taken = sorted((offset, offset + length) for offset, length in live if length)
        assert all(end <= start for (_, end), (start, _) in pairwise(taken))
        if data.draw(st.booleans()):
            buffer.free_bytes(*live.pop(data.draw(st.integers(0, len(live) - 1))))


def test_results_take_the_place_of_their_source_where_they_may() -> None:
    graph = Graph()
    current = graph.new_input("f32", 1024)
    for _ in range(5):
        current = graph.unary(current)
    graph.build_forward_expand(current)
    assert _buffer_bytes(graph) == 4096


def test_outputs_are_never_given_back() -> None:
    graph = Graph()
    first = graph.like("norm", graph.new_input("f32", 1024))
    first.is_output = True
    graph.build_forward_expand(graph.like("norm", graph.like("norm", first)))
    assert _buffer_bytes(graph) == 3 * 4096


def _layout(bounds: list[int], devices: list[str], output: str, override: str | None) -> Layout:
    ends = sorted({*bounds, 16})
    starts = [0, *ends[:-1]]
    runs: list[Run] = []
    for start, end, device in zip(starts, ends, devices, strict=False):
        if runs and runs[-1].device == device:
            runs[-1] = Run(device, runs[-1].first, end - 1)
        else:
            runs.append(Run(device, start, end - 1))
    overrides = () if override is None else (Override(override, pattern=r"ffn_down"),)
    return Layout(16, tuple(runs), output, overrides=overrides)


@settings(max_examples=examples(25))
@given(
    bounds=st.lists(st.integers(1, 15), max_size=3, unique=True),
    devices=st.lists(DEVICES, min_size=4, max_size=4),
    output=DEVICES,
    override=st.none() | DEVICES,
    flash=st.sampled_from(("auto", "on", "off")),
    offload_kqv=st.booleans(),
)
def test_any_layout_has_a_forecast_that_grows_with_the_batch(
    bounds: list[int], devices: list[str], output: str, override: str | None, flash: str, offload_kqv: bool
) -> None:
    layout = _layout(bounds, devices, output, override)
    small = ContextSettings(n_ubatch=64, flash_attn=flash, offload_kqv=offload_kqv)  # type: ignore[arg-type]
    large = ContextSettings(n_ubatch=1024, flash_attn=flash, offload_kqv=offload_kqv)  # type: ignore[arg-type]
    less, more = (sum(m.compute_bytes for m in MODEL.estimate(layout, c, RIG).devices.values()) for c in (small, large))
    assert 0 < less < more


@pytest.mark.parametrize("stem", ["attn_q", "attn_output", "ffn_down", "attn_norm"])
def test_a_missing_weight_is_left_to_the_probe_or_left_out(stem: str) -> None:
    model = truth_model("llama-3.2-1b")
    kept = tuple(tensor for tensor in model.blocks[5].tensors if f".{stem}." not in tensor.name)
    blocks = (*model.blocks[:5], replace(model.blocks[5], tensors=kept), *model.blocks[6:])
    buft = ModelMemory(replace(model, blocks=blocks))
    layout = _layout([], ["CUDA0"], "CUDA0", None)
    found = buft.estimate(layout, ContextSettings(), RIG)
    assert found.probe_only is not None or found.devices["CUDA0"].compute_bytes > 0
