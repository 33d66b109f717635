"""The list of conversations with real clicks and keys."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QModelIndex, QPersistentModelIndex, Qt
from PySide6.QtGui import QFont, QFontMetrics
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QLineEdit, QMenu
from pytestqt.modeltest import ModelTester
from pytestqt.qtbot import QtBot

from widgets.chat.chat_list_model import ChatChange, ChatListModel, ChatTarget, ListedChat, ListedHit
from widgets.chat.conversation_list import ConversationList, FittedSnippet, bold_range, fit_snippet, sign_rect

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
    model = chats.list_model
    return [model.index(row).data() for row in range(model.rowCount())]


def click(chats: ConversationList, row: int) -> None:
    view = chats.list_view
    place = view.visualRect(chats.list_model.index(row)).center()
    QTest.mouseClick(view.viewport(), Qt.MouseButton.LeftButton, pos=place)


def test_folders_come_after_what_is_in_none(chats: ConversationList) -> None:
    assert texts(chats) == ["pinned one", "first & last", "Home", "third", "Work", "second"]


def test_a_click_opens_and_a_heading_does_nothing(qtbot: QtBot, chats: ConversationList) -> None:
    with qtbot.waitSignal(chats.opened) as opened:
        click(chats, 1)
    assert opened.args == [ChatTarget("a")]
    with qtbot.assertNotEmitted(chats.opened, wait=0):
        click(chats, 2)


def test_a_title_is_changed_in_place(qtbot: QtBot, chats: ConversationList) -> None:
    chats.show_current("a")
    view = chats.list_view
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
    chats.list_view.setFocus()
    with qtbot.waitSignal(chats.delete_requested) as asked:
        QTest.keyClick(chats.list_view, Qt.Key.Key_Delete)
    assert asked.args == ["a"]
    assert not chats.undo_button.isVisible()
    chats.offer_undo("first & last")
    with qtbot.waitSignal(chats.undo_requested):
        QTest.mouseClick(chats.undo_button, Qt.MouseButton.LeftButton)
    chats.offer_undo("")
    assert not chats.undo_button.isVisible()


def test_the_menu_moves_and_pins(qtbot: QtBot, chats: ConversationList) -> None:
    menu = chats.menu_for(chats.list_model.index(1))
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


@pytest.mark.qt_log_ignore("plugin does not support", extend=True)  # no window manager takes popups to the front
def test_the_sign_on_a_row_opens_its_menu_and_not_the_conversation(qtbot: QtBot, chats: ConversationList) -> None:
    view = chats.list_view

    def click_sign(row: int) -> None:
        place = sign_rect(view.visualRect(chats.list_model.index(row)), chats.layoutDirection())
        QTest.mouseClick(view.viewport(), Qt.MouseButton.LeftButton, pos=place.center())

    with qtbot.assertNotEmitted(chats.opened):
        click_sign(1)
    menu = QApplication.activePopupWidget()
    assert isinstance(menu, QMenu)
    assert {"Rename", "Pin", "Delete"} <= {action.text() for action in menu.actions()}
    menu.close()
    click_sign(2)
    assert QApplication.activePopupWidget() is None, "a heading"


def test_a_search_shows_places_and_ends_when_it_is_cleared(qtbot: QtBot, chats: ConversationList) -> None:
    with qtbot.waitSignal(chats.search_requested) as wanted:
        QTest.keyClicks(chats.search_edit, "needle")
    assert wanted.args == ["needle"]
    chats.show_hits([ListedHit("a", "m1", "first", "…the needle is…"), ListedHit("b", "", "needles", "needles")])
    assert texts(chats) == ["first\n…the needle is…", "needles"]
    with qtbot.waitSignal(chats.opened) as opened:
        click(chats, 0)
    assert opened.args == [ChatTarget("a", "m1")]
    chats.show_hits([])
    assert texts(chats) == ["No matches."]
    chats.search_edit.clear()
    assert len(texts(chats)) == 6


def test_the_list_model_keeps_the_rules(qtmodeltester: ModelTester) -> None:
    model = ChatListModel()
    for chats in ((), CHATS, CHATS[:2], (*CHATS[:1], ListedChat("a", "renamed"))):
        model.set_chats(chats)
        qtmodeltester.check(model)  # type: ignore[no-untyped-call]
    model.set_hits([ListedHit("a", "m1", "first", "…the needle is…"), ListedHit("b", "", "needles", "needles")])
    qtmodeltester.check(model)  # type: ignore[no-untyped-call]
    model.set_hits([])
    qtmodeltester.check(model)  # type: ignore[no-untyped-call]


def test_of_many_conversations_only_those_in_sight_are_worded(qtbot: QtBot, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[int] = set()
    data = ChatListModel.data

    def noting(
        model: ChatListModel, index: QModelIndex | QPersistentModelIndex, role: int = Qt.ItemDataRole.DisplayRole
    ) -> object:
        asked.add(index.row())
        return data(model, index, role)

    monkeypatch.setattr(ChatListModel, "data", noting)
    chats = ConversationList()
    qtbot.addWidget(chats)
    chats.resize(240, 400)
    chats.show_chats([ListedChat(f"c{number}", f"chat {number}") for number in range(10_000)])
    chats.show_current("c9000")
    chats.show()
    qtbot.waitExposed(chats)
    chats.grab()
    assert 9000 in asked
    assert len(asked) < 100


def test_a_title_that_is_being_written_outlives_a_change_elsewhere(qtbot: QtBot, chats: ConversationList) -> None:
    chats.show_current("a")
    chats.list_view.setFocus()
    QTest.keyClick(chats.list_view, Qt.Key.Key_F2)
    editor = chats.list_view.findChild(QLineEdit)
    assert editor is not None
    editor.setText("half a ti")
    chats.show_chats((*CHATS[:3], ListedChat("c", "renamed meanwhile", folder="Home")))
    assert texts(chats)[3] == "renamed meanwhile"
    assert chats.list_view.findChild(QLineEdit) is editor
    assert editor.text() == "half a ti"
    with qtbot.waitSignal(chats.renamed) as renamed:
        QTest.keyClicks(editor, "tle")
        QTest.keyClick(editor, Qt.Key.Key_Return)
    assert renamed.args == [ChatChange("a", "half a title")]


def test_pinned_ones_are_bold_and_say_so_and_titles_are_no_markup(chats: ConversationList) -> None:
    pinned, plain, heading = (chats.list_model.index(row) for row in (0, 1, 2))
    assert pinned.data(Qt.ItemDataRole.FontRole).bold()
    assert pinned.data(Qt.ItemDataRole.ToolTipRole) == "<qt>pinned one<br>pinned</qt>"
    assert plain.data(Qt.ItemDataRole.FontRole) is None
    assert plain.data(Qt.ItemDataRole.ToolTipRole) == "<qt>first &amp; last</qt>"
    assert heading.flags() == Qt.ItemFlag.NoItemFlags


def test_a_double_click_on_the_sign_does_not_open_the_conversation(qtbot: QtBot, chats: ConversationList) -> None:
    view = chats.list_view
    place = sign_rect(view.visualRect(chats.list_model.index(1)), chats.layoutDirection()).center()
    with qtbot.assertNotEmitted(chats.opened):
        QTest.mouseDClick(view.viewport(), Qt.MouseButton.LeftButton, pos=place)
    popup = QApplication.activePopupWidget()
    if popup is not None:
        popup.close()


def test_the_sign_is_there_before_the_pointer_is(chats: ConversationList) -> None:
    """The dots of a long title would be taken for it."""
    chats.show_chats([ListedChat("a", "a very long title " * 5), ListedChat("b", "short")])
    view = chats.list_view
    for row in range(2):
        place = sign_rect(view.visualRect(chats.list_model.index(row)), chats.layoutDirection())
        image = view.viewport().grab(place).toImage()
        colours = {image.pixel(x, y) for x in range(image.width()) for y in range(image.height())}
        assert len(colours) > 1, row


def test_a_hit_shows_the_match_in_its_sentence() -> None:
    sentence = "It was a long evening by the sea, and the old harbour master spoke of the quay. Nobody listened."
    begin = sentence.index("quay")
    hit = ListedHit("a", "m1", "first", sentence, begin, begin + 4)
    metrics = QFontMetrics(QFont())
    width = metrics.horizontalAdvance("n" * 30)
    fitted = fit_snippet(hit, metrics, width)
    assert fitted.text[fitted.begin : fitted.end] == "quay"
    assert fitted.text.startswith("…")
    assert metrics.horizontalAdvance(fitted.text[: fitted.end]) < width
    assert fitted.text.endswith("Nobody listened.")
    short = ListedHit("a", "m1", "first", "the quay", 4, 8)
    assert fit_snippet(short, metrics, width) == FittedSnippet("the quay", 4, 8)


def test_the_match_is_bold_after_characters_of_two_units() -> None:
    text = "🚢🚢 the quay 🚢"
    fitted = FittedSnippet(text, text.index("quay"), text.index("quay") + 4)
    bold = bold_range(text, fitted)
    assert text.encode("utf-16-le")[2 * bold.start : 2 * (bold.start + bold.length)].decode("utf-16-le") == "quay"
    assert bold_range("🚢🚢 the qu", fitted).length == 2
    assert bold_range("🚢…", fitted).length == 0


def test_hits_are_drawn_with_a_line_for_the_match(chats: ConversationList) -> None:
    chats.search_edit.setText("quay")
    chats.show_hits([ListedHit("a", "m1", "first", "by the quay", 7, 11), ListedHit("b", "", "quays", "quays", 0, 4)])
    view = chats.list_view
    in_message, in_title = (view.visualRect(chats.list_model.index(row)).height() for row in range(2))
    assert in_message > in_title
    assert not view.grab().isNull()
    disabled = [
        action.text() for action in chats.menu_for(chats.list_model.index(0)).actions() if not action.isEnabled()
    ]
    assert disabled == ["Rename (clear the search first)"]
