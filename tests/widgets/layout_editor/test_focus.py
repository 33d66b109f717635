"""Where the keys take the focus."""

from __future__ import annotations

from engine.devices.device import CPU_ID
from tests.support.previews import make_layout
from widgets.layout_editor.focus import BoundaryFocus, LayerFocus, OutputFocus, kept_focus, next_layer, next_stop

LAYOUT = make_layout(10, [("A", 4), ("B", 3), (CPU_ID, 3)])


def test_tab_walks_the_boundaries_then_the_output_then_out() -> None:
    stops = []
    focus = next_stop(LAYOUT, None, 1)
    while focus is not None:
        stops.append(focus)
        focus = next_stop(LAYOUT, focus, 1)
    assert stops == [BoundaryFocus(0), BoundaryFocus(1), OutputFocus()]
    assert next_stop(LAYOUT, None, -1) == OutputFocus()
    assert next_stop(LAYOUT, BoundaryFocus(0), -1) is None


def test_tab_from_a_layer_goes_to_the_boundaries_of_its_run() -> None:
    assert next_stop(LAYOUT, LayerFocus(5, 5), 1) == BoundaryFocus(1)
    assert next_stop(LAYOUT, LayerFocus(5, 5), -1) == BoundaryFocus(0)
    assert next_stop(LAYOUT, LayerFocus(9, 9), 1) == OutputFocus()
    assert next_stop(LAYOUT, LayerFocus(0, 0), -1) is None


def test_arrows_leave_a_boundary_to_its_sides() -> None:
    assert next_layer(LAYOUT, BoundaryFocus(0), -1, extend=False) == LayerFocus(3, 3)
    assert next_layer(LAYOUT, BoundaryFocus(0), 1, extend=False) == LayerFocus(4, 4)
    assert next_layer(LAYOUT, None, 1, extend=False) == LayerFocus(0, 0)
    assert next_layer(LAYOUT, OutputFocus(), -1, extend=False) == LayerFocus(9, 9)


def test_extending_keeps_the_anchor_and_stops_at_the_ends() -> None:
    focus = next_layer(LAYOUT, LayerFocus(8, 6), 1, extend=True)
    assert focus.span == (6, 9)
    assert next_layer(LAYOUT, focus, 1, extend=True) == focus
    assert next_layer(LAYOUT, LayerFocus(6, 6), -1, extend=True).span == (5, 6)


def test_focus_moves_to_what_is_left_of_a_changed_layout() -> None:
    two = make_layout(10, [("A", 4), ("B", 6)])
    one = make_layout(10, [("A", 10)])
    assert kept_focus(two, BoundaryFocus(1)) == BoundaryFocus(0)
    assert kept_focus(one, BoundaryFocus(0)) is None
    assert kept_focus(make_layout(4, [("A", 4)]), LayerFocus(8, 2)) is None
    assert kept_focus(two, LayerFocus(8, 2)) == LayerFocus(8, 2)
