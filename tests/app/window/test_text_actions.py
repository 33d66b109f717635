"""Cut, Copy, Paste and Select All of the Edit menu act on the widget with the keyboard focus."""

from __future__ import annotations

from PySide6.QtGui import QGuiApplication
from pytestqt.qtbot import QtBot

from tests.support.windows import WindowOpener


def test_the_edit_menu_acts_on_the_focused_text(open_window: WindowOpener, qtbot: QtBot) -> None:
    window = open_window()
    main, actions = window.main, window.actions
    main.activateWindow()
    edit = window.views.current.chat.prompt_edit
    edit.setPlainText("one two")
    edit.setFocus()
    qtbot.waitUntil(edit.hasFocus)
    assert all(actions[name].isEnabled() for name in ("cut", "copy", "paste", "select_all"))
    actions["select_all"].trigger()
    actions["cut"].trigger()
    assert edit.toPlainText() == ""
    assert QGuiApplication.clipboard().text() == "one two"
    actions["paste"].trigger()
    actions["paste"].trigger()
    assert edit.toPlainText() == "one twoone two"
    edit.clear()
    main.settings_bar.setFocus()
    window.views.current.chat.send_button.setEnabled(True)
    window.views.current.chat.send_button.setFocus()
    qtbot.waitUntil(lambda: not edit.hasFocus())
    assert not any(actions[name].isEnabled() for name in ("cut", "paste", "select_all"))
    actions["copy"].trigger()
    assert QGuiApplication.clipboard().text() == "one two"


def test_find_opens_the_bar_of_the_current_chat(open_window: WindowOpener) -> None:
    window = open_window()
    bar = window.views.current.chat.find_bar
    assert not bar.isVisible()
    window.actions["find_in_chat"].trigger()
    assert bar.isVisible()
