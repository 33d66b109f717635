"""A growing text: parsed outside the GUI thread, drawn completely at its end, and safe after its deletion."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import shiboken6
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from widgets.markdown.live import AT_ONCE_CHARACTERS, LiveMarkdown
from widgets.markdown.typesetter import Typesetter

LONG = "A sentence of a text that is parsed elsewhere. " * (AT_ONCE_CHARACTERS // 40)


class Later:
    """Work that begins when the test says so, in a thread of its own."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def run(self) -> None:
        for work in self.waiting:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        self.waiting.clear()
        QApplication.processEvents()


@pytest.fixture
def later() -> Later:
    return Later()


@pytest.fixture
def typesetter(qtbot: QtBot, later: Later) -> Typesetter:
    return Typesetter(later.waiting.append, later.waiting.append)


def test_a_long_text_is_there_when_it_was_parsed(typesetter: Typesetter, later: Later) -> None:
    live = LiveMarkdown(typesetter)
    live.set_text(LONG)
    assert not live.is_drawn
    later.run()
    assert live.is_drawn
    assert live.document.toPlainText().strip() == LONG.strip()


def test_a_text_that_was_replaced_while_it_was_parsed_is_not_drawn(typesetter: Typesetter, later: Later) -> None:
    live = LiveMarkdown(typesetter)
    live.set_text(LONG)
    live.set_text("short")
    later.run()
    assert live.document.toPlainText() == "short"


def test_a_message_that_is_gone_before_its_text_was_parsed_hears_nothing(typesetter: Typesetter, later: Later) -> None:
    gone, kept = LiveMarkdown(typesetter), LiveMarkdown(typesetter)
    gone.set_text(LONG)
    kept.set_text(LONG)
    shiboken6.delete(gone)
    later.run()
    assert kept.is_drawn
