"""The line above a conversation: its title, what it takes of the context, and what is done with all of it."""

from __future__ import annotations

from PySide6.QtCore import QSize
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QHBoxLayout, QLayout, QToolButton, QWidget

from engine.language import tr
from widgets.chat.context_meter import ContextMeter
from widgets.common.elided_label import ElidedLabel

UNTITLED = tr("New conversation")
MIN_TITLE_PX = 42
ROOMY_METER_PX, ROOMY_TITLE_PX = 90, 150
"""Where a title would have less, buttons are signs and leave it their room."""
SETTINGS_WORDS, SETTINGS_SIGN = tr("Settings"), "⚙\ufe0e"
NEW_WORDS, NEW_SIGN = tr("New"), "+"


class ChatHeading(QWidget):
    """Its buttons are connected by the pane that it is in."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.list_button = flat_button("☰", tr("Show or hide the list of conversations"))
        self.title_label = ElidedLabel(UNTITLED, "strong")
        self.title_label.setMinimumWidth(MIN_TITLE_PX)
        self.context_meter = ContextMeter()
        self.settings_button = flat_button(
            SETTINGS_WORDS, tr("System prompt, preset and samplers of this conversation")
        )
        self.settings_button.setCheckable(True)
        self.new_button = flat_button(NEW_WORDS, tr("Begin a new conversation"))
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(4)
        row.addWidget(self.list_button)
        row.addWidget(self.title_label, 1)
        for widget in (self.context_meter, self.settings_button, self.new_button):
            row.addWidget(widget)
        buttons = (self.list_button, self.settings_button, self.new_button)
        around_px = ROOMY_METER_PX + 4 * row.spacing()
        self._roomy_px = sum(button.sizeHint().width() for button in buttons) + around_px + ROOMY_TITLE_PX
        self._show_words(False)
        least_px = sum(button.sizeHint().width() for button in buttons) + 4 * row.spacing()
        self._least_px = least_px + MIN_TITLE_PX + self.context_meter.minimumSizeHint().width()
        row.setSizeConstraint(QLayout.SizeConstraint.SetNoConstraint)

    def show_title(self, title: str) -> None:
        """Name the conversation."""
        self.title_label.setText(title or UNTITLED)

    def resizeEvent(self, event: QResizeEvent) -> None:
        """Have signs for words where there is little room."""
        super().resizeEvent(event)
        self._show_words(self.width() >= self._roomy_px)

    def minimumSizeHint(self) -> QSize:
        """Room for the signs: words give way when the room does."""
        return QSize(self._least_px, super().minimumSizeHint().height())

    def _show_words(self, is_roomy: bool) -> None:
        self.settings_button.setText(SETTINGS_WORDS if is_roomy else SETTINGS_SIGN)
        self.new_button.setText(NEW_WORDS if is_roomy else NEW_SIGN)


def flat_button(text: str, name: str) -> QToolButton:
    """Return a small button; `name` says what it does."""
    button = QToolButton()
    button.setText(text)
    button.setToolTip(name)
    button.setAccessibleName(name)
    button.setProperty("role", "compact")
    return button
