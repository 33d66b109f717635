"""The scrolled list of messages, which follows the end only while the reader is there."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QScrollArea, QVBoxLayout, QWidget

from widgets.chat.bubble import Bubble, Role

NEAR_END_PX = 8


class MessageList(QScrollArea):
    """Bubbles from top to bottom."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWidgetResizable(True)
        self.setAccessibleName("Conversation")
        self.setFrameShape(QScrollArea.Shape.NoFrame)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self._bubbles: list[Bubble] = []
        self._follows = True
        content = QWidget()
        self._column = QVBoxLayout(content)
        self._column.setContentsMargins(0, 0, 4, 0)
        self._column.setSpacing(4)
        self._column.addStretch(1)
        self.setWidget(content)
        bar = self.verticalScrollBar()
        bar.valueChanged.connect(self._on_scrolled)
        bar.rangeChanged.connect(self._on_range_changed)

    def bubbles(self) -> tuple[Bubble, ...]:
        """Return the messages, oldest first."""
        return tuple(self._bubbles)

    def add_bubble(self, role: Role, speaker: str) -> Bubble:
        """Append an empty message and go to the end: whoever adds one wants to see it."""
        bubble = Bubble(role, speaker)
        self._bubbles.append(bubble)
        self._column.insertWidget(self._column.count() - 1, bubble)
        self.scroll_to_end()
        return bubble

    def take_all(self) -> tuple[Bubble, ...]:
        """Remove all messages from view and return them, still alive."""
        taken = tuple(self._bubbles)
        for bubble in taken:
            self._column.removeWidget(bubble)
            bubble.hide()
        self._bubbles.clear()
        return taken

    def put_back(self, bubbles: tuple[Bubble, ...]) -> None:
        """Show messages that `take_all` returned, before what came since."""
        for position, bubble in enumerate(bubbles):
            self._column.insertWidget(position, bubble)
            bubble.show()
        self._bubbles[:0] = bubbles
        self.scroll_to_end()

    def scroll_to_end(self) -> None:
        """Follow the end from now on."""
        self._follows = True
        self.verticalScrollBar().setValue(self.verticalScrollBar().maximum())

    def _on_scrolled(self, value: int) -> None:
        self._follows = value >= self.verticalScrollBar().maximum() - NEAR_END_PX

    def _on_range_changed(self, _minimum: int, maximum: int) -> None:
        if self._follows:
            self.verticalScrollBar().setValue(maximum)
