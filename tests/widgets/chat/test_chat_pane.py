"""The chat pane with real key presses: what is sent, what stays, and what is said around the messages."""

from __future__ import annotations

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from pytestqt.qtbot import QtBot

from engine.settings.sampling_table import SAMPLING
from tests.widgets.chat.conftest import exchange
from widgets.chat.chat_pane import ChatPane
from widgets.chat.context_meter import ContextPart
from widgets.chat.settings_panel import SettingChange, SettingRow


def ask(pane: ChatPane, text: str) -> None:
    pane.prompt_edit.setPlainText(text)
    QTest.keyClick(pane.prompt_edit, Qt.Key.Key_Return)


def test_enter_sends_what_was_typed(qtbot: QtBot, pane: ChatPane) -> None:
    QTest.keyClicks(pane.prompt_edit, "first")
    QTest.keyClick(pane.prompt_edit, Qt.Key.Key_Return, Qt.KeyboardModifier.ShiftModifier)
    QTest.keyClicks(pane.prompt_edit, "second")

    with qtbot.waitSignal(pane.send_requested) as sent:
        QTest.keyClick(pane.prompt_edit, Qt.Key.Key_Enter)

    assert sent.args == ["first\nsecond"]
    assert pane.prompt_edit.toPlainText() == ""


def test_the_button_sends_and_becomes_stop(qtbot: QtBot, pane: ChatPane) -> None:
    pane.prompt_edit.setPlainText("hi")
    with qtbot.waitSignal(pane.send_requested):
        QTest.mouseClick(pane.send_button, Qt.MouseButton.LeftButton)

    assert not pane.send_button.isVisible()
    with qtbot.waitSignal(pane.stop_requested):
        QTest.mouseClick(pane.stop_button, Qt.MouseButton.LeftButton)

    pane.set_answering(False)
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
    assert pane.prompt_edit.toPlainText() == "too early"


def test_a_question_comes_back_unless_something_else_is_typed(pane: ChatPane) -> None:
    pane.return_question("second")
    assert pane.prompt_edit.toPlainText() == "second"
    assert pane.prompt_edit.textCursor().atEnd()
    pane.return_question("third")
    assert pane.prompt_edit.toPlainText() == "second"


def test_drafts_are_told_when_typing_rests_and_shown_without_being_told(qtbot: QtBot, pane: ChatPane) -> None:
    with qtbot.waitSignal(pane.draft_changed) as told:
        QTest.keyClicks(pane.prompt_edit, "half a")
    assert told.args == ["half a"]
    with qtbot.assertNotEmitted(pane.draft_changed, wait=0):
        pane.show_draft("of another one")
    assert pane.prompt_edit.toPlainText() == "of another one"


def test_a_full_context_says_what_to_do(qtbot: QtBot, pane: ChatPane) -> None:
    pane.set_context_full(True)
    with qtbot.assertNotEmitted(pane.send_requested):
        ask(pane, "more")
    assert pane.prompt_edit.toPlainText() == "more"
    with qtbot.waitSignal(pane.new_requested):
        QTest.mouseClick(pane.banner_new_button, Qt.MouseButton.LeftButton)
    pane.set_context_full(False)
    assert not pane.banner_new_button.isVisible()


@pytest.mark.parametrize(
    ("parts", "total", "shown"),
    [
        ([ContextPart("system", 204), ContextPart("history", 1000)], 16384, "1 204 / 16 384"),
        (None, 8192, "– / 8 192"),
        ([ContextPart("history", 5)], None, ""),
        ([], 256, "0 / 256"),
    ],
)
def test_the_context_meter(pane: ChatPane, parts: list[ContextPart] | None, total: int | None, shown: str) -> None:
    pane.show_context(parts, total)
    assert pane.context_text.replace("\N{NARROW NO-BREAK SPACE}", " ") == shown
    assert pane.context_meter.isVisible() is (total is not None)


def test_the_arrow_up_edits_the_last_question(qtbot: QtBot, pane: ChatPane) -> None:
    pane.show_messages([*exchange("first", number=1), *exchange("second", number=2)])
    QTest.keyClick(pane.prompt_edit, Qt.Key.Key_Up)
    bubble = pane.message_list.bubble("q2")
    assert bubble is not None
    assert bubble.edit_box is not None
    assert bubble.edit_box.edit.toPlainText() == "second"
    bubble.edit_box.edit.setPlainText("second, but better")
    with qtbot.waitSignal(pane.acted) as acted:
        QTest.keyClick(bubble.edit_box.edit, Qt.Key.Key_Return)
    assert (acted.args[0].kind, acted.args[0].message, acted.args[0].text) == ("edit", "q2", "second, but better")


def test_the_input_grows_to_a_few_lines(pane: ChatPane) -> None:
    edit = pane.prompt_edit
    heights = []
    for lines in (1, 3, 6, 30):
        edit.setPlainText("\n".join(["line"] * lines))
        heights.append(edit.height())
    assert heights[0] < heights[1] < heights[2] == heights[3]
    edit.clear()
    assert edit.height() == heights[0]


def test_settings_say_where_they_come_from_and_what_is_typed_is_told(qtbot: QtBot, pane: ChatPane) -> None:
    pane.settings_button.click()
    panel = pane.settings_panel
    assert panel is not None
    assert panel.isVisible()
    panel.show_values({each.key: SettingRow(each.kind.text_of(each.default), "default", False) for each in SAMPLING})
    field = panel.fields["temperature"]
    assert field.text == "0.8"
    field.control.setFocus()
    with qtbot.waitSignal(panel.value_changed) as changed:
        QTest.keyClick(field.control, Qt.Key.Key_A, Qt.KeyboardModifier.ControlModifier)
        QTest.keyClicks(field.control, "1.5")
        QTest.keyClick(field.control, Qt.Key.Key_Return)
    assert changed.args == [SettingChange("temperature", "1.5")]
    panel.show_system("be brief", "of the preset")
    with qtbot.waitSignal(panel.system_changed) as system:
        panel.system_edit.setPlainText("be long")
    assert system.args == ["be long"]
