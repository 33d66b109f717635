"""Widths, edges, lanes and hit tests of the editor, without Qt."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from widgets.layout_editor.geometry import (
    MIN_LAYER_WIDTH,
    HandleGeometry,
    columns,
    handle_at,
    layer_widths,
    make_lanes,
    make_track,
)

sizes_of_layers = st.lists(st.integers(0, 2**40), min_size=1, max_size=200)
widths = st.floats(50, 2000)


@given(sizes_of_layers, widths)
def test_widths_fill_the_track_and_none_is_below_the_minimum(sizes: list[int], width: float) -> None:
    result = layer_widths(sizes, width)
    assert sum(result) == pytest.approx(width)
    assert min(result) >= min(MIN_LAYER_WIDTH, width / len(sizes)) - 1e-6


@given(sizes_of_layers, widths)
def test_larger_layers_are_never_narrower(sizes: list[int], width: float) -> None:
    pairs = sorted(zip(sizes, layer_widths(sizes, width), strict=True))
    assert all(low[1] <= high[1] + 1e-6 for low, high in itertools.pairwise(pairs))


def test_widths_are_proportional_where_there_is_room() -> None:
    assert layer_widths([100, 300, 200], 600) == pytest.approx([100, 300, 200])


@given(sizes_of_layers, st.integers(0, 2**40), st.integers(0, 2**40), st.integers(300, 1500))
def test_track_is_in_order_and_inside_its_column(sizes: list[int], embedding: int, output: int, width: int) -> None:
    track = make_track(sizes, embedding, output, 100.0, float(width))
    places = [track.left, *track.embedding, *track.edges, *track.output, track.right]
    assert places == sorted(places)
    assert track.n_layers == len(sizes)


@given(sizes_of_layers, st.integers(300, 1500))
def test_layer_and_boundary_are_found_at_their_own_place(sizes: list[int], width: int) -> None:
    track = make_track(sizes, 1, 1, 100.0, float(width))
    for layer in range(track.n_layers):
        left, right = track.span(layer, layer)
        if right > left:
            assert track.layer_at((left + right) / 2) == layer
            assert track.boundary_at(left + (right - left) * 0.25) == layer
    assert track.layer_at(-1e6) == 0
    assert track.layer_at(1e6) == track.n_layers - 1
    assert track.boundary_at(1e6) == track.n_layers


@given(st.integers(1, 20), st.floats(0, 2000), st.booleans())
def test_strips_stay_inside_their_lane(count: int, height: float, experts: bool) -> None:
    lanes = make_lanes(count, height, experts=experts)
    strips = [strip for strip in (lanes.dense, lanes.experts, lanes.kv) if strip is not None]
    assert len(strips) == (3 if experts else 2)
    for above, below in itertools.pairwise(strips):
        assert above.top + above.height <= below.top
    assert strips[-1].top + strips[-1].height <= lanes.track_height
    for lane in range(count):
        assert lanes.lane_at(lanes.track_top(lane) + 1) == lane
    assert lanes.lane_at(-1) is None
    assert lanes.lane_at(lanes.height + 1) is None
    assert lanes.nearest_lane(-50) == 0
    assert lanes.nearest_lane(lanes.height + 50) == count - 1


@given(st.integers(608, 1468))
def test_columns_follow_one_another(width: int) -> None:
    places = columns(float(width))
    assert places.label_width < places.track_left
    assert places.track_left + places.track_width < places.bar_left
    assert places.bar_left + places.bar_width <= width
    assert places.track_width >= 300


def test_the_nearest_dot_wins_over_a_line_and_far_points_hit_nothing() -> None:
    handles = [HandleGeometry(0, 4, 100.0, 0.0, 200.0, 30.0), HandleGeometry(1, 5, 104.0, 0.0, 200.0, 150.0)]
    assert handle_at(handles, 103.0, 30.0) == 0
    assert handle_at(handles, 101.0, 150.0) == 1
    assert handle_at(handles, 100.5, 90.0) == 0
    assert handle_at(handles, 104.5, 90.0) == 1
    assert handle_at(handles, 120.0, 30.0) is None
    assert handle_at(handles, 100.0, 210.0) is None
