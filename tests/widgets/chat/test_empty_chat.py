"""Sample questions in an empty chat: a click asks one, and they disappear with the first message."""

from __future__ import annotations

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from pytestqt.qtbot import QtBot

from tests.widgets.chat.conftest import STOPPED, exchange
from widgets.chat.chat_pane import ChatPane

QUESTIONS = ("Why is water & ice wet?", "What is a lake?")


@pytest.fixture(autouse=True)
def _offered(pane: ChatPane) -> None:
    pane.set_sample_prompts(QUESTIONS)


def click(pane: ChatPane, index: int) -> None:
    QTest.mouseClick(pane.sample_prompts.buttons[index], Qt.MouseButton.LeftButton)


def test_a_click_asks_and_the_questions_go_until_the_chat_is_empty_again(qtbot: QtBot, pane: ChatPane) -> None:
    pane.prompt_edit.setPlainText("half a thought")
    with qtbot.waitSignal(pane.send_requested) as sent:
        click(pane, 0)
    assert sent.args == [QUESTIONS[0]]
    assert pane.prompt_edit.toPlainText() == "half a thought"
    assert not pane.sample_prompts.isVisible()
    assert pane.prompt_edit.hasFocus(), "the button is gone"
    pane.show_messages(exchange(QUESTIONS[0]))
    pane.set_answering(False)
    assert not pane.sample_prompts.isVisible()
    pane.show_messages([])
    assert pane.sample_prompts.isVisible()


def test_without_a_model_the_question_waits_in_the_input(qtbot: QtBot, pane: ChatPane) -> None:
    pane.set_status(STOPPED)
    with qtbot.assertNotEmitted(pane.send_requested):
        click(pane, 1)
        assert pane.prompt_edit.toPlainText() == QUESTIONS[1]
        click(pane, 0)
    assert pane.prompt_edit.toPlainText() == QUESTIONS[1]


def test_other_models_have_none(pane: ChatPane) -> None:
    pane.set_sample_prompts(())
    assert not pane.sample_prompts.isVisible()
    pane.show_messages([])
    assert not pane.sample_prompts.isVisible()


def test_a_template_that_was_replaced_is_told_until_the_next_answer(pane: ChatPane) -> None:
    pane.show_remark("The model's chat template is not used: it takes longer than 2 s.")
    assert pane.status_text.startswith("The model's chat template")
    pane.show_remark("")
    assert pane.status_text == ""


def test_long_questions_take_lines_and_no_width(qtbot: QtBot, pane: ChatPane) -> None:
    long = "What is there to be said about the memory of a computer that has several cards?"
    pane.set_sample_prompts([long])
    button = pane.sample_prompts.buttons[0]
    qtbot.waitUntil(lambda: button.isVisible() and button.width() < pane.width())
    assert "\n" in button.text()
    assert button.text().replace("\n", " ") == long
