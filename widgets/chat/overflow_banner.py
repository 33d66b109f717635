"""Asks whether the oldest turns are left out of a context that is full."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QFrame, QHBoxLayout, QPushButton, QWidget

from engine.language import tr
from widgets.common.roles import plain_label


class OverflowBanner(QFrame):
    """Hidden while nothing is asked."""

    answered = Signal(bool)
    """Whether they are left out."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "card")
        self.label = plain_label("", wrap=True)
        self.leave_out_button = QPushButton(tr("Leave out the oldest"))
        self.cancel_button = QPushButton(tr("Do not ask"))
        row = QHBoxLayout(self)
        row.setContentsMargins(12, 8, 8, 8)
        row.addWidget(self.label, 1)
        row.addWidget(self.leave_out_button)
        row.addWidget(self.cancel_button)
        self.leave_out_button.clicked.connect(lambda: self.answered.emit(True))
        self.cancel_button.clicked.connect(lambda: self.answered.emit(False))
        self.hide()

    def ask(self, sentence: str) -> None:
        """Ask, with what is full; empty: ask no more."""
        self.label.setText(sentence)
        self.setVisible(bool(sentence))
