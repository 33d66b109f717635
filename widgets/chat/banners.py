"""Rows above the input of the chat: a sentence with buttons, and how much of a question has been read."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QFrame, QHBoxLayout, QProgressBar, QPushButton, QWidget

from engine.base.language import tr
from widgets.common.roles import plain_label


class Banner(QFrame):
    """Hidden until there is something to say."""

    def __init__(self, text: str, button: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "card")
        self.button = QPushButton(button)
        self.label = plain_label(text, wrap=True)
        row = QHBoxLayout(self)
        row.setContentsMargins(12, 8, 8, 8)
        row.addWidget(self.label, 1)
        row.addWidget(self.button)
        self._row = row
        self.hide()

    def show_words(self, text: str, button: str) -> None:
        """Say something else."""
        self.label.setText(text)
        self.button.setText(button)

    def add_button(self, text: str) -> QPushButton:
        """Return a button for another thing that can be done, before the first one."""
        button = QPushButton(text)
        self._row.insertWidget(self._row.indexOf(self.button), button)
        return button


class OverflowBanner(Banner):
    """Asks whether the oldest messages are left out of a full context; hidden while nothing is asked."""

    answered = Signal(bool)
    """Whether they are left out."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__("", tr("Do not ask"), parent)
        self.leave_out_button = self.add_button(tr("Leave out the oldest"))
        self.cancel_button = self.button
        self.leave_out_button.clicked.connect(lambda: self.answered.emit(True))
        self.cancel_button.clicked.connect(lambda: self.answered.emit(False))

    def ask(self, sentence: str) -> None:
        """Ask, with a sentence on what is full; an empty sentence withdraws the question."""
        self.label.setText(sentence)
        self.setVisible(bool(sentence))


class ReadingRow(QWidget):
    """Hidden while nothing is being read."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.progress = QProgressBar()
        self.progress.setTextVisible(False)
        self.progress.setAccessibleName(tr("How much of the question has been read"))
        self.label = plain_label("", "dim")
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.addWidget(self.progress, 1)
        row.addWidget(self.label)
        self.hide()

    def show_share(self, share: float | None, words: str) -> None:
        """Show which part has been read, 0 to 1; None: nothing is being read."""
        self.setVisible(share is not None)
        self.progress.setValue(round(100 * (share or 0.0)))
        self.label.setText(words)
