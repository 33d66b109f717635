"""A sentence above the input with what can be done about it."""

from __future__ import annotations

from PySide6.QtWidgets import QFrame, QHBoxLayout, QPushButton, QWidget

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
