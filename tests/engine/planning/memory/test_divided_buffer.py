"""Buffers divided into several: the part of each tensor, as ggml-alloc decides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.base.values import replace
from engine.planning.memory.compute_graph.ggml.allocator import ChunkedTallocr, DynTallocr, n_chunks
from engine.planning.memory.model_memory import ModelMemory
from tests.support.truth import truth_cases, truth_model

# Compute buffers of pipelines on llvmpipe devices that give out 2 MiB (GGML_VK_SUBALLOCATION_BLOCK_SIZE).
MOST_BYTES = 2 << 20
PIPELINES = {
    ("gemma3n-dense", "three-devices-5-2-3"): {"D0": 86982656, "D1": 28778496, "D2": 85278720, "CPU": 17137792},
    ("llama-dense", "cpu-entry-between"): {"D0": 3297280, "D1": 1441792, "CPU": 5402720},
    ("deepseek2-moe", "cpu-entry-last"): {"D0": 2830336, "CPU": 4018240},
}


def test_a_part_begins_where_the_last_has_no_room_left() -> None:
    buffer = ChunkedTallocr(100)
    for size in (60, 30, 20):
        buffer.alloc(size)
    assert (n_chunks(buffer), buffer.size_bytes) == (2, 110)


def test_a_tensor_above_the_limit_has_a_part_of_its_size() -> None:
    buffer = ChunkedTallocr(100)
    buffer.alloc(250)
    assert (n_chunks(buffer), buffer.size_bytes) == (1, 250)


def test_what_was_given_back_is_taken_before_a_part_grows() -> None:
    buffer = ChunkedTallocr(100)
    first = buffer.alloc(40)
    buffer.alloc(50)
    buffer.alloc(80)
    buffer.free_bytes(first, 40)
    assert buffer.alloc(30) == first
    assert buffer.size_bytes == 170


def test_the_part_grows_that_has_to_grow_least() -> None:
    buffer = ChunkedTallocr(100)
    buffer.alloc(70)
    end = buffer.alloc(90)
    buffer.free_bytes(end, 90)
    assert buffer.alloc(20) == end  # The second part has been that large before.
    assert buffer.size_bytes == 160


@given(sizes=st.lists(st.integers(1, 50), max_size=20))
def test_within_the_limit_it_is_one_buffer(sizes: list[int]) -> None:
    divided, whole = ChunkedTallocr(20 * 50), DynTallocr()
    assert [divided.alloc(size) for size in sizes] == [whole.alloc(size) for size in sizes]
    assert divided.size_bytes == whole.size_bytes


@pytest.mark.parametrize(("name", "case_name"), PIPELINES)
def test_copies_of_a_pipeline_are_shared_out_over_the_parts_as_in_the_engine(name: str, case_name: str) -> None:
    case = next(each for each in truth_cases(name) if each.name == f"vulkan real {case_name}")
    assert case.pipeline
    rig = replace(
        case.rig,
        devices=tuple(
            replace(each, buffers=replace(each.buffers, largest_buffer_bytes=MOST_BYTES)) for each in case.rig.devices
        ),
    )
    devices = ModelMemory(truth_model(name)).estimate(case.layout, case.context, rig).devices
    expected = PIPELINES[name, case_name]
    assert {device_id: devices[device_id].compute_bytes for device_id in expected} == expected
