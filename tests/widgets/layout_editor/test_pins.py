"""Pins in the editor: asked for by a key, marked on the lanes."""

from __future__ import annotations

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from pytestqt.qtbot import QtBot

from engine.devices.device import CPU_ID
from tests.support.previews import dense_preview, make_layout, with_layout
from widgets.layout_editor.editor import LayoutEditor
from widgets.layout_editor.marks import marks_of, pin_rects, tooltip_of
from widgets.layout_editor.pins import NO_PINS, PinnedLayers, Pins, PinToggle
from widgets.layout_editor.shown import LayerTarget, OutputTarget

Key = Qt.Key


@pytest.fixture
def editor(qtbot: QtBot) -> LayoutEditor:
    editor = LayoutEditor()
    qtbot.addWidget(editor)
    editor.resize(900, 500)
    with qtbot.waitExposed(editor):
        editor.show()
    preview = dense_preview()
    n_layers = preview.layout.n_layers
    editor.set_preview(with_layout(preview, make_layout(n_layers, [(CPU_ID, 8), ("CUDA0", n_layers - 8)])))
    editor.setFocus()
    return editor


def test_the_key_asks_for_the_selected_layers_or_the_output(editor: LayoutEditor) -> None:
    asked: list[object] = []
    editor.pin_toggled.connect(asked.append)
    editor.toggle_pin()
    assert asked == [], "nothing is chosen"
    QTest.keyClick(editor.view, Key.Key_Home)
    QTest.keyClick(editor.view, Key.Key_Right, Qt.KeyboardModifier.ShiftModifier)
    QTest.keyClick(editor.view, Key.Key_P)
    QTest.keyClick(editor.view, Key.Key_Tab)
    QTest.keyClick(editor.view, Key.Key_P)
    QTest.keyClick(editor.view, Key.Key_Tab)
    editor.toggle_pin()
    assert asked == [PinToggle((0, 1)), PinToggle(None)], "a boundary cannot be pinned"


def test_pinned_layers_are_marked_in_the_lane_they_stay_in(editor: LayoutEditor) -> None:
    shown = editor.shown
    assert shown is not None
    pins = Pins((PinnedLayers(CPU_ID, 0, 3), PinnedLayers("gone", 5, 6), PinnedLayers("CUDA0", 30, 10_000)), "CUDA0")
    cpu, cuda, output = pin_rects(shown, pins)
    assert cpu == shown.block_rect(shown.lane_of[CPU_ID], 0, 3)
    assert cuda.right() <= shown.track.right
    assert output.left() == shown.track.output[0]
    assert marks_of(shown, None, None, None, pins, has_keyboard=False).pinned == (cpu, cuda, output)
    assert pin_rects(shown, NO_PINS) == ()


def test_the_tooltip_says_it(editor: LayoutEditor) -> None:
    shown = editor.shown
    assert shown is not None
    pins = Pins((PinnedLayers(CPU_ID, 0, 3),), "CUDA0")
    lane = shown.lane_of[CPU_ID]
    assert tooltip_of(shown, LayerTarget(2, lane), pins).endswith("Pinned to CPU: automatic layouts leave it there.")
    assert "Pinned" not in tooltip_of(shown, LayerTarget(4, lane), pins)
    assert "Pinned to CUDA0" in tooltip_of(shown, OutputTarget(), pins)


def test_a_pin_is_painted(editor: LayoutEditor) -> None:
    shown = editor.shown
    assert shown is not None
    before = editor.view.viewport().grab().toImage()
    editor.set_pins(Pins((PinnedLayers(CPU_ID, 0, 3),)))
    rect = shown.block_rect(shown.lane_of[CPU_ID], 0, 3)
    point = editor.view.mapFromScene(rect.center().x(), rect.top() + 1)
    after = editor.view.viewport().grab().toImage()
    ratio = after.devicePixelRatio()
    x, y = round(point.x() * ratio), round(point.y() * ratio)
    assert before.pixelColor(x, y) != after.pixelColor(x, y)
    editor.set_pins(NO_PINS)
    assert editor.view.viewport().grab().toImage().pixelColor(x, y) == before.pixelColor(x, y)
