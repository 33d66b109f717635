"""Rows above the input of the chat: banners with buttons, and the progress of reading a prompt."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QFrame, QHBoxLayout, QProgressBar, QPushButton, QWidget

from engine.base.language import tr
from widgets.common.roles import plain_label


class Banner(QFrame):
    """A sentence with a button; hidden at first."""

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
        """Set sentence and button."""
        self.label.setText(text)
        self.button.setText(button)

    def add_button(self, text: str) -> QPushButton:
        """Add another button before the first one, and return it."""
        button = QPushButton(text)
        self._row.insertWidget(self._row.indexOf(self.button), button)
        return button


class OverflowBanner(Banner):
    """Asks whether to drop the oldest messages from a full context; hidden while there is no question."""

    answered = Signal(bool)
    """True: drop them. False: do not send the question."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__("", tr("Do not send"), parent)
        self.leave_out_button = self.add_button(tr("Drop oldest messages"))
        self.cancel_button = self.button
        self.leave_out_button.clicked.connect(lambda: self.answered.emit(True))
        self.cancel_button.clicked.connect(lambda: self.answered.emit(False))

    def ask(self, sentence: str) -> None:
        """Ask with this sentence; an empty one withdraws the question."""
        self.label.setText(sentence)
        self.setVisible(bool(sentence))


class ReadingRow(QWidget):
    """Progress of reading a prompt; hidden while nothing is read."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.progress = QProgressBar()
        # The label beside it has the numbers.
        self.progress.setTextVisible(False)
        self.progress.setAccessibleName(tr("Progress of prompt processing"))
        self.label = plain_label("", "dim")
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.addWidget(self.progress, 1)
        row.addWidget(self.label)
        self.hide()

    def show_share(self, share: float | None, words: str) -> None:
        """Show the part that was read, 0 to 1, with `words`; None: hide the row."""
        self.setVisible(share is not None)
        self.progress.setValue(round(100 * (share or 0.0)))
        self.label.setText(words)
