"""The line above code: its language, and buttons to copy and to save it."""

from __future__ import annotations

from PySide6.QtCore import QTimer, Signal
from PySide6.QtWidgets import QHBoxLayout, QToolButton, QWidget

from engine.language import tr
from widgets.common.roles import plain_label

COPIED_MS = 1500


class CodeHead(QWidget):
    """Lies over the room that the document leaves above code."""

    copy_requested = Signal()
    save_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._language = plain_label("", "dim")
        self.copy_button = _quiet_button(tr("Copy"), tr("Copy this code"))
        self.save_button = _quiet_button(tr("Save…"), tr("Save this code as a file"))
        row = QHBoxLayout(self)
        row.setContentsMargins(10, 3, 6, 0)
        row.setSpacing(2)
        row.addWidget(self._language, 1)
        row.addWidget(self.copy_button)
        row.addWidget(self.save_button)
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.setInterval(COPIED_MS)
        self._timer.timeout.connect(lambda: self.copy_button.setText(tr("Copy")))
        self.copy_button.clicked.connect(self._on_copy)
        self.save_button.clicked.connect(self.save_requested.emit)
        self.unsetCursor()

    def set_language(self, language: str) -> None:
        """Show the name of the language."""
        if self._language.text() != language:
            self._language.setText(language)

    def _on_copy(self) -> None:
        self.copy_requested.emit()
        self.copy_button.setText(tr("Copied"))
        self._timer.start()


def _quiet_button(text: str, name: str) -> QToolButton:
    button = QToolButton()
    button.setText(text)
    button.setAccessibleName(name)
    button.setToolTip(name)
    button.setProperty("role", "quiet")
    return button
