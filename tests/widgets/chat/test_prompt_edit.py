"""The prompt field of the chat: its own undo, and the drops that it accepts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from PySide6.QtCore import QMimeData, Qt, QUrl
from PySide6.QtGui import QAction, QKeySequence
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QLineEdit, QMainWindow, QVBoxLayout, QWidget
from pytestqt.qtbot import QtBot

from widgets.chat.prompt_edit import PromptEdit
from widgets.common.delayed_call import DelayedCall


def test_undo_is_the_windows_where_nothing_was_typed(qtbot: QtBot) -> None:
    window, prompt, undone = QMainWindow(), PromptEdit(), []
    qtbot.addWidget(window)
    window.setCentralWidget(prompt)
    action = QAction("Undo", window)
    action.setShortcut(QKeySequence.StandardKey.Undo)
    action.triggered.connect(lambda: undone.append(prompt.toPlainText()))
    window.addAction(action)
    with qtbot.waitActive(window):
        window.show()
    prompt.setFocus()
    QTest.keyClicks(prompt, "words")
    QTest.keyClick(prompt, Qt.Key.Key_Z, Qt.KeyboardModifier.ControlModifier)
    assert (prompt.toPlainText(), undone) == ("", [])
    QTest.keyClick(prompt, Qt.Key.Key_Z, Qt.KeyboardModifier.ControlModifier)
    assert undone == [""]


def test_the_cursor_stops_blinking_until_the_next_key_or_another_field_has_the_focus(qtbot: QtBot) -> None:
    window, prompt, other = QMainWindow(), PromptEdit(), QLineEdit()
    qtbot.addWidget(window)
    box = QWidget()
    layout = QVBoxLayout(box)
    layout.addWidget(prompt)
    layout.addWidget(other)
    window.setCentralWidget(box)
    with qtbot.waitActive(window):
        window.show()
    usual_ms = QApplication.cursorFlashTime()
    assert usual_ms > 0
    prompt.setFocus()
    (pause,) = prompt.findChildren(DelayedCall)
    going_on: list[Callable[[], object]] = [lambda: QTest.keyClicks(prompt, "a"), other.setFocus]
    for go_on in going_on:
        assert pause.isActive()
        pause.flush()
        assert QApplication.cursorFlashTime() == 0
        go_on()
        assert QApplication.cursorFlashTime() == usual_ms


@pytest.mark.parametrize(
    ("address", "is_taken"),
    [("file:///models/a.gguf", False), ("file:///notes.txt", True), ("https://example.org/a.gguf", True)],
)
def test_a_model_file_is_left_to_the_window(qtbot: QtBot, address: str, is_taken: bool) -> None:
    prompt, dropped = PromptEdit(), QMimeData()
    qtbot.addWidget(prompt)
    dropped.setUrls([QUrl(address)])
    assert prompt.canInsertFromMimeData(dropped) is is_taken
