"""The settings of a conversation: nothing is cut off in a narrow panel."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QPoint
from PySide6.QtWidgets import QWidget
from pytestqt.qtbot import QtBot

from widgets.chat.settings_panel import SettingsPanel


@pytest.mark.parametrize(("width_px", "is_beside"), [(700, True), (262, False)])
def test_labels_are_above_their_fields_where_both_have_no_room(qtbot: QtBot, width_px: int, is_beside: bool) -> None:
    panel = SettingsPanel({})
    qtbot.addWidget(panel)
    panel.show()
    for width in (500, 262, width_px):
        panel.resize(width, 500)
    viewport, content = panel.viewport(), panel.widget()
    assert content is not None
    qtbot.waitUntil(lambda: content.width() == viewport.width())

    def ends_px(widget: QWidget) -> int:
        return widget.mapTo(viewport, QPoint(widget.width(), 0)).x()

    assert all(ends_px(field) <= viewport.width() for field in panel.fields.values())
    field = panel.fields["full_context"]
    label = next(row.label for row in panel._rows if row.field is field)
    assert (label.geometry().right() < field.geometry().left()) == is_beside
    assert (label.geometry().bottom() < field.geometry().top()) == (not is_beside)
