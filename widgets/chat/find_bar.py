"""The bar for searching in a conversation: text, number of matches, previous, next and close."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QKeyEvent
from PySide6.QtWidgets import QFrame, QLineEdit, QWidget

from engine.base.language import tr
from engine.base.units import format_count
from widgets.common.boxes import h_box
from widgets.common.roles import plain_label, tool_button


class FindBar(QFrame):
    """Bar with the search text and the number of matches.

    Enter goes to the next match, Shift+Enter to the previous one, Escape closes the bar.
    """

    text_changed = Signal(str)
    next_requested = Signal()
    previous_requested = Signal()
    closed = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "card")
        self.text_edit = QLineEdit()
        self.text_edit.setPlaceholderText(tr("Find in this conversation…"))
        self.text_edit.setAccessibleName(tr("Find in this conversation"))
        self.text_edit.setClearButtonEnabled(True)
        self.count_label = plain_label("", "dim")
        self.previous_button = tool_button("‹", tr("Previous match (Shift+Enter)"), "compact")
        self.next_button = tool_button("›", tr("Next match (Enter)"), "compact")
        self.close_button = tool_button("×", tr("Close the search"))
        row = h_box(self, spacing=4, margins=(8, 4, 4, 4))
        row.addWidget(self.text_edit, 1)
        row.addWidget(self.count_label)
        for button in (self.previous_button, self.next_button, self.close_button):
            row.addWidget(button)
        self.text_edit.textChanged.connect(self.text_changed)
        self.previous_button.clicked.connect(self.previous_requested.emit)
        self.next_button.clicked.connect(self.next_requested.emit)
        self.close_button.clicked.connect(self.closed.emit)
        self.show_count(None, 0, is_done=True)
        self.hide()

    def open(self) -> None:
        """Show the bar and select its text."""
        self.show()
        self.text_edit.setFocus()
        self.text_edit.selectAll()

    def show_count(self, current: int | None, count: int, *, is_done: bool) -> None:
        """Show the number of the current match, and the number of matches found so far.

        `current`: number of the current match, counted from 0; None if no match is current.
        `is_done`: whether the search has ended.
        """
        for button in (self.previous_button, self.next_button):
            button.setEnabled(count > 0)
        if not self.text_edit.text().strip():
            words = ""
        elif not count:
            words = tr("No matches") if is_done else tr("Searching…")
        elif current is None:
            words = format_count(count)
        else:
            words = tr("{number} of {count}", number=format_count(current + 1), count=format_count(count))
        self.count_label.setText(words)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() == Qt.Key.Key_Escape:
            self.closed.emit()
        elif event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
            # As in browsers and editors.
            is_back = bool(event.modifiers() & Qt.KeyboardModifier.ShiftModifier)
            (self.previous_requested if is_back else self.next_requested).emit()
        else:
            super().keyPressEvent(event)
