"""A spin box for a context length: whole steps of 256 tokens, with its thousands apart."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtGui import QValidator
from PySide6.QtWidgets import QSpinBox, QWidget

from engine.settings.table import CONTEXT_STEP as STEP
from widgets.common.counts import SEPARATOR, format_count, parse_count

MAX_TOKENS = 1 << 24
PADDING = 22


class TokenSpinBox(QSpinBox):
    """Reports a value when it is entered, not while it is typed; typed values are rounded up as the engine does."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setRange(STEP, MAX_TOKENS)
        self.setSingleStep(STEP)
        self.setKeyboardTracking(False)
        self.setAlignment(Qt.AlignmentFlag.AlignCenter)
        self.setAccelerated(True)
        self.lineEdit().setAcceptDrops(False)  # Dropped files are for the window.
        self.setFixedWidth(self.fontMetrics().horizontalAdvance(format_count(8 * 131072)) + PADDING)

        # With the value entered, Ctrl+Z is for the layout again and no longer for the typed text.
        self.lineEdit().returnPressed.connect(self.clearFocus)

    def textFromValue(self, value: int) -> str:
        return format_count(value)

    def valueFromText(self, text: str) -> int:
        typed = parse_count(text) or STEP
        return min(-(-typed // STEP) * STEP, MAX_TOKENS)

    def validate(self, text: str, position: int) -> tuple[QValidator.State, str, int]:
        if all(character in "0123456789 ,." or character == SEPARATOR for character in text):
            found = parse_count(text)
            state = QValidator.State.Intermediate if found is None else QValidator.State.Acceptable
            return state, text, position
        return QValidator.State.Invalid, text, position
