"""Fixtures for tests of the layout editor."""

from __future__ import annotations

import pytest
from pytestqt.qtbot import QtBot

from engine.planning.plan.preview import Preview
from tests.support.editor_hand import Hand, MakeHand
from widgets.layout_editor.editor import LayoutEditor


@pytest.fixture
def make_hand(qtbot: QtBot) -> MakeHand:
    def make(preview: Preview) -> Hand:
        editor = LayoutEditor()
        qtbot.addWidget(editor)
        editor.resize(1000, 620)
        with qtbot.waitExposed(editor):
            editor.show()
        editor.set_preview(preview)
        editor.setFocus()
        return Hand(editor)

    return make
