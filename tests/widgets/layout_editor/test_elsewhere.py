"""A loaded layout with layers on other devices than requested: marked at the layer, and reported."""

from __future__ import annotations

import pytest
from PySide6.QtGui import QAccessible
from pytestqt.qtbot import QtBot

from engine.base.values import replace
from engine.planning.plan.placement_check import DeviceDifference
from tests.support.accessibility import interface_of, name_of, walk
from tests.support.previews import dense_preview, loaded_from, make_layout, with_layout
from widgets.layout_editor.editor import LayoutEditor
from widgets.layout_editor.highlights import highlights_of, tooltip_of
from widgets.layout_editor.preview_geometry import LayerTarget, OutputTarget

FOUND = (
    DeviceDifference("layer", 3, "CUDA0", "CPU"),
    DeviceDifference("cache", 20, "CUDA1", "CPU"),
    DeviceDifference("output", 32, "CPU", "CUDA0"),
)


@pytest.fixture
def editor(qtbot: QtBot) -> LayoutEditor:
    made = LayoutEditor()
    qtbot.addWidget(made)
    made.resize(1000, 620)
    made.show()
    preview = dense_preview()
    made.set_preview(preview)
    made.set_loaded(replace(loaded_from(preview), elsewhere=FOUND))
    return made


def test_what_is_elsewhere_is_marked_where_it_should_be(editor: LayoutEditor) -> None:
    geometry = editor.preview_geometry
    assert geometry is not None
    layer, cache, output = highlights_of(geometry, None, None, None, has_keyboard=False).elsewhere
    assert layer == geometry.block_rect(0, 3, 3)
    assert geometry.block_rect(1, 20, 20).contains(cache)
    assert cache.height() == geometry.lanes.kv.height
    assert output == geometry.output_rect()


def test_tooltips_and_screen_readers_say_where_it_is(editor: LayoutEditor) -> None:
    geometry = editor.preview_geometry
    assert geometry is not None
    assert "Layer 3: loaded on CPU, not on CUDA0." in tooltip_of(geometry, LayerTarget(3, 0))
    assert "The KV cache of layer 20 was loaded on CPU, not on CUDA1." in tooltip_of(geometry, LayerTarget(20, 1))
    assert "The output layer was loaded on CUDA0, not on CPU." in tooltip_of(geometry, OutputTarget())
    assert "not on" not in tooltip_of(geometry, LayerTarget(4, 0))
    QAccessible.setActive(True)
    try:
        names = [name_of(each) for each in walk(interface_of(editor.view))]
    finally:
        QAccessible.setActive(False)
    assert any(
        name.startswith("layer 3 on") and name.endswith("Layer 3: loaded on CPU, not on CUDA0.") for name in names
    )


def test_highlights_are_gone_when_the_layout_is_edited(editor: LayoutEditor) -> None:
    editor.set_preview(with_layout(dense_preview(), make_layout(32, [("CUDA0", 32)])))
    assert editor.preview_geometry is not None
    assert editor.preview_geometry.elsewhere == ()
