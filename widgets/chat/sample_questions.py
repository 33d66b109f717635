"""Questions to begin a conversation with, a button each: for models of which it is known what they answer well."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from textwrap import fill

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QPushButton, QWidget

from engine.language import tr
from widgets.common.roles import plain_label
from widgets.common.wrap_layout import WrapLayout

LINE_CHARACTERS = 30


class SampleQuestions(QWidget):
    """Shown by whoever owns it while nothing was said; takes no room without questions."""

    chosen = Signal(str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.buttons: tuple[QPushButton, ...] = ()
        self._layout = WrapLayout(self)
        self._label = plain_label(tr("Try:"), "dim")
        self._layout.addWidget(self._label)
        self.hide()

    def set_questions(self, questions: Sequence[str]) -> None:
        """Offer these questions in the place of earlier ones."""
        for button in self.buttons:
            self._layout.removeWidget(button)
            button.deleteLater()
        self.buttons = tuple(map(self._make_button, questions))
        self.show_while(True)

    def show_while(self, is_empty: bool) -> None:
        """Show the questions where there are some and the conversation is empty."""
        self.setVisible(is_empty and bool(self.buttons))

    def _make_button(self, question: str) -> QPushButton:
        # On several lines, so that a long question asks for no wide window. An ampersand in a text is no shortcut.
        button = QPushButton(fill(question, LINE_CHARACTERS).replace("&", "&&"))
        button.clicked.connect(partial(self.chosen.emit, question))
        self._layout.addWidget(button)
        return button
