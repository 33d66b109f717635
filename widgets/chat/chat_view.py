"""The chat as a view of its own: the list of conversations, and the panes of the models beside it."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QSplitter, QStackedWidget, QVBoxLayout, QWidget

from widgets.chat.conversation_list import ConversationList

LIST_WIDTH_PX = 240


class ChatView(QWidget):
    """`panes` shows one pane per model; what is put in `above` stays in sight."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "chat")
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self.conversations = ConversationList()
        self.panes = QStackedWidget()
        self._splitter = QSplitter(Qt.Orientation.Horizontal)
        self._splitter.setAccessibleName("Conversations and chat")
        self._splitter.addWidget(self.conversations)
        self._splitter.addWidget(self.panes)
        self._splitter.setStretchFactor(0, 0)
        self._splitter.setStretchFactor(1, 1)
        self._splitter.setCollapsible(1, False)
        self._splitter.setSizes([LIST_WIDTH_PX, 600])
        self.above = QVBoxLayout()
        self.above.setContentsMargins(8, 0, 8, 0)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 4, 0, 0)
        layout.setSpacing(4)
        layout.addLayout(self.above)
        layout.addWidget(self._splitter, 1)

    def show_list(self, shown: bool) -> None:
        """Show or hide the list of conversations."""
        self.conversations.setVisible(shown)
