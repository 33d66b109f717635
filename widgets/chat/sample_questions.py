"""Questions to begin a conversation with, a button each: for models of which it is known what they answer well."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from textwrap import fill

from PySide6.QtCore import Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QPushButton, QSizePolicy, QVBoxLayout, QWidget

AROUND_PX = 28
"""Of a button, beside its words."""
MIN_CHARACTERS = 16


class SampleQuestions(QWidget):
    """Shown by whoever owns it while nothing was said; takes no room without questions."""

    chosen = Signal(str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.buttons: tuple[QPushButton, ...] = ()
        self._questions: tuple[str, ...] = ()
        self._layout = QVBoxLayout(self)
        self._layout.setContentsMargins(0, 0, 0, 0)
        self._layout.setSpacing(8)
        self.hide()

    def set_questions(self, questions: Sequence[str]) -> None:
        """Offer these questions in the place of earlier ones."""
        for button in self.buttons:
            self._layout.removeWidget(button)
            button.deleteLater()
        self._questions = tuple(questions)
        self.buttons = tuple(map(self._make_button, questions))
        self.show_while(True)

    def show_while(self, is_empty: bool) -> None:
        """Show the questions where there are some and the conversation is empty."""
        self.setVisible(is_empty and bool(self.buttons))

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        for button, question in zip(self.buttons, self._questions, strict=True):
            button.setText(self._words(question))

    def _words(self, question: str) -> str:
        """Return it on as many lines as the width asks for; an ampersand in it is no shortcut."""
        widest = max(self.fontMetrics().averageCharWidth(), 1)
        characters = max((self.width() - AROUND_PX) // widest, MIN_CHARACTERS)
        return fill(question, characters).replace("&", "&&")

    def _make_button(self, question: str) -> QPushButton:
        button = QPushButton(self._words(question))
        # It takes the width that there is: a long question asks for no wide window.
        button.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)
        button.clicked.connect(partial(self.chosen.emit, question))
        self._layout.addWidget(button)
        return button
