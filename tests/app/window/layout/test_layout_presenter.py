"""Layout editor and document in one window: a drag is decided by the document."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtCore import QEvent, QPoint, QPointF, Qt
from PySide6.QtGui import QMouseEvent
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.wiring import WindowObjects
from engine.base.values import replace
from engine.devices.device import CPU_ID
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import Layout, Override, SplitMode, make_layout, single_device
from engine.planning.plan.edit import Edit
from engine.planning.settings.context_settings import ContextSettings
from tests.support.models import write_tiny_llama
from tests.support.previews import make_gpu, make_rig
from tests.support.windows import WindowOpener
from widgets.controls.values import SplitModeChoice

LEFT, NONE = Qt.MouseButton.LeftButton, Qt.KeyboardModifier.NoModifier
N_LAYERS = 8
START = make_layout(N_LAYERS, ["CUDA0"] * 4 + ["CUDA1"] * 4)


@pytest.fixture
def window(open_window: WindowOpener, qtbot: QtBot, tmp_path: Path) -> WindowObjects:
    opened = open_window()
    opened.main.resize(1200, 800)
    model = read_model(write_tiny_llama(tmp_path / "tiny.gguf", n_layers=N_LAYERS))
    rig = make_rig(make_gpu("CUDA0", 8), make_gpu("CUDA1", 8))
    opened.desk.document.open(model, rig, Edit(single_device(N_LAYERS, "CUDA0"), ContextSettings(n_ctx=512)))
    opened.desk.document.set_layout(START, "two cards")
    qtbot.waitUntil(lambda: shown_layout(opened) == START)
    return opened


def shown_layout(window: WindowObjects) -> Layout | None:
    geometry = window.main.editor.preview_geometry
    return None if geometry is None else geometry.preview.layout


def layout_of(window: WindowObjects) -> Layout:
    edit = window.desk.document.edit
    assert edit is not None
    return edit.layout


def press_handle(window: WindowObjects) -> QPoint:
    """Take the only boundary with the mouse and return the point."""
    geometry, view = window.main.editor.preview_geometry, window.main.editor.view
    assert geometry is not None
    point = view.mapFromScene(QPointF(geometry.handles[0].x, geometry.handles[0].dot_y))
    QTest.mousePress(view.viewport(), LEFT, NONE, point)
    return point


def drag_to(window: WindowObjects, layer: int, y: int) -> None:
    """Move the mouse, with the button held, to the left edge of a layer."""
    geometry, view = window.main.editor.preview_geometry, window.main.editor.view
    assert geometry is not None
    at = QPointF(view.mapFromScene(QPointF(geometry.track.edges[layer], 0)).x(), y)
    viewport = view.viewport()
    event = QMouseEvent(QEvent.Type.MouseMove, at, viewport.mapToGlobal(at), Qt.MouseButton.NoButton, LEFT, NONE)
    QApplication.sendEvent(viewport, event)


def test_a_drag_of_the_mouse_is_one_step_of_undo(window: WindowObjects) -> None:
    point = press_handle(window)
    for layer in (5, 6):
        drag_to(window, layer, point.y())
    QTest.mouseRelease(window.main.editor.view.viewport(), LEFT, NONE, point)
    assert layout_of(window).runs[0].last == 5
    window.desk.document.undo_group.undo()
    assert layout_of(window) == START


def test_undo_in_the_middle_of_a_drag_ends_it_in_the_editor_too(window: WindowObjects, qtbot: QtBot) -> None:
    document, editor = window.desk.document, window.main.editor
    point = press_handle(window)
    drag_to(window, 6, point.y())
    document.undo_group.undo()
    assert not document.is_dragging
    assert not editor.is_dragging
    # The layout has one run now: a move of its boundary would raise.
    drag_to(window, 5, point.y())
    QTest.mouseRelease(editor.view.viewport(), LEFT, NONE, point)
    assert layout_of(window) == single_device(N_LAYERS, "CUDA0")
    qtbot.waitUntil(lambda: shown_layout(window) == layout_of(window))
    assert document.undo_group.canRedo()


def test_an_edit_from_elsewhere_ends_a_drag(window: WindowObjects) -> None:
    document, editor = window.desk.document, window.main.editor
    point = press_handle(window)
    drag_to(window, 6, point.y())
    document.set_layout(single_device(N_LAYERS, "CUDA1"), "all on one")
    assert not editor.is_dragging
    drag_to(window, 5, point.y())
    QTest.mouseRelease(editor.view.viewport(), LEFT, NONE, point)
    assert layout_of(window) == single_device(N_LAYERS, "CUDA1")


def test_back_in_mode_layer_the_layout_is_the_one_that_was_left(window: WindowObjects) -> None:
    document, bar = window.desk.document, window.main.settings_bar

    def choose(mode: SplitMode) -> Layout:
        bar.split_mode_changed.emit(SplitModeChoice(mode))
        return layout_of(window)

    assert choose("none").devices in {("CUDA0",), ("CUDA1",)}
    assert choose("tensor").split_mode == "tensor"
    assert choose("layer") == START
    choose("none")
    document.set_layout(layout_of(window).replace_device("CUDA0", "CUDA1"), "by hand")
    document.set_layout(layout_of(window).move_range(0, 0, "CUDA0"), "by hand")
    assert choose("layer") == layout_of(window) != START


@pytest.mark.parametrize("mode", ["none", "tensor"])
def test_overrides_that_were_made_in_another_mode_stay_in_mode_layer(window: WindowObjects, mode: SplitMode) -> None:
    document, bar = window.desk.document, window.main.settings_bar
    of_layer, made = Override("CUDA1", "attention", 0, 1), Override(CPU_ID, "ffn", 4, 5)
    layer = replace(START, overrides=(of_layer,))
    document.set_layout(layer, "by hand")
    bar.split_mode_changed.emit(SplitModeChoice(mode))
    now = layout_of(window)
    document.set_layout(replace(now, overrides=(made, *now.overrides)), "by hand")
    bar.split_mode_changed.emit(SplitModeChoice("layer"))
    assert layout_of(window) == replace(layer, overrides=(made, of_layer))


def test_each_model_has_its_own_layout_to_come_back_to(window: WindowObjects) -> None:
    document, bar = window.desk.document, window.main.settings_bar

    def choose(mode: SplitMode) -> Layout:
        bar.split_mode_changed.emit(SplitModeChoice(mode))
        return layout_of(window)

    choose("none")
    first, rig = document.put_aside(), window.desk.rig.live.rig
    assert first is not None
    other = single_device(N_LAYERS, first.edit.layout.devices[0])
    document.open(first.model, rig, Edit(replace(other, split_mode="none"), ContextSettings(n_ctx=512)))
    assert choose("layer") != START
    document.put_aside()
    document.show(first, rig)
    assert choose("layer") == START


def test_a_share_is_moved_through_the_document(window: WindowObjects) -> None:
    document, shares = window.desk.document, window.main.share_editor
    document.set_layout(START.with_split_mode("row"), "rows")
    slider, _ = shares.member("CUDA0")
    slider.setSliderDown(True)
    slider.setValue(75)
    assert document.is_dragging
    slider.setSliderDown(False)
    assert not document.is_dragging
    assert dict(layout_of(window).tensor_split) == {"CUDA0": 75.0, "CUDA1": 25.0}
