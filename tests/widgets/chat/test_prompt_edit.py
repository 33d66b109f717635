"""The input of the chat: whose Undo it is."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtGui import QAction, QKeySequence
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QMainWindow
from pytestqt.qtbot import QtBot

from widgets.chat.prompt_edit import PromptEdit


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
