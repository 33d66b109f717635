"""A chat pane whose typesetter works synchronously."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pytestqt.qtbot import QtBot

from engine.runtime.session.status import ModelStatus, Phase
from widgets.chat.chat_pane import ChatPane
from widgets.chat.shown import ShownMessage
from widgets.markdown.typesetter import Typesetter

READY = ModelStatus("Demo", Phase.READY)
STOPPED = ModelStatus("Demo")
LOADING = ModelStatus("Demo", Phase.LOADING)


def now(work: Callable[[], None]) -> None:
    work()


@pytest.fixture
def typesetter(qtbot: QtBot) -> Typesetter:
    return Typesetter(now, now)


@pytest.fixture
def pane(qtbot: QtBot, typesetter: Typesetter) -> ChatPane:
    pane = ChatPane(typesetter)
    qtbot.addWidget(pane)
    pane.resize(420, 560)
    pane.set_status(READY)
    pane.show()
    return pane


def exchange(question: str = "why?", answer: str = "because", number: int = 0) -> list[ShownMessage]:
    return [
        ShownMessage(f"q{number}", "user", "You", question),
        ShownMessage(f"a{number}", "assistant", "Demo", answer, note="12.0 tok/s"),
    ]


def long_conversation(turns: int) -> list[ShownMessage]:
    return [message for number in range(turns) for message in exchange(f"question {number}", "word " * 80, number)]
