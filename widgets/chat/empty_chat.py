"""The page of an empty chat: the model's name, or the action that is needed first, and sample questions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from textwrap import fill

from msgspec import Struct
from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QFrame, QPushButton, QScrollArea, QSizePolicy, QWidget

from engine.base.language import tr
from widgets.common.boxes import centred, v_box
from widgets.common.roles import plain_label

AROUND_PX = 28
"""Width in pixels that a button needs in addition to its text."""
MIN_CHARACTERS = 16


class SamplePrompts(QWidget):
    """Buttons with sample questions. The widget is hidden while there are no questions."""

    chosen = Signal(str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.buttons: tuple[QPushButton, ...] = ()
        self._questions: tuple[str, ...] = ()
        self._layout = v_box(self, spacing=8)
        self.hide()

    def set_questions(self, questions: Sequence[str]) -> None:
        """Show these questions instead of earlier ones."""
        for button in self.buttons:
            self._layout.removeWidget(button)
            button.deleteLater()
        self._questions = tuple(questions)
        self.buttons = tuple(map(self._make_button, questions))
        self.show_while(True)

    def show_while(self, is_empty: bool) -> None:
        """Show the widget if the conversation is empty and there are questions; else hide it."""
        # Without questions the layout would still keep its spacing around an empty widget.
        self.setVisible(is_empty and bool(self.buttons))

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        for button, question in zip(self.buttons, self._questions, strict=True):
            button.setText(self._words(question))

    def _words(self, question: str) -> str:
        """Return `question` wrapped to the available width, with "&&" for "&", which Qt would take for a mnemonic."""
        widest = max(self.fontMetrics().averageCharWidth(), 1)
        characters = max((self.width() - AROUND_PX) // widest, MIN_CHARACTERS)
        return fill(question, characters).replace("&", "&&")

    def _make_button(self, question: str) -> QPushButton:
        button = QPushButton(self._words(question))
        # `Ignored`: a long question must not widen the window.
        button.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)
        button.clicked.connect(partial(self.chosen.emit, question))
        self._layout.addWidget(button)
        return button


MAX_WIDTH_PX = 440


class ChatStart(Struct, frozen=True):
    """Texts of an empty chat.

    `button`: label of the action that is needed first; empty if the model can answer.
    `sentence`: the needed action in one line, for the banner of a conversation that is not empty.
    """

    title: str = ""
    hint: str = ""
    button: str = ""
    sentence: str = ""


class EmptyChat(QScrollArea):
    """Page with centred texts and a button for an empty chat; it scrolls if there is little room."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWidgetResizable(True)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        # Tab goes from the heading to the buttons inside; the page itself has nothing to focus.
        self.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self.setAccessibleName(tr("Conversation"))
        self.title_label = plain_label(role="title", wrap=True)
        self.hint_label = plain_label(role="dim", wrap=True)
        self.button = QPushButton()
        self.sample_prompts = SamplePrompts()
        self._build()
        self.show_start(ChatStart())

    def show_start(self, start: ChatStart) -> None:
        """Show the texts of `start`, and its button if it has one."""
        for label, text in ((self.title_label, start.title), (self.hint_label, start.hint)):
            label.setText(text)
            label.setVisible(bool(text))
        self.button.setText(start.button.replace("&", "&&"))
        self.button.setVisible(bool(start.button))

    def _build(self) -> None:
        middle = QWidget()
        middle.setMaximumWidth(MAX_WIDTH_PX)
        column = v_box(middle, spacing=10, margins=(8, 8, 8, 8))
        column.addStretch(2)
        for label in (self.title_label, self.hint_label):
            label.setAlignment(Qt.AlignmentFlag.AlignHCenter)
            column.addWidget(label)
        column.addWidget(self.button, 0, Qt.AlignmentFlag.AlignHCenter)
        column.addWidget(self.sample_prompts)
        column.addStretch(3)
        content = QWidget()
        centred(middle, content)
        self.setWidget(content)
