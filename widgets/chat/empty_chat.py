"""The chat before anything is said: who would answer or what is missing for that, and questions to begin with."""

from __future__ import annotations

from dataclasses import dataclass

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QFrame, QHBoxLayout, QPushButton, QScrollArea, QVBoxLayout, QWidget

from engine.language import tr
from widgets.chat.sample_questions import SampleQuestions
from widgets.common.roles import plain_label

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
