"""The list of messages with real mouse and keyboard: layout, scrolling, and actions."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QEvent, QPoint, QPointF, Qt
from PySide6.QtGui import QEnterEvent, QGuiApplication
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from engine.base.values import replace
from tests.widgets.chat.conftest import exchange, long_conversation
from widgets.chat.bubble import Bubble
from widgets.chat.chat_pane import ChatPane
from widgets.chat.shown import MessageAction, ShownMessage
from widgets.markdown.blocks import MAX_PIECES


def bubble_of(pane: ChatPane, message: str) -> Bubble:
    bubble = pane.message_list.bubble(message)
    assert bubble is not None
    return bubble


def point_at(bubble: Bubble) -> None:
    place = QPointF(5, 5)
    QApplication.sendEvent(bubble, QEnterEvent(place, place, QPointF(bubble.mapToGlobal(QPoint(5, 5)))))


def test_only_what_is_in_sight_is_laid_out(pane: ChatPane) -> None:
    messages = long_conversation(500)
    pane.show_messages(messages)
    assert 0 < len(pane.message_list.bubbles()) < 30
    assert pane.messages == tuple((each.role, each.text) for each in messages)
    assert pane.message_list.bubbles()[-1].message == messages[-1]
    pane.message_list.show_message("q100")
    shown = bubble_of(pane, "q100")
    assert abs(shown.y()) < 20
    assert shown.hasFocus()
    assert len(pane.message_list.bubbles()) < 40


def test_an_answer_streams_into_its_message(qtbot: QtBot, pane: ChatPane) -> None:
    question, _ = exchange()
    pane.show_messages([question, ShownMessage("a", "assistant", "Demo", "", is_open=True)])
    for piece in ("be", "**cause**", " of\n\n", "<b>this</b>"):
        pane.message_list.append("a", piece)
    document = bubble_of(pane, "a").view.document()
    qtbot.waitUntil(lambda: document.toPlainText() == "because of\n<b>this</b>")
    assert pane.last_text == "be**cause** of\n\n<b>this</b>"
    pane.message_list.update_message(ShownMessage("a", "assistant", "Demo", pane.last_text, note="31.2 tok/s"))
    assert bubble_of(pane, "a").note == "31.2 tok/s"


def test_what_streams_out_of_sight_is_there_when_it_is_scrolled_to(pane: ChatPane) -> None:
    messages = [*long_conversation(60), ShownMessage("a", "assistant", "Demo", "so ", is_open=True)]
    pane.show_messages(messages)
    pane.message_list.verticalScrollBar().setValue(0)
    assert pane.message_list.bubble("a") is None
    pane.message_list.append("a", "far")
    assert pane.last_text == "so far"
    pane.message_list.scroll_to_end()
    assert bubble_of(pane, "a").text == "so far"


def test_the_list_follows_the_end_only_while_the_reader_is_there(qtbot: QtBot, pane: ChatPane) -> None:
    messages = [*long_conversation(10), ShownMessage("a", "assistant", "Demo", "", is_open=True)]
    pane.show_messages(messages)
    bar = pane.message_list.verticalScrollBar()
    before = bar.maximum()
    pane.message_list.append("a", "more\n\n" * 30)
    qtbot.waitUntil(lambda: bar.maximum() > before)
    assert bar.value() == bar.maximum()
    bar.setValue(40)
    before = bar.maximum()
    pane.message_list.append("a", "more\n\n" * 30)
    pane.message_list.update_message(replace(messages[-1], text="more\n\n" * 60))
    assert bar.value() == 40


def test_the_reader_stays_when_what_is_above_turns_out_higher(pane: ChatPane) -> None:
    messages = [*exchange("x\n\n" * 40, "y", 0), *long_conversation(30)]
    pane.show_messages([replace(each, id=f"{number}") for number, each in enumerate(messages)])
    bar = pane.message_list.verticalScrollBar()
    bar.setValue(bar.maximum() // 2)
    for _ in range(12):
        place = next(bubble for bubble in pane.message_list.bubbles() if bubble.y() + bubble.height() > 60)
        before = place.y()
        bar.setValue(bar.value() - 30)
        assert place.y() == before + 30 or bar.value() == 0


def shown_actions(pane: ChatPane, message: str) -> set[str]:
    return {kind for kind, button in bubble_of(pane, message).head.buttons.items() if button.isVisible()}


def test_actions_are_there_for_pointer_and_keyboard(qtbot: QtBot, pane: ChatPane) -> None:
    pane.show_messages([*exchange(), *exchange(number=1)])
    answer = bubble_of(pane, "a0")
    assert not shown_actions(pane, "a0")
    point_at(answer)
    assert shown_actions(pane, "a0") == {"copy", "regenerate", "branch", "delete"}
    QTest.mouseClick(answer.head.buttons["copy"], Qt.MouseButton.LeftButton)
    assert QGuiApplication.clipboard().text() == "because"
    QApplication.sendEvent(answer, QEvent(QEvent.Type.Leave))
    pane.prompt_edit.setFocus()
    assert not shown_actions(pane, "a0")
    for key, kind in ((Qt.Key.Key_R, "regenerate"), (Qt.Key.Key_B, "branch"), (Qt.Key.Key_Delete, "delete")):
        answer.setFocus()
        with qtbot.waitSignal(pane.acted) as acted:
            QTest.keyClick(answer, key)
        assert (acted.args[0].kind, acted.args[0].message) == (kind, "a0")


def test_what_can_be_done_with_the_last_answer_is_seen_below_it(pane: ChatPane) -> None:
    question, answer = exchange()
    pane.show_messages([question, replace(answer, is_open=True)])
    assert not shown_actions(pane, "a0")
    pane.show_messages([question, answer])
    assert shown_actions(pane, "a0") == {"copy", "regenerate", "branch", "delete"}
    bubble = bubble_of(pane, "a0")
    assert bubble.head.y() > bubble.view.y() + bubble.view.height()
    assert not shown_actions(pane, "q0")
    pane.show_messages([question, answer, *exchange(number=1)])
    assert not shown_actions(pane, "a0")


def test_a_copy_is_told_for_a_while(qtbot: QtBot, pane: ChatPane) -> None:
    pane.show_messages(exchange())
    button = bubble_of(pane, "a0").head.buttons["copy"]
    before = button.text()
    QTest.mouseClick(button, Qt.MouseButton.LeftButton)
    assert button.text() == "Copied"
    qtbot.waitUntil(lambda: button.text() == before)


def test_actions_without_room_are_in_a_menu_and_keep_their_keys(qtbot: QtBot, pane: ChatPane) -> None:
    pane.resize(200, 560)
    pane.show_messages(exchange())
    answer = bubble_of(pane, "a0")
    shown = shown_actions(pane, "a0")
    assert "copy" in shown
    assert "delete" not in shown
    assert answer.head.more_button.geometry().right() <= answer.head.width()
    rest = answer.head.more_menu().actions()
    assert len(shown) + len(rest) == len({"copy", "regenerate", "branch", "delete"})
    with qtbot.waitSignal(pane.acted) as acted:
        rest[-1].trigger()
    assert acted.args[0].kind == "delete"
    answer.setFocus()
    with qtbot.waitSignal(pane.acted) as acted:
        QTest.keyClick(answer, Qt.Key.Key_Delete)
    assert acted.args[0].kind == "delete"


def test_dots_stand_for_an_answer_whose_first_word_has_not_come(pane: ChatPane) -> None:
    question, answer = exchange()
    pane.show_messages([question, replace(answer, text="", is_open=True)])
    dots = bubble_of(pane, "a0").dots
    assert dots.isVisible()
    pane.message_list.append("a0", "Be")
    pane.show_messages([question, replace(answer, text="Be", is_open=True)])
    assert not dots.isVisible()


def test_versions_have_arrows(qtbot: QtBot, pane: ChatPane) -> None:
    question, answer = exchange()
    pane.show_messages([question, replace(answer, version=2, versions=3)])
    head = bubble_of(pane, "a0").head
    for button, kind in ((head.older_button, "older"), (head.newer_button, "newer")):
        with qtbot.waitSignal(pane.acted) as acted:
            QTest.mouseClick(button, Qt.MouseButton.LeftButton)
        assert acted.args[0].kind == kind
    pane.show_messages([question, replace(answer, version=3, versions=3)])
    assert not head.newer_button.isEnabled()


def test_the_keyboard_goes_on_where_people_do(qtbot: QtBot, pane: ChatPane) -> None:
    question, answer = exchange()
    answer = replace(answer, version=2, versions=2)
    pane.show_messages([question, answer])
    older = replace(answer, id="a1", version=1)

    def act(action: MessageAction) -> None:
        pane.show_messages([question, older if action.kind == "older" else replace(answer, id="a2", is_open=True)])

    pane.acted.connect(act)
    QTest.mouseClick(bubble_of(pane, "a0").head.older_button, Qt.MouseButton.LeftButton)
    assert bubble_of(pane, "a1").hasFocus()
    QTest.keyClick(bubble_of(pane, "a1"), Qt.Key.Key_R)
    assert pane.prompt_edit.hasFocus()


def test_escape_leaves_a_question_as_it_was(qtbot: QtBot, pane: ChatPane) -> None:
    pane.show_messages(exchange())
    question = bubble_of(pane, "q0")
    question.setFocus()
    QTest.keyClick(question, Qt.Key.Key_E)
    assert question.edit_box is not None
    with qtbot.assertNotEmitted(pane.acted):
        QTest.keyClick(question.edit_box.edit, Qt.Key.Key_Escape)
    assert question.edit_box is None


def test_thoughts_are_folded_and_unfold(qtbot: QtBot, pane: ChatPane) -> None:
    question, answer = exchange()
    pane.show_messages([question, replace(answer, thinking="hm *well*", thinking_note="Thought for 2.0 s")])
    box = bubble_of(pane, "a0").thinking
    assert box.isVisible()
    assert not box.view.isVisible()
    assert "Thought for 2.0 s" in box.fold_button.text()
    folded = box.height()
    QTest.mouseClick(box.fold_button, Qt.MouseButton.LeftButton)
    qtbot.waitUntil(lambda: box.height() > folded)
    assert box.view.document().toPlainText() == "hm well"
    assert not box.now_button.isVisible()


def test_a_model_that_thinks_can_be_asked_to_answer_now(qtbot: QtBot, pane: ChatPane) -> None:
    question, _ = exchange()
    pane.show_messages([question, ShownMessage("a", "assistant", "Demo", "", is_open=True)])
    pane.message_list.append("a", "", "so many thoughts")
    box = bubble_of(pane, "a").thinking
    qtbot.waitUntil(box.now_button.isVisible)
    with qtbot.waitSignal(pane.acted) as acted:
        QTest.mouseClick(box.now_button, Qt.MouseButton.LeftButton)
    assert acted.args[0].kind == "answer_now"
    pane.message_list.append("a", "the answer")
    assert not box.now_button.isVisible()


def test_links_open_on_a_click_and_only_those_that_may(qtbot: QtBot, pane: ChatPane) -> None:
    text = "[docs](https://docs.example/x)\n\n[bad](javascript:alert) file:///etc/passwd"
    pane.show_messages([ShownMessage("a", "assistant", "Demo", text)])
    view = bubble_of(pane, "a").view
    with qtbot.waitSignal(pane.link_opened) as opened:
        QTest.mouseClick(view.viewport(), Qt.MouseButton.LeftButton, pos=QPoint(12, 12))
    assert opened.args == ["https://docs.example/x"]
    found = {view.link_at(QPointF(x, y)) for x in range(0, view.width(), 4) for y in range(0, view.height(), 4)}
    assert found == {"", "https://docs.example/x"}


def test_return_opens_the_link_at_the_text_cursor(qtbot: QtBot, pane: ChatPane) -> None:
    text = "see [docs](https://docs.example/x) [bad](javascript:alert)"
    pane.show_messages([ShownMessage("a", "assistant", "Demo", text)])
    view = bubble_of(pane, "a").view
    opened: list[tuple[int, str]] = []
    view.link_opened.connect(lambda link: opened.append((view.textCursor().position(), link)))
    view.setFocus()
    QTest.keyClick(view, Qt.Key.Key_Home)
    for _ in view.toPlainText():
        QTest.keyClick(view, Qt.Key.Key_Return)
        QTest.keyClick(view, Qt.Key.Key_Right)
    assert opened == [(place, "https://docs.example/x") for place in range(len("see "), len("see docs") + 1)]


def test_code_is_copied_and_saved_by_its_buttons(qtbot: QtBot, pane: ChatPane) -> None:
    pane.show_messages([ShownMessage("a", "assistant", "Demo", "```python\nprint(1)\n\nprint(2)\n```\n")])
    (head,) = bubble_of(pane, "a").view.code_heads
    QTest.mouseClick(head.copy_button, Qt.MouseButton.LeftButton)
    assert QGuiApplication.clipboard().text() == "print(1)\n\nprint(2)"
    with qtbot.waitSignal(pane.save_requested) as saved:
        QTest.mouseClick(head.save_button, Qt.MouseButton.LeftButton)
    assert saved.args == ["print(1)\n\nprint(2)", "python"]


@pytest.mark.parametrize("n_lines", [1, MAX_PIECES + 5])
def test_the_buttons_of_code_take_what_is_not_shown(qtbot: QtBot, pane: ChatPane, n_lines: int) -> None:
    code = "\n".join(["s = 'a\u200bb'"] * n_lines)
    pane.show_messages([ShownMessage("a", "assistant", "Demo", f"```python\n{code}\n```\n")])
    view = bubble_of(pane, "a").view
    qtbot.waitUntil(lambda: bool(view.code_heads))
    with qtbot.waitSignal(pane.save_requested) as saved:
        view.code_heads[0].save_button.click()
    assert saved.args == [code, "python"]
    view.code_heads[0].copy_button.click()
    qtbot.waitUntil(lambda: QGuiApplication.clipboard().text() == code)


def test_the_wheel_over_a_message_moves_the_list(pane: ChatPane) -> None:
    pane.show_messages(long_conversation(20))
    bar = pane.message_list.verticalScrollBar()
    end = bar.value()
    viewport = pane.message_list.viewport()
    window = pane.windowHandle()
    QTest.wheelEvent(window, QPointF(viewport.mapTo(pane, viewport.rect().center())), QPoint(0, 240))
    assert bar.value() < end


@pytest.mark.parametrize(
    "text", ["a" * 300_000, "> " * 100 + "deep", "```\n" + "x\n" * 3000, "$" * 5000, "| a |\n" * 900]
)
def test_strange_texts_are_shown_in_bounds(pane: ChatPane, text: str) -> None:
    pane.show_messages([ShownMessage("a", "assistant", "Demo", text)])
    assert pane.last_text == text
    assert bubble_of(pane, "a").view.document().blockCount() < 12_000


def test_what_an_answer_took_is_shown_on_a_click(pane: ChatPane) -> None:
    answer = ShownMessage("a", "assistant", "Demo", "Yes.", note="31.2 tokens/s · 3 tokens", details="CPU 0–1")
    pane.show_messages([ShownMessage("q", "user", "You", "Is it?"), answer])
    bubble = bubble_of(pane, "a")
    assert bubble.note == "31.2 tokens/s · 3 tokens"
    height = bubble.height()
    bubble.head.buttons["details"].click()
    assert bubble.note == "31.2 tokens/s · 3 tokens\nCPU 0–1"
    bubble.fit(bubble.width())
    assert bubble.height() > height
    bubble.head.buttons["details"].click()
    assert bubble.note == "31.2 tokens/s · 3 tokens"


def test_a_failed_answer_offers_retry_and_a_dropped_message_says_so(qtbot: QtBot, pane: ChatPane) -> None:
    failed = ShownMessage("a", "assistant", "Demo", "", note="Not sent.", is_error=True)
    pane.show_messages([ShownMessage("q", "user", "You", "Is it?", is_left_out=True), failed])
    retry = bubble_of(pane, "a").head.buttons["regenerate"]
    assert retry.text() == "Retry"
    with qtbot.waitSignal(pane.acted) as acted:
        retry.click()
    assert (acted.args[0].kind, acted.args[0].message) == ("regenerate", "a")
    assert bubble_of(pane, "q")._speaker.text() == "You · dropped from the context"
    pane.message_list.update_message(ShownMessage("a", "assistant", "Demo", "Yes."))
    assert bubble_of(pane, "a").head.buttons["regenerate"].text() == "Regenerate"


def test_a_narrow_question_says_in_full_that_it_was_dropped(pane: ChatPane) -> None:
    pane.show_messages([ShownMessage("q", "user", "You", "Is it?", is_left_out=True)])
    bubble = bubble_of(pane, "q")
    bubble.fit(260)
    assert bubble._speaker.width() >= bubble._speaker.sizeHint().width()
    bubble.head.set_active(True)
    assert bubble.head.more_button.isVisibleTo(bubble)
    assert bubble.head.geometry().right() <= bubble.width()


def test_what_was_opened_stays_open_after_scrolling(pane: ChatPane) -> None:
    question, answer, *rest = long_conversation(40)
    opened = replace(answer, details="CPU 0–1", thinking="hm", thinking_note="Thought for 2.0 s")
    pane.show_messages([question, opened, *rest])
    bar = pane.message_list.verticalScrollBar()
    bar.setValue(0)
    bubble = bubble_of(pane, "a0")
    bubble.head.buttons["details"].click()
    bubble.thinking.fold_button.click()
    bubble_of(pane, "q0").start_editing()
    editor = bubble_of(pane, "q0").edit_box
    assert editor is not None
    editor.edit.setPlainText("half a change")
    pane.prompt_edit.setFocus()
    bar.setValue(bar.maximum())
    assert pane.message_list.bubble("a0") is None
    bar.setValue(0)
    again = bubble_of(pane, "a0")
    assert again.note.endswith("\nCPU 0–1")
    assert again.thinking.is_unfolded
    assert bubble_of(pane, "q0").edit_box is editor
