"""The words of a question while they are changed, to be sent again."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QKeyEvent
from PySide6.QtWidgets import QHBoxLayout, QPushButton, QVBoxLayout, QWidget

from engine.language import tr
from widgets.chat.prompt_edit import PromptEdit


class EditBox(QWidget):
    """Enter sends, Escape leaves everything as it was."""

    sent = Signal(str)
    cancelled = Signal()
    height_changed = Signal()

    def __init__(self, text: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.edit = PromptEdit()
        self.edit.setAccessibleName(tr("The question, changed"))
        self.edit.setPlainText(text)
        self.edit.submitted.connect(self._on_send)
        self.edit.textChanged.connect(self.height_changed)
        self.send_button = QPushButton(tr("Send as a branch"))
        self.send_button.setProperty("role", "primary")
        self.cancel_button = QPushButton(tr("Cancel"))
        self.send_button.clicked.connect(self._on_send)
        self.cancel_button.clicked.connect(self.cancelled.emit)
        buttons = QHBoxLayout()
        buttons.addStretch(1)
        buttons.addWidget(self.cancel_button)
        buttons.addWidget(self.send_button)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.addWidget(self.edit)
        column.addLayout(buttons)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() == Qt.Key.Key_Escape:
            self.cancelled.emit()
            return
        super().keyPressEvent(event)

    def _on_send(self) -> None:
        text = self.edit.toPlainText().strip()
        if text:
            self.sent.emit(text)
