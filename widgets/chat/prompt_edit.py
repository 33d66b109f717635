"""The input of the chat: Enter sends, Shift+Enter is a new line, and it grows to a few lines."""

from __future__ import annotations

from PySide6.QtCore import QMimeData, Qt, Signal
from PySide6.QtGui import QKeyEvent, QResizeEvent
from PySide6.QtWidgets import QPlainTextEdit, QSizePolicy, QWidget

MAX_LINES = 6


class PromptEdit(QPlainTextEdit):
    """Plain text that asks to be submitted; it never clears itself."""

    submitted = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setPlaceholderText("Ask something…")
        self.setAccessibleName("Message to the model")
        self.setTabChangesFocus(True)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.textChanged.connect(self._fit_height)
        self._fit_height()

    def canInsertFromMimeData(self, source: QMimeData) -> bool:
        """Take text; leave files to the window, which opens them."""
        return not source.hasUrls() and super().canInsertFromMimeData(source)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        is_return = event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter)
        if is_return and not event.modifiers() & Qt.KeyboardModifier.ShiftModifier:
            self.submitted.emit()
            return
        super().keyPressEvent(event)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit_height()

    def _fit_height(self) -> None:
        # A plain text document measures its height in lines.
        wanted_lines = max(round(self.document().size().height()), 1)
        lines = min(wanted_lines, MAX_LINES)
        policy = Qt.ScrollBarPolicy.ScrollBarAsNeeded if wanted_lines > lines else Qt.ScrollBarPolicy.ScrollBarAlwaysOff
        self.setVerticalScrollBarPolicy(policy)
        # Before it has its place the viewport has any size.
        around = max(self.height() - self.viewport().height(), 2 * self.frameWidth()) + 2 * round(
            self.document().documentMargin()
        )
        height = lines * self.fontMetrics().lineSpacing() + around
        if height != self.height():
            self.setFixedHeight(height)
