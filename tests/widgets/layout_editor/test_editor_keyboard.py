"""The layout editor by keyboard: focus movement; each step is a move with its end."""

from __future__ import annotations

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QLineEdit, QVBoxLayout, QWidget
from pytestqt.qtbot import QtBot

from engine.devices.device import CPU_ID
from engine.planning.layout.moves import BoundaryMove, OutputMove, RangeMove
from tests.support.editor_hand import MakeHand
from tests.support.previews import dense_preview, make_layout, with_layout
from widgets.layout_editor.editor import LayoutEditor
from widgets.layout_editor.keyboard import (
    KEYS,
    BoundaryFocus,
    Command,
    LayerFocus,
    OutputFocus,
    Selection,
    command_of,
    kept_focus,
    next_layer,
    next_stop,
)

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


Key = Qt.Key
CTRL = Qt.KeyboardModifier.ControlModifier
ALT = Qt.KeyboardModifier.AltModifier
SHIFT = Qt.KeyboardModifier.ShiftModifier
NONE = Qt.KeyboardModifier.NoModifier


@pytest.mark.parametrize("held", [CTRL, ALT])
def test_a_boundary_moves_by_a_layer(make_hand: MakeHand, held: Qt.KeyboardModifier) -> None:
    hand = make_hand(dense_preview())
    hand.type(Key.Key_Tab)
    hand.type(Key.Key_Right, held=held)
    assert hand.said == [BoundaryMove(0, 17), "finished"]
    hand.said.clear()
    hand.type(Key.Key_Tab)
    hand.type(Key.Key_Left, held=held)
    assert hand.said == [BoundaryMove(1, 25), "finished"]


def test_the_focus_is_said_to_screen_readers(make_hand: MakeHand) -> None:
    hand = make_hand(dense_preview())
    names = []
    for keys in ((Key.Key_Tab,), (Key.Key_Left,), (Key.Key_End, Key.Key_Tab), (Key.Key_Escape,)):
        hand.type(*keys)
        names.append(hand.editor.view.accessibleName())
    assert names == [
        "Layout editor, boundary CUDA0 0–15 | CUDA1 16–25",
        "Layout editor, layer 15 on CUDA0",
        "Layout editor, output on CPU",
        "Layout editor",
    ]


def test_a_boundary_with_one_layer_left_stays(make_hand: MakeHand) -> None:
    hand = make_hand(with_layout(dense_preview(), make_layout(32, [("CUDA0", 1), ("CUDA1", 31)])))
    hand.type(Key.Key_Tab)
    hand.type(Key.Key_Left, held=CTRL)
    assert hand.said == []


def test_selected_layers_move_to_the_next_lane(make_hand: MakeHand) -> None:
    hand = make_hand(dense_preview())
    hand.type(Key.Key_Home)
    hand.type(Key.Key_Right)
    hand.type(Key.Key_Right, Key.Key_Right, held=SHIFT)
    assert hand.editor.selection == Selection((1, 3))
    hand.type(Key.Key_Down, held=CTRL)
    assert hand.said == [RangeMove(1, 3, "CUDA1"), "finished"]
    assert hand.editor.selection == Selection((1, 3))
    hand.said.clear()
    hand.type(Key.Key_Up, held=CTRL)
    assert hand.said == [], "there is no lane above the first"


def test_the_output_moves_to_the_next_lane_past_missing_devices(make_hand: MakeHand) -> None:
    preview = dense_preview()
    hand = make_hand(preview)
    hand.type(Key.Key_Tab, Key.Key_Tab, Key.Key_Tab)
    hand.type(Key.Key_Up, held=CTRL)
    assert hand.said == [OutputMove("CUDA1"), "finished"]
    hand.said.clear()
    hand.editor.set_preview(with_layout(preview, make_layout(32, [("CUDA0", 16), (CPU_ID, 6), ("GONE", 10)])))
    hand.type(Key.Key_Up, held=CTRL)
    assert hand.said == [OutputMove(CPU_ID), "finished"]


def test_space_selects_the_run_and_escape_clears(make_hand: MakeHand) -> None:
    hand = make_hand(dense_preview())
    hand.type(Key.Key_End, Key.Key_Space)
    assert hand.editor.selection == Selection((26, 31))
    hand.type(Key.Key_Escape)
    assert hand.editor.selection == Selection(None)
    assert hand.said == []


def test_tab_leaves_the_editor_past_its_last_stop(qtbot: QtBot) -> None:
    window = QWidget()
    qtbot.addWidget(window)
    column = QVBoxLayout(window)
    before, editor, after = QLineEdit(), LayoutEditor(), QLineEdit()
    for widget in (before, editor, after):
        column.addWidget(widget)
    with qtbot.waitActive(window):
        window.show()
        window.activateWindow()
    editor.set_preview(dense_preview())
    before.setFocus()
    QTest.keyClick(before, Key.Key_Tab)
    qtbot.waitUntil(editor.view.hasFocus)
    said: list[object] = []
    editor.moved.connect(said.append)
    QTest.keyClick(editor.view, Key.Key_Right, CTRL)
    assert said == [BoundaryMove(0, 17)], "Tab enters at the first boundary"
    for _ in range(3):
        QTest.keyClick(editor.view, Key.Key_Tab)
    qtbot.waitUntil(after.hasFocus)
    QTest.keyClick(after, Key.Key_Backtab, SHIFT)
    qtbot.waitUntil(editor.view.hasFocus)
    outputs: list[object] = []
    editor.moved.connect(outputs.append)
    QTest.keyClick(editor.view, Key.Key_Up, CTRL)
    assert outputs == [OutputMove("CUDA1")], "Shift+Tab enters at the output"


def test_other_keys_are_left_to_the_window() -> None:
    assert command_of(Key.Key_Z, CTRL) is None
    assert command_of(Key.Key_Left, CTRL | SHIFT) is None
    assert command_of(Key.Key_Left, Qt.KeyboardModifier.KeypadModifier) is Command.PREVIOUS_LAYER


def test_the_help_names_every_key_that_does_something() -> None:
    words = " ".join(KEYS)
    for name in ("Tab", "Left", "Right", "Up", "Down", "Home", "End", "Space", "Escape", "Shift", "Ctrl", "Alt"):
        assert name in words
    assert all(KEYS.values())
