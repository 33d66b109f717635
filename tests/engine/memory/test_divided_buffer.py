"""A buffer of several: which part a tensor goes to, as ggml-alloc decides it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.memory.compute_graph.ggml.allocator import Buffer
from engine.memory.compute_graph.ggml.divided_buffer import DividedBuffer, n_parts


def test_a_part_begins_where_the_last_has_no_room_left() -> None:
    buffer = DividedBuffer(100)
    for size in (60, 30, 20):
        buffer.take(size)
    assert (n_parts(buffer), buffer.size_bytes) == (2, 110)


def test_a_tensor_above_the_limit_has_a_part_of_its_size() -> None:
    buffer = DividedBuffer(100)
    buffer.take(250)
    assert (n_parts(buffer), buffer.size_bytes) == (1, 250)


def test_what_was_given_back_is_taken_before_a_part_grows() -> None:
    buffer = DividedBuffer(100)
    first = buffer.take(40)
    buffer.take(50)
    buffer.take(80)
    buffer.give_back(first, 40)
    assert buffer.take(30) == first
    assert buffer.size_bytes == 170


def test_the_part_grows_that_has_to_grow_least() -> None:
    buffer = DividedBuffer(100)
    buffer.take(70)
    end = buffer.take(90)
    buffer.give_back(end, 90)
    assert buffer.take(20) == end  # The second part has been that large before.
    assert buffer.size_bytes == 160


@given(sizes=st.lists(st.integers(1, 50), max_size=20))
def test_within_the_limit_it_is_one_buffer(sizes: list[int]) -> None:
    divided, whole = DividedBuffer(20 * 50), Buffer()
    assert [divided.take(size) for size in sizes] == [whole.take(size) for size in sizes]
    assert divided.size_bytes == whole.size_bytes
