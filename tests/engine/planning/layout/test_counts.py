"""Layouts by numbers of layers and experts: each possible number is reached, others give an error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.base.errors import LayoutError
from engine.devices.device import CPU_ID
from engine.planning.layout.counts import expert_layers, layer_count, with_expert_count, with_layer_count
from engine.planning.layout.layout import Layout, make_layout, single_device
from engine.planning.layout.moves import CountMove
from engine.planning.layout.parts import place_part
from tests.support.strategies import DEVICE_IDS, layouts

TEN = make_layout(10, [CPU_ID] * 2 + ["A"] * 5 + ["B"] * 3)


def counts(layout: Layout) -> list[tuple[str, int]]:
    return [(run.device, run.length) for run in layout.runs]


@given(st.data(), layouts(max_layers=40), st.sampled_from(DEVICE_IDS))
def test_a_device_has_as_many_layers_as_were_asked_for(data: st.DataObject, layout: Layout, device: str) -> None:
    count = data.draw(st.integers(0, layout.n_layers))
    if layout.devices[:1] == (CPU_ID,) and device == CPU_ID and len(layout.runs) == 1 and count < layout.n_layers:
        return
    found = CountMove(device, count).apply(layout)
    assert layer_count(found, device) == count
    assert sum(length for _, length in counts(found)) == layout.n_layers


@pytest.mark.parametrize(
    ("device", "count", "wanted"),
    [
        ("A", 6, [(CPU_ID, 1), ("A", 6), ("B", 3)]),
        ("A", 8, [("A", 8), ("B", 2)]),
        ("A", 3, [(CPU_ID, 4), ("A", 3), ("B", 3)]),
        ("C", 2, [("A", 5), ("B", 3), ("C", 2)]),
        (CPU_ID, 4, [(CPU_ID, 4), ("A", 3), ("B", 3)]),
        (CPU_ID, 0, [("A", 7), ("B", 3)]),
    ],
)
def test_layers_come_from_the_cpu_first(device: str, count: int, wanted: list[tuple[str, int]]) -> None:
    assert counts(with_layer_count(TEN, device, count)) == wanted


def test_what_leaves_the_only_device_goes_to_the_cpu() -> None:
    assert counts(with_layer_count(single_device(10, "A"), "A", 4)) == [(CPU_ID, 6), ("A", 4)]


@pytest.mark.parametrize(("device", "count"), [("A", 11), ("A", -1)])
def test_impossible_numbers_of_layers_are_refused(device: str, count: int) -> None:
    with pytest.raises(LayoutError, match=f"A cannot have {count} layers; the model has 10"):
        with_layer_count(TEN, device, count)


def test_experts_come_from_either_end_and_own_layers_first() -> None:
    on_cpu = place_part(TEN, "experts", 0, 9, CPU_ID)
    front, back = with_expert_count(on_cpu, "A", 2, range(10))
    assert expert_layers(front, "A", range(10)) == (2, 3)
    assert expert_layers(back, "A", range(10)) == (5, 6)
    both = with_expert_count(on_cpu, "A", 6, range(10))
    assert [expert_layers(each, "A", range(10)) for each in both] == [(0, 2, 3, 4, 5, 6), (2, 3, 4, 5, 6, 9)]


def test_experts_leave_for_their_layers_device_then_for_the_cpu() -> None:
    layout = place_part(TEN, "experts", 7, 8, "A")
    one, other = with_expert_count(layout, "A", 6, range(10))
    assert expert_layers(one, "B", range(10)) == (7, 9)
    assert expert_layers(other, "B", range(10)) == (8, 9)
    (none,) = with_expert_count(layout, "A", 0, range(10))
    assert expert_layers(none, CPU_ID, range(10)) == tuple(range(7))
    assert with_expert_count(place_part(TEN, "experts", 2, 9, CPU_ID), CPU_ID, 2, range(10)) == (TEN,)


def test_impossible_numbers_of_experts_are_refused() -> None:
    with pytest.raises(LayoutError, match="A cannot hold the experts of 9 layers; only 8 layers have experts"):
        with_expert_count(TEN, "A", 9, range(2, 10))
    with pytest.raises(LayoutError, match="the CPU keeps the experts of its own 2 layers"):
        with_expert_count(TEN, CPU_ID, 1, range(10))
