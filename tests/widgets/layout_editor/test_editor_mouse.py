"""The layout editor by mouse: real events on the viewport, and the reported moves."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QEvent, QPoint, Qt
from PySide6.QtGui import QAction, QFocusEvent, QHelpEvent
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QMenu, QToolTip
from pytestqt.qtbot import QtBot

from engine.devices.device import CPU_ID
from engine.planning.layout.moves import BoundaryMove, OutputMove, RangeMove
from tests.support.editor_hand import NONE, MakeHand
from tests.support.previews import (
    dense_layers,
    dense_preview,
    make_gpu,
    make_layout,
    make_preview,
    make_rig,
    moe_preview,
    patchwork_preview,
    wide_preview,
    with_layout,
)
from widgets.layout_editor.highlights import Highlights
from widgets.layout_editor.keyboard import Selection
from widgets.layout_editor.placement import Pins, PinToggle
from widgets.layout_editor.scene import EditorScene

SHIFT = Qt.KeyboardModifier.ShiftModifier


def test_a_boundary_says_each_layer_it_passes_once_and_that_it_is_done(make_hand: MakeHand) -> None:
    hand = make_hand(dense_preview())
    start = hand.handle(0)
    there = [QPoint(hand.edge(layer), start.y()) for layer in (17, 17, 18, 15)]
    hand.drag(start, *there)
    assert hand.said == [BoundaryMove(0, 17), BoundaryMove(0, 18), BoundaryMove(0, 15), "finished"]


def test_a_boundary_leaves_a_layer_to_both_of_its_runs(make_hand: MakeHand) -> None:
    hand = make_hand(dense_preview())
    start = hand.handle(1)
    hand.drag(start, QPoint(0, start.y()), QPoint(5000, start.y()))
    assert hand.said == [BoundaryMove(1, 17), BoundaryMove(1, 31), "finished"]


def test_pressing_a_handle_moves_nothing(make_hand: MakeHand) -> None:
    hand = make_hand(dense_preview())
    start = hand.handle(0)
    hand.drag(start, start + QPoint(2, 0))
    assert hand.moves == []


def test_previews_during_a_drag_do_not_end_it(make_hand: MakeHand) -> None:
    preview = dense_preview()
    hand = make_hand(preview)
    start = hand.handle(0)
    hand.press(start)
    for layer in (14, 8, 1):
        hand.move(QPoint(hand.edge(layer), start.y()))
        runs = [("CUDA0", layer), ("CUDA1", 26 - layer), (CPU_ID, 6)]
        hand.editor.set_preview(with_layout(preview, make_layout(32, runs)))
        assert hand.editor.is_dragging
    hand.move(QPoint(hand.edge(20), start.y()))
    hand.release(start)
    assert hand.said == [BoundaryMove(0, layer) for layer in (14, 8, 1, 20)] + ["finished"]


def test_escape_takes_a_drag_back_and_the_rest_of_it_is_ignored(make_hand: MakeHand) -> None:
    hand = make_hand(dense_preview())
    start = hand.handle(0)
    hand.press(start)
    hand.move(QPoint(hand.edge(18), start.y()))
    QTest.keyClick(hand.editor.view, Qt.Key.Key_Escape)
    hand.move(QPoint(hand.edge(20), start.y()))
    hand.release(start)
    assert hand.said == [BoundaryMove(0, 18), "cancelled"]
    assert not hand.editor.is_dragging


def test_a_lost_grab_takes_a_drag_back(make_hand: MakeHand) -> None:
    hand = make_hand(dense_preview())
    start = hand.handle(0)
    hand.press(start)
    hand.move(QPoint(hand.edge(18), start.y()))
    hand.move(QPoint(hand.edge(19), start.y()), Qt.MouseButton.NoButton)
    assert hand.said == [BoundaryMove(0, 18), "cancelled"]


def test_another_window_taking_over_takes_a_drag_back(make_hand: MakeHand) -> None:
    hand = make_hand(dense_preview())
    start = hand.handle(0)
    hand.press(start)
    hand.move(QPoint(hand.edge(18), start.y()))
    QApplication.sendEvent(hand.editor.view, QFocusEvent(QEvent.Type.FocusOut, Qt.FocusReason.ActiveWindowFocusReason))
    assert hand.said == [BoundaryMove(0, 18), "cancelled"]


def test_another_model_ends_a_drag_without_a_word(make_hand: MakeHand) -> None:
    hand = make_hand(dense_preview())
    start = hand.handle(0)
    hand.press(start)
    hand.move(QPoint(hand.edge(18), start.y()))
    hand.editor.set_preview(moe_preview())
    assert not hand.editor.is_dragging
    hand.release(start)
    assert hand.said == [BoundaryMove(0, 18)]


def test_a_block_takes_its_whole_run_to_another_lane(make_hand: MakeHand) -> None:
    hand = make_hand(dense_preview())
    hand.drag(hand.layer(20), hand.layer(20, 0), hand.layer(22, 0), hand.layer(20, 2))
    assert hand.said == [RangeMove(16, 25, "CUDA0"), RangeMove(16, 25, CPU_ID), "finished"]
    assert hand.editor.selection == Selection((16, 25))


def test_a_selection_is_what_is_dragged_even_across_runs(make_hand: MakeHand) -> None:
    hand = make_hand(dense_preview())
    hand.click(hand.layer(12))
    hand.click(hand.layer(19), SHIFT)
    assert hand.editor.selection == Selection((12, 19))
    assert hand.moves == []
    hand.said.clear()
    hand.drag(hand.layer(14), hand.layer(14, 2))
    assert hand.said == [RangeMove(12, 19, CPU_ID), "finished"]


def test_coming_back_to_its_lane_is_said_too(make_hand: MakeHand) -> None:
    hand = make_hand(dense_preview())
    hand.drag(hand.layer(3), hand.layer(3, 1), hand.layer(3, 0))
    assert hand.said == [RangeMove(0, 15, "CUDA1"), RangeMove(0, 15, "CUDA0"), "finished"]


def test_a_click_chooses_one_layer_and_moves_nothing(make_hand: MakeHand) -> None:
    hand = make_hand(dense_preview())
    hand.drag(hand.layer(5), hand.layer(5) + QPoint(3, 3))
    assert hand.moves == []
    assert hand.editor.selection == Selection((5, 5))


def test_a_drag_over_an_empty_lane_selects_the_layers_it_passes(make_hand: MakeHand) -> None:
    hand = make_hand(dense_preview())
    heard: list[Selection] = []
    hand.editor.selection_changed.connect(heard.append)
    hand.drag(hand.layer(20, 0), hand.layer(26, 0))
    assert hand.editor.selection == Selection((20, 26))
    assert heard[-1] == Selection((20, 26))
    assert hand.moves == []


def test_the_output_goes_to_another_lane(make_hand: MakeHand) -> None:
    hand = make_hand(dense_preview())
    rect = hand.preview_geometry.output_rect()
    start = hand.at(rect.center().x(), rect.center().y())
    hand.drag(start, QPoint(start.x(), hand.layer(0).y()))
    assert hand.said == [OutputMove("CUDA0"), "finished"]


def test_escape_restores_the_selection_from_before_the_drag(make_hand: MakeHand) -> None:
    hand = make_hand(dense_preview())
    hand.click(hand.layer(2))
    hand.said.clear()
    hand.press(hand.layer(20))
    hand.move(hand.layer(20, 0))
    QTest.keyClick(hand.editor.view, Qt.Key.Key_Escape)
    assert hand.said == [RangeMove(16, 25, "CUDA0"), "cancelled"]
    assert hand.editor.selection == Selection((2, 2))
    hand.release(hand.layer(20))


def test_layers_cannot_be_dropped_on_a_device_that_is_not_there(make_hand: MakeHand) -> None:
    preview = dense_preview()
    gone = with_layout(preview, make_layout(32, [("CUDA0", 16), ("GONE", 10), (CPU_ID, 6)]))
    hand = make_hand(gone)
    hand.drag(hand.layer(3), hand.layer(3, 3))
    assert hand.moves == []
    hand.drag(hand.layer(20), hand.layer(20, 1))
    assert hand.moves == [RangeMove(16, 25, "CUDA1")]


def test_each_of_fourteen_boundaries_can_be_taken(make_hand: MakeHand) -> None:
    hand = make_hand(patchwork_preview())
    assert len(hand.preview_geometry.handles) == 14
    for index in range(14):
        start = hand.handle(index)
        layer = hand.preview_geometry.handles[index].layer
        hand.drag(start, QPoint(hand.edge(layer + 1), start.y()))
        assert hand.said == [BoundaryMove(index, layer + 1), "finished"]
        hand.said.clear()


def test_a_drag_at_the_edge_scrolls_to_the_lanes_below(qtbot: QtBot, make_hand: MakeHand) -> None:
    hand = make_hand(wide_preview())
    hand.editor.resize(1000, 360)
    bar = hand.editor.view.verticalScrollBar()
    qtbot.waitUntil(lambda: bar.maximum() > 0)
    hand.press(hand.layer(3))
    bottom = QPoint(hand.layer(3).x(), hand.viewport.height() - 4)
    hand.move(bottom)
    qtbot.waitUntil(lambda: bar.value() == bar.maximum())
    hand.release(bottom)
    devices = [move.device for move in hand.said if isinstance(move, RangeMove)]
    assert devices[-1] == CPU_ID
    assert len(devices) == len(set(devices))
    assert hand.said[-1] == "finished"


def test_the_pointer_says_what_can_be_taken(make_hand: MakeHand) -> None:
    hand = make_hand(dense_preview())
    shapes = []
    for point in (hand.handle(0), hand.layer(4), hand.layer(4, 2)):
        hand.move(point, Qt.MouseButton.NoButton)
        shapes.append(hand.viewport.cursor().shape())
    assert shapes == [Qt.CursorShape.SplitHCursor, Qt.CursorShape.OpenHandCursor, Qt.CursorShape.ArrowCursor]


def test_the_right_button_does_nothing(make_hand: MakeHand) -> None:
    hand = make_hand(dense_preview())
    QTest.mousePress(hand.viewport, Qt.MouseButton.RightButton, NONE, hand.layer(3))
    assert not hand.editor.is_dragging
    QTest.mouseRelease(hand.viewport, Qt.MouseButton.RightButton, NONE, hand.layer(3))
    assert hand.moves == []


def test_a_new_preview_keeps_what_is_under_the_resting_pointer_up_to_date(make_hand: MakeHand) -> None:
    preview = dense_preview()
    hand = make_hand(preview)
    hand.move(hand.layer(4), Qt.MouseButton.NoButton)
    hand.editor.set_preview(with_layout(preview, preview.layout))
    assert hand.viewport.cursor().shape() == Qt.CursorShape.OpenHandCursor
    hand.editor.set_preview(with_layout(preview, make_layout(32, [("CUDA1", 26), (CPU_ID, 6)])))
    assert hand.viewport.cursor().shape() == Qt.CursorShape.ArrowCursor


# The offscreen platform says this whenever a tooltip is shown.
@pytest.mark.qt_log_ignore(r"This plugin does not support raise\(\)")
def test_the_tooltip_under_the_pointer_shows_names_as_they_are(qtbot: QtBot, make_hand: MakeHand) -> None:
    rig = make_rig(make_gpu("CUDA0", 8, name="<b>Card</b>"))
    hand = make_hand(make_preview(rig, make_layout(4, [("CUDA0", 4)]), dense_layers(4)))
    point = hand.at(hand.preview_geometry.columns.bar_left + 20, 30)
    event = QHelpEvent(QEvent.Type.ToolTip, point, hand.viewport.mapToGlobal(point))
    QApplication.sendEvent(hand.viewport, event)
    assert "&lt;b&gt;Card&lt;/b&gt;<br>CUDA0: estimated" in QToolTip.text()
    QToolTip.hideText()
    qtbot.waitUntil(lambda: not QToolTip.isVisible())


def test_a_drag_that_was_ended_from_outside_sends_nothing_more(make_hand: MakeHand) -> None:
    hand = make_hand(dense_preview())
    start = hand.handle(0)
    hand.press(start)
    hand.move(QPoint(hand.edge(18), start.y()))
    hand.editor.end_drag()
    assert not hand.editor.is_dragging
    hand.move(QPoint(hand.edge(20), start.y()))
    hand.release(start)
    assert hand.said == [BoundaryMove(0, 18)]


def test_each_step_of_a_drag_updates_the_highlights_once(make_hand: MakeHand, monkeypatch: pytest.MonkeyPatch) -> None:
    preview = dense_preview()
    hand = make_hand(preview)
    start = hand.handle(0)
    hand.press(start)
    updates: list[Highlights] = []
    set_highlights = EditorScene.set_highlights

    def count(scene: EditorScene, highlights: Highlights, *, active: int | None, focused: int | None) -> None:
        updates.append(highlights)
        set_highlights(scene, highlights, active=active, focused=focused)

    monkeypatch.setattr(EditorScene, "set_highlights", count)
    hand.move(QPoint(hand.edge(14), start.y()))
    assert len(updates) == 1
    hand.editor.set_preview(with_layout(preview, make_layout(32, [("CUDA0", 14), ("CUDA1", 12), (CPU_ID, 6)])))
    assert len(updates) == 2


def actions_of(menu: QMenu) -> dict[str, QAction]:
    return {action.text().replace("&", ""): action for action in menu.actions()}


def test_the_menu_of_layers_moves_and_pins_them(qtbot: QtBot, make_hand: MakeHand) -> None:
    hand = make_hand(dense_preview())
    editor, view = hand.editor, hand.editor.view
    geometry = hand.preview_geometry
    first, last = geometry.contents[0].ranges[0]
    middle = geometry.block_rect(0, first, first).center()
    assert view.interaction.focus_at(middle.x(), middle.y())
    assert editor.selection == Selection((first, first))

    devices = [content.device.id for content in geometry.contents]
    menu = view.context_menu()
    heading = menu.actions()[0]
    assert (heading.text(), heading.isEnabled(), heading.isSeparator()) == (
        f"Layer {first} on {devices[0]}",
        False,
        False,
    )
    actions = actions_of(menu)
    places = actions["Move to"].menu()
    assert isinstance(places, QMenu)
    assert [action.text() for action in places.actions()] == devices[1:]
    places.actions()[0].trigger()
    assert hand.said == [RangeMove(first, first, devices[1]), "finished"]

    actions["Select the Group of Neighbouring Layers"].trigger()
    assert editor.selection == Selection((first, last))
    with qtbot.waitSignal(editor.pin_toggled) as pinned:
        actions["Pin Here"].trigger()
    assert pinned.args == [PinToggle((first, last))]
    with qtbot.waitSignal(editor.why_requested) as asked:
        actions["Why Here?"].trigger()
    assert devices[0] in asked.args[0]
    menu.deleteLater()


def test_the_menu_of_the_output_and_of_what_has_none(make_hand: MakeHand) -> None:
    hand = make_hand(dense_preview())
    editor, view = hand.editor, hand.editor.view
    middle = hand.preview_geometry.output_rect().center()
    assert view.interaction.focus_at(middle.x(), middle.y())
    menu = view.context_menu()
    assert "Select the Group of Neighbouring Layers" not in actions_of(menu)
    places = actions_of(menu)["Move to"].menu()
    assert isinstance(places, QMenu)
    places.actions()[0].trigger()
    assert isinstance(hand.moves[0], OutputMove)
    editor.set_pins(Pins(output=hand.preview_geometry.preview.layout.output_device))
    assert "Unpin" in actions_of(view.context_menu())
    bar = hand.preview_geometry.columns.bar_left + 5
    assert not view.interaction.focus_at(bar, middle.y())
