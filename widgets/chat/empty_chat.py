"""An empty chat: who would answer, or what is missing for that, and sample questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from textwrap import fill

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QFrame, QHBoxLayout, QPushButton, QScrollArea, QSizePolicy, QVBoxLayout, QWidget

from engine.base.language import tr
from widgets.common.roles import plain_label

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


MAX_WIDTH_PX = 440


@dataclass(frozen=True, slots=True)
class ChatStart:
    """What stands where nothing is said; `button`: what is to be done first, empty where nothing is.

    `sentence` says the same in one line, for a conversation in which something was said.
    """

    title: str = ""
    hint: str = ""
    button: str = ""
    sentence: str = ""


class EmptyChat(QScrollArea):
    """In the middle of the room; scrolls where that is small."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWidgetResizable(True)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self.setAccessibleName(tr("Conversation"))
        self.title_label = plain_label(role="title", wrap=True)
        self.hint_label = plain_label(role="dim", wrap=True)
        self.button = QPushButton()
        self.sample_questions = SampleQuestions()
        self._build()
        self.show_start(ChatStart())

    def show_start(self, start: ChatStart) -> None:
        """Show these words and, where something is to be done first, the button for that."""
        for label, text in ((self.title_label, start.title), (self.hint_label, start.hint)):
            label.setText(text)
            label.setVisible(bool(text))
        self.button.setText(start.button.replace("&", "&&"))
        self.button.setVisible(bool(start.button))

    def _build(self) -> None:
        middle = QWidget()
        middle.setMaximumWidth(MAX_WIDTH_PX)
        column = QVBoxLayout(middle)
        column.setContentsMargins(8, 8, 8, 8)
        column.setSpacing(10)
        column.addStretch(2)
        for label in (self.title_label, self.hint_label):
            label.setAlignment(Qt.AlignmentFlag.AlignHCenter)
            column.addWidget(label)
        column.addWidget(self.button, 0, Qt.AlignmentFlag.AlignHCenter)
        column.addWidget(self.sample_questions)
        column.addStretch(3)
        content = QWidget()
        around = QHBoxLayout(content)
        around.setContentsMargins(0, 0, 0, 0)
        around.addStretch(1)
        around.addWidget(middle, 1000)
        around.addStretch(1)
        self.setWidget(content)
