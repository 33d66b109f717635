"""Sample questions in an empty chat: a click asks, and they make room once something was said."""

from __future__ import annotations

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from pytestqt.qtbot import QtBot

from widgets.chat.chat_pane import ChatPane

QUESTIONS = ("Why is water & ice wet?", "What is a lake?")


@pytest.fixture
def pane(qtbot: QtBot) -> ChatPane:
    pane = ChatPane()
    qtbot.addWidget(pane)
    pane.resize(340, 500)
    pane.show()
    pane.set_sample_questions(QUESTIONS)
    return pane


def click(pane: ChatPane, index: int) -> None:
    QTest.mouseClick(pane.sample_questions.buttons[index], Qt.MouseButton.LeftButton)


def test_a_click_asks_and_the_questions_go_until_the_chat_is_empty_again(qtbot: QtBot, pane: ChatPane) -> None:
    pane.set_ready(True)
    pane.prompt_edit.setPlainText("half a thought")
    with qtbot.waitSignal(pane.send_requested) as sent:
        click(pane, 0)
    assert sent.args == [QUESTIONS[0]]
    assert pane.messages() == (("user", QUESTIONS[0]),)
    assert pane.prompt_edit.toPlainText() == "half a thought"
    assert not pane.sample_questions.isVisible()
    pane.begin_answer("Demo")
    pane.finish_answer()
    assert not pane.sample_questions.isVisible()
    pane.clear()
    assert pane.sample_questions.isVisible()


def test_without_a_model_the_question_waits_in_the_input(qtbot: QtBot, pane: ChatPane) -> None:
    click(pane, 1)
    assert pane.prompt_edit.toPlainText() == QUESTIONS[1]
    click(pane, 0)
    assert pane.prompt_edit.toPlainText() == QUESTIONS[1]
    assert pane.messages() == ()


def test_other_models_have_none(pane: ChatPane) -> None:
    pane.set_sample_questions(())
    assert not pane.sample_questions.isVisible()
    pane.clear()
    assert not pane.sample_questions.isVisible()
