"""Tool calls in a message: folded, with a field for the result of each."""

from __future__ import annotations

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QGuiApplication
from PySide6.QtTest import QTest
from pytestqt.qtbot import QtBot

from engine.base.values import replace
from tests.widgets.chat.conftest import long_conversation
from widgets.chat.bubble import Bubble
from widgets.chat.call_blocks import CallBlock, ResultEdit
from widgets.chat.chat_pane import ChatPane
from widgets.chat.shown import MessageAction, ShownCall, ShownMessage

ARGUMENTS = '{\n  "town": "Bonn"\n}'
BONN = ShownCall("c1", "look", ARGUMENTS, wants_result=True)
ULM = ShownCall("c2", "look", '{\n  "town": "Ulm"\n}', wants_result=True, draft="8 deg")
QUESTION = ShownMessage("q", "user", "You", "Where?")
CALLED = ShownMessage("a", "assistant", "Demo", "", calls=(BONN, ULM), source="Call of look")
RESULT = ShownMessage("r", "tool", "Result of look", "```\n12 degrees\n```", source="12 degrees", can_answer=True)


@pytest.fixture
def actions(pane: ChatPane) -> list[MessageAction]:
    found: list[MessageAction] = []
    pane.acted.connect(found.append)
    return found


def bubble_of(pane: ChatPane, message: str) -> Bubble:
    bubble = pane.message_list.bubble(message)
    assert bubble is not None
    return bubble


def blocks(pane: ChatPane) -> list[CallBlock]:
    return bubble_of(pane, "a").calls.blocks


def result(pane: ChatPane, place: int) -> ResultEdit:
    found = blocks(pane)[place].result
    assert found is not None
    return found


def test_a_call_is_folded_and_shows_arguments_and_id_when_it_is_opened(qtbot: QtBot, pane: ChatPane) -> None:
    pane.show_messages([QUESTION, CALLED])
    first, second = blocks(pane)
    assert first.fold_button.text() == "▸ Calls look"
    assert not first.view.isVisible()
    QTest.mouseClick(first.fold_button, Qt.MouseButton.LeftButton)
    qtbot.waitUntil(lambda: first.view.isVisible() and '"town": "Bonn"' in first.view.document().toPlainText())
    assert first._id.text() == "ID: c1"
    qtbot.waitUntil(lambda: second.y() >= first.height() > 60)
    assert not second.is_unfolded


def test_a_result_is_sent_by_the_button_or_enter(pane: ChatPane, actions: list[MessageAction]) -> None:
    pane.show_messages([QUESTION, CALLED])
    assert result(pane, 1).edit.toPlainText() == "8 deg", "the draft"
    QTest.keyClicks(result(pane, 0).edit, "12")
    QTest.mouseClick(result(pane, 0).send_button, Qt.MouseButton.LeftButton)
    assert actions == [MessageAction("type_result", "a", "12", "c1"), MessageAction("result", "a", "12", "c1")]
    actions.clear()
    QTest.keyClick(result(pane, 1).edit, Qt.Key.Key_Return)
    assert actions == [MessageAction("result", "a", "8 deg", "c2")]


def test_answer_without_result_keeps_what_was_typed(pane: ChatPane, actions: list[MessageAction]) -> None:
    pane.show_messages([QUESTION, CALLED])
    QTest.keyClicks(result(pane, 0).edit, "12")
    QTest.mouseClick(result(pane, 1).skip_button, Qt.MouseButton.LeftButton)
    assert actions == [MessageAction("type_result", "a", "12", "c1"), MessageAction("answer", "a")]


def test_a_block_with_its_result_has_no_input_and_the_other_keeps_its_text(pane: ChatPane) -> None:
    pane.show_messages([QUESTION, CALLED])
    QTest.keyClicks(result(pane, 1).edit, "rees")
    given = replace(CALLED, calls=(replace(BONN, wants_result=False), ULM))
    pane.show_messages([QUESTION, given, RESULT])
    assert blocks(pane)[0].result is None
    assert result(pane, 1).edit.toPlainText() in ("rees8 deg", "8 degrees")


def test_typed_text_is_reported_when_the_message_is_scrolled_away(pane: ChatPane, actions: list[MessageAction]) -> None:
    pane.show_messages([*long_conversation(60), QUESTION, CALLED])
    QTest.keyClicks(result(pane, 0).edit, "12")
    pane.prompt_edit.setFocus()
    pane.message_list.verticalScrollBar().setValue(0)
    assert pane.message_list.bubble("a") is None
    assert actions == [MessageAction("type_result", "a", "12", "c1")]


def test_typed_text_is_reported_before_another_conversation_is_shown(
    pane: ChatPane, actions: list[MessageAction]
) -> None:
    pane.show_messages([QUESTION, CALLED])
    QTest.keyClicks(result(pane, 0).edit, "12")
    pane.flush()
    assert actions == [MessageAction("type_result", "a", "12", "c1")]


def test_escape_leaves_the_result_for_the_input(pane: ChatPane) -> None:
    pane.show_messages([QUESTION, CALLED])
    result(pane, 0).edit.setFocus()
    QTest.keyClick(result(pane, 0).edit, Qt.Key.Key_Escape)
    assert pane.prompt_edit.hasFocus()


def test_a_result_is_folded_and_can_be_changed(qtbot: QtBot, pane: ChatPane, actions: list[MessageAction]) -> None:
    pane.show_messages([QUESTION, replace(CALLED, calls=(replace(BONN, wants_result=False),)), RESULT])
    bubble = bubble_of(pane, "r")
    assert bubble.result_button.text() == "▸ 12 degrees"
    assert not bubble.view.isVisible()
    QTest.mouseClick(bubble.result_button, Qt.MouseButton.LeftButton)
    qtbot.waitUntil(lambda: bubble.view.isVisible() and bubble.view.document().toPlainText().strip() == "12 degrees")
    bubble.setFocus()
    QTest.keyClick(bubble, Qt.Key.Key_C)
    assert QGuiApplication.clipboard().text() == "12 degrees"
    QTest.keyClick(bubble, Qt.Key.Key_E)
    assert bubble.edit_box is not None
    assert bubble.edit_box.edit.toPlainText() == "12 degrees"
    bubble.edit_box.edit.setPlainText("13 degrees")
    bubble.edit_box.send_button.click()
    bubble.head.choose("answer")
    assert actions == [MessageAction("edit", "r", "13 degrees"), MessageAction("answer", "r")]


def test_a_match_of_the_search_unfolds_the_result(qtbot: QtBot, pane: ChatPane) -> None:
    pane.show_messages([QUESTION, CALLED, RESULT])
    pane.open_find()
    pane.find_bar.text_edit.setText("degrees")
    qtbot.waitUntil(bubble_of(pane, "r").result_button.isChecked)


def test_copy_takes_the_calls_along(pane: ChatPane) -> None:
    pane.show_messages([QUESTION, CALLED])
    bubble_of(pane, "a").head.choose("copy")
    assert QGuiApplication.clipboard().text() == "Call of look"


@pytest.mark.parametrize(("width", "is_beside"), [(600, True), (200, False)])
def test_buttons_are_stacked_where_both_have_no_room(pane: ChatPane, width: int, is_beside: bool) -> None:
    pane.show_messages([QUESTION, CALLED])
    shown = result(pane, 0)
    height = shown.fit(width)
    assert (shown.send_button.y() == shown.skip_button.y()) == is_beside
    for part in (shown.edit, shown.send_button, shown.skip_button):
        assert part.x() >= 0
        assert part.geometry().right() < width
        assert part.geometry().bottom() < height
