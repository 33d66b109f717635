"""The chat pane with real key presses: streaming, failures, and text that is never lost."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QPoint, QPointF, Qt
from PySide6.QtGui import QContextMenuEvent, QGuiApplication, QTextCursor
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QScrollBar
from pytestqt.qtbot import QtBot

from widgets.chat.bubble import MessageText
from widgets.chat.chat_pane import ChatPane


@pytest.fixture
def pane(qtbot: QtBot) -> ChatPane:
    pane = ChatPane()
    qtbot.addWidget(pane)
    pane.resize(340, 500)
    pane.set_ready(True)
    pane.show()
    return pane


def ask(pane: ChatPane, text: str) -> None:
    pane.prompt_edit.setPlainText(text)
    QTest.keyClick(pane.prompt_edit, Qt.Key.Key_Return)


def exchange(pane: ChatPane, question: str, answer: str) -> None:
    ask(pane, question)
    pane.begin_answer("Demo")
    pane.append_text(answer)
    pane.finish_answer("12.0 tok/s")


def scroll_bar(pane: ChatPane) -> QScrollBar:
    return pane.message_list.verticalScrollBar()


def fill(qtbot: QtBot, pane: ChatPane) -> None:
    exchange(pane, "long?", "line\n" * 100)
    qtbot.waitUntil(lambda: scroll_bar(pane).maximum() > 500)


def test_enter_sends_what_was_typed(qtbot: QtBot, pane: ChatPane) -> None:
    QTest.keyClicks(pane.prompt_edit, "first")
    QTest.keyClick(pane.prompt_edit, Qt.Key.Key_Return, Qt.KeyboardModifier.ShiftModifier)
    QTest.keyClicks(pane.prompt_edit, "second")

    with qtbot.waitSignal(pane.send_requested) as sent:
        QTest.keyClick(pane.prompt_edit, Qt.Key.Key_Enter)

    assert sent.args == ["first\nsecond"]
    assert pane.prompt_edit.toPlainText() == ""
    assert pane.messages() == (("user", "first\nsecond"),)


def test_the_button_sends_and_becomes_stop(qtbot: QtBot, pane: ChatPane) -> None:
    pane.prompt_edit.setPlainText("hi")
    with qtbot.waitSignal(pane.send_requested):
        QTest.mouseClick(pane.send_button, Qt.MouseButton.LeftButton)

    assert not pane.send_button.isVisible()
    with qtbot.waitSignal(pane.stop_requested):
        QTest.mouseClick(pane.stop_button, Qt.MouseButton.LeftButton)

    pane.begin_answer("Demo")
    pane.finish_answer()
    assert pane.send_button.isVisible()
    assert not pane.stop_button.isVisible()


@pytest.mark.parametrize("text", ["", "   \n "])
def test_nothing_is_not_sent(qtbot: QtBot, pane: ChatPane, text: str) -> None:
    with qtbot.assertNotEmitted(pane.send_requested):
        ask(pane, text)


def test_text_stays_while_there_is_no_model(qtbot: QtBot, pane: ChatPane) -> None:
    pane.set_ready(False, "Load a model to chat.")

    with qtbot.assertNotEmitted(pane.send_requested):
        ask(pane, "a long question")

    assert pane.prompt_edit.toPlainText() == "a long question"
    assert pane.status_text == "Load a model to chat."
    assert not pane.send_button.isEnabled()
    pane.set_ready(True)
    assert pane.send_button.isEnabled()
    assert pane.status_text == ""


def test_nothing_more_is_sent_while_an_answer_comes(qtbot: QtBot, pane: ChatPane) -> None:
    ask(pane, "one")
    with qtbot.assertNotEmitted(pane.send_requested):
        ask(pane, "too early")
        pane.begin_answer("Demo")
        ask(pane, "still too early")

    assert pane.prompt_edit.toPlainText() == "still too early"
    assert pane.messages() == (("user", "one"),)


def test_an_answer_streams(qtbot: QtBot, pane: ChatPane) -> None:
    ask(pane, "why?")
    pane.begin_answer("Demo")
    for piece in ("be", "cause", " of\n", "<b>this</b> & that"):
        pane.append_text(piece)
    answer = pane.message_list.bubbles()[-1]
    qtbot.waitUntil(lambda: answer.text == "because of\n<b>this</b> & that")

    pane.finish_answer("31.2 tok/s")

    assert pane.messages() == (("user", "why?"), ("assistant", "because of\n<b>this</b> & that"))
    assert answer.note == "31.2 tok/s"


def test_pieces_that_were_not_drawn_yet_are_part_of_the_answer(pane: ChatPane) -> None:
    ask(pane, "why?")
    pane.begin_answer("Demo")
    pane.append_text("because")

    assert pane.messages()[-1] == ("assistant", "because")
    pane.append_text("!")
    pane.finish_answer()
    assert pane.messages()[-1] == ("assistant", "because!")


def test_text_without_an_open_answer_is_ignored(pane: ChatPane) -> None:
    exchange(pane, "a", "b")
    pane.append_text("late")
    pane.finish_answer("late")

    assert pane.messages() == (("user", "a"), ("assistant", "b"))


def test_a_bubble_is_as_tall_as_its_text(qtbot: QtBot, pane: ChatPane) -> None:
    exchange(pane, "q", "one")
    short = pane.message_list.bubbles()[-1].text_edit
    one_line = short.height()
    exchange(pane, "q", "word " * 200)
    wrapped = pane.message_list.bubbles()[-1].text_edit
    qtbot.waitUntil(lambda: wrapped.height() > 8 * one_line)

    assert wrapped.verticalScrollBar().maximum() == 0
    narrow = wrapped.height()
    pane.resize(900, 500)
    qtbot.waitUntil(lambda: wrapped.height() < narrow)
    assert wrapped.verticalScrollBar().maximum() == 0


def test_a_failed_answer_keeps_what_came_and_gives_the_question_back(pane: ChatPane) -> None:
    exchange(pane, "first", "fine")
    ask(pane, "second")
    pane.begin_answer("Demo")
    pane.append_text("half an ans")

    pane.fail_answer("The worker ended unexpectedly (signal 9).")

    answer = pane.message_list.bubbles()[-1]
    assert answer.text == "half an ans"
    assert answer.note == "The worker ended unexpectedly (signal 9)."
    assert pane.prompt_edit.toPlainText() == "second"
    assert pane.prompt_edit.textCursor().atEnd()
    assert pane.messages() == (("user", "first"), ("assistant", "fine"))
    assert pane.send_button.isEnabled()


def test_a_failure_does_not_replace_what_is_being_typed(pane: ChatPane) -> None:
    ask(pane, "second")
    pane.begin_answer("Demo")
    pane.prompt_edit.setPlainText("third")

    pane.fail_answer("gone")

    assert pane.prompt_edit.toPlainText() == "third"


def test_a_failure_before_the_answer_begins(pane: ChatPane) -> None:
    ask(pane, "second")

    pane.fail_answer("RPC0 does not answer.")

    assert pane.prompt_edit.toPlainText() == "second"
    assert pane.messages() == ()
    answer = pane.message_list.bubbles()[-1]
    assert answer.note == "RPC0 does not answer."
    assert not answer.text_edit.isVisible()


def test_the_question_that_failed_can_be_sent_again(qtbot: QtBot, pane: ChatPane) -> None:
    ask(pane, "again")
    pane.fail_answer("gone")
    with qtbot.waitSignal(pane.send_requested) as sent:
        QTest.keyClick(pane.prompt_edit, Qt.Key.Key_Return)

    assert sent.args == ["again"]
    assert pane.messages() == (("user", "again"),)


def test_clear_asks_and_can_be_undone(qtbot: QtBot, pane: ChatPane) -> None:
    exchange(pane, "a", "b")
    with qtbot.waitSignal(pane.clear_requested):
        QTest.mouseClick(pane.clear_button, Qt.MouseButton.LeftButton)
    assert len(pane.messages()) == 2

    pane.clear()
    pane.clear()
    assert pane.messages() == ()
    assert not pane.clear_button.isEnabled()

    with qtbot.waitSignal(pane.clear_undone):
        QTest.mouseClick(pane.undo_button, Qt.MouseButton.LeftButton)
    assert pane.messages() == (("user", "a"), ("assistant", "b"))
    assert not pane.undo_button.isVisible()


def test_a_new_message_ends_the_undo(pane: ChatPane) -> None:
    exchange(pane, "a", "b")
    pane.clear()
    ask(pane, "c")
    pane.begin_answer("Demo")
    pane.finish_answer()

    assert not pane.undo_button.isVisible()
    assert pane.messages() == (("user", "c"), ("assistant", ""))


def test_a_full_context_says_what_to_do(qtbot: QtBot, pane: ChatPane) -> None:
    exchange(pane, "a", "b")
    pane.set_context_full(True)

    with qtbot.assertNotEmitted(pane.send_requested):
        ask(pane, "more")
    assert pane.prompt_edit.toPlainText() == "more"
    assert pane.banner_clear_button.isVisible()
    with qtbot.waitSignal(pane.clear_requested):
        QTest.mouseClick(pane.banner_clear_button, Qt.MouseButton.LeftButton)

    pane.clear()
    assert not pane.banner_clear_button.isVisible()
    assert pane.send_button.isEnabled()


@pytest.mark.parametrize(
    ("used", "total", "shown"),
    [(1204, 16384, "1 204 / 16 384"), (None, 8192, "– / 8 192"), (5, None, ""), (0, 256, "0 / 256")],
)
def test_the_context_meter(pane: ChatPane, used: int | None, total: int | None, shown: str) -> None:
    pane.set_context(used, total)

    assert pane.context_text.replace("\N{NARROW NO-BREAK SPACE}", " ") == shown


def test_the_list_follows_the_end(qtbot: QtBot, pane: ChatPane) -> None:
    fill(qtbot, pane)
    pane.begin_answer("Demo")
    pane.append_text("more\n" * 50)
    bar = scroll_bar(pane)
    before = bar.maximum()
    qtbot.waitUntil(lambda: bar.maximum() > before)

    assert bar.value() == bar.maximum()


def test_the_list_stays_where_the_reader_is(qtbot: QtBot, pane: ChatPane) -> None:
    fill(qtbot, pane)
    pane.begin_answer("Demo")
    bar = scroll_bar(pane)
    bar.setValue(40)
    before = bar.maximum()
    pane.append_text("more\n" * 50)
    qtbot.waitUntil(lambda: bar.maximum() > before)

    assert bar.value() == 40


def test_the_wheel_over_a_message_moves_the_list(qtbot: QtBot, pane: ChatPane) -> None:
    fill(qtbot, pane)
    bar = scroll_bar(pane)
    end = bar.value()
    over_message = pane.message_list.viewport().mapTo(pane, pane.message_list.viewport().rect().center())
    below = pane.childAt(over_message)
    assert below is not None
    assert isinstance(below.parent(), MessageText)

    QTest.wheelEvent(pane.windowHandle(), QPointF(over_message), QPoint(0, 240))

    assert bar.value() < end


@pytest.mark.qt_log_ignore("plugin does not support", extend=True)  # no window manager takes popups to the front
def test_a_message_is_copied_from_its_menu(pane: ChatPane) -> None:
    exchange(pane, "a", "the <i>whole</i> answer")
    text_edit = pane.message_list.bubbles()[-1].text_edit
    position = QPoint(5, 5)
    QApplication.sendEvent(
        text_edit.viewport(),
        QContextMenuEvent(QContextMenuEvent.Reason.Mouse, position, text_edit.mapToGlobal(position)),
    )
    menu = QApplication.activePopupWidget()
    assert menu is not None
    actions = {action.text(): action for action in menu.actions()}

    assert not actions["Copy selection"].isEnabled()
    actions["Copy message"].trigger()
    menu.close()

    assert QGuiApplication.clipboard().text() == "the <i>whole</i> answer"


def test_a_selection_survives_streaming(qtbot: QtBot, pane: ChatPane) -> None:
    ask(pane, "q")
    pane.begin_answer("Demo")
    pane.append_text("first words")
    text_edit = pane.message_list.bubbles()[-1].text_edit
    qtbot.waitUntil(lambda: text_edit.toPlainText() == "first words")
    cursor = text_edit.textCursor()
    cursor.movePosition(QTextCursor.MoveOperation.Start)
    cursor.movePosition(QTextCursor.MoveOperation.NextWord, QTextCursor.MoveMode.KeepAnchor)
    text_edit.setTextCursor(cursor)

    pane.append_text(" and more")
    pane.finish_answer()

    assert text_edit.textCursor().selectedText() == "first "


def test_the_input_grows_to_a_few_lines(qtbot: QtBot, pane: ChatPane) -> None:
    edit = pane.prompt_edit
    heights = []
    for lines in (1, 3, 6, 30):
        edit.setPlainText("\n".join(["line"] * lines))
        heights.append(edit.height())

    assert heights[0] < heights[1] < heights[2] == heights[3]
    edit.clear()
    assert edit.height() == heights[0]
