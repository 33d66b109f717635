"""The list of conversations with real clicks and keys."""

from __future__ import annotations

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QLineEdit, QMenu
from pytestqt.qtbot import QtBot

from widgets.chat.chat_rows import sign_place
from widgets.chat.conversation_list import ChatChange, ChatPlace, ConversationList, ListedChat, ListedHit

CHATS = (
    ListedChat("p", "pinned one", pinned=True),
    ListedChat("a", "first & last"),
    ListedChat("b", "second", folder="Work"),
    ListedChat("c", "third", folder="Home"),
)


@pytest.fixture
def chats(qtbot: QtBot) -> ConversationList:
    made = ConversationList()
    qtbot.addWidget(made)
    made.resize(240, 400)
    made.show_chats(CHATS)
    made.show()
    return made


def texts(chats: ConversationList) -> list[str]:
    return [chats.list_widget.item(row).text() for row in range(chats.list_widget.count())]


def click(chats: ConversationList, row: int) -> None:
    view = chats.list_widget
    place = view.visualItemRect(view.item(row)).center()
    QTest.mouseClick(view.viewport(), Qt.MouseButton.LeftButton, pos=place)


def test_folders_come_after_what_is_in_none(chats: ConversationList) -> None:
    assert texts(chats) == ["pinned one", "first & last", "Home", "third", "Work", "second"]


def test_a_click_opens_and_a_heading_does_nothing(qtbot: QtBot, chats: ConversationList) -> None:
    with qtbot.waitSignal(chats.opened) as opened:
        click(chats, 1)
    assert opened.args == [ChatPlace("a")]
    with qtbot.assertNotEmitted(chats.opened, wait=0):
        click(chats, 2)


def test_a_title_is_changed_in_place(qtbot: QtBot, chats: ConversationList) -> None:
    chats.show_current("a")
    view = chats.list_widget
    view.setFocus()
    QTest.keyClick(view, Qt.Key.Key_F2)
    editor = view.findChild(QLineEdit)
    assert editor is not None
    editor.setText("a new\ttitle ")
    with qtbot.waitSignal(chats.renamed) as renamed:
        QTest.keyClick(editor, Qt.Key.Key_Return)
    assert renamed.args == [ChatChange("a", "a new title")]


def test_delete_asks_and_can_be_undone(qtbot: QtBot, chats: ConversationList) -> None:
    chats.show_current("a")
    chats.list_widget.setFocus()
    with qtbot.waitSignal(chats.delete_requested) as asked:
        QTest.keyClick(chats.list_widget, Qt.Key.Key_Delete)
    assert asked.args == ["a"]
    assert not chats.undo_button.isVisible()
    chats.offer_undo("first & last")
    with qtbot.waitSignal(chats.undo_requested):
        QTest.mouseClick(chats.undo_button, Qt.MouseButton.LeftButton)
    chats.offer_undo("")
    assert not chats.undo_button.isVisible()


def test_the_menu_moves_and_pins(qtbot: QtBot, chats: ConversationList) -> None:
    menu = chats.menu_for(chats.list_widget.item(1))
    actions = {action.text(): action for action in menu.actions()}
    with qtbot.waitSignal(chats.pin_toggled) as pinned:
        actions["Pin"].trigger()
    assert pinned.args == ["a"]
    folders = next(child for child in menu.children() if getattr(child, "title", lambda: "")() == "Move to folder")
    moves = {action.text(): action for action in folders.actions()}  # type: ignore[attr-defined]
    assert set(moves) == {"Home", "Work", "New folder…"}
    with qtbot.waitSignal(chats.moved) as moved:
        moves["Work"].trigger()
    assert moved.args == [ChatChange("a", "Work")]
    menu.close()


@pytest.mark.qt_log_ignore("plugin does not support", extend=True)
def test_the_sign_on_a_row_opens_its_menu_and_not_the_conversation(qtbot: QtBot, chats: ConversationList) -> None:
    view = chats.list_widget
    row = view.visualItemRect(view.item(1))
    with qtbot.assertNotEmitted(chats.opened):
        QTest.mouseClick(
            view.viewport(), Qt.MouseButton.LeftButton, pos=sign_place(row, chats.layoutDirection()).center()
        )
    menu = QApplication.activePopupWidget()
    assert isinstance(menu, QMenu)
    assert {"Rename", "Pin", "Delete"} <= {action.text() for action in menu.actions()}
    menu.close()
    heading = view.visualItemRect(view.item(2))
    QTest.mouseClick(
        view.viewport(), Qt.MouseButton.LeftButton, pos=sign_place(heading, chats.layoutDirection()).center()
    )
    assert QApplication.activePopupWidget() is None


def test_a_search_shows_places_and_ends_when_it_is_cleared(qtbot: QtBot, chats: ConversationList) -> None:
    with qtbot.waitSignal(chats.search_requested) as wanted:
        QTest.keyClicks(chats.search_edit, "needle")
    assert wanted.args == ["needle"]
    chats.show_hits([ListedHit("a", "m1", "first", "…the needle is…"), ListedHit("b", "", "needles", "needles")])
    assert texts(chats) == ["first\n…the needle is…", "needles"]
    with qtbot.waitSignal(chats.opened) as opened:
        click(chats, 0)
    assert opened.args == [ChatPlace("a", "m1")]
    chats.show_hits([])
    assert texts(chats) == ["Nothing was found."]
    chats.search_edit.clear()
    assert len(texts(chats)) == 6
