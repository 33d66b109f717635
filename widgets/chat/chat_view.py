"""The chat view: the list of conversations, and one or two chat panes."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import (
    QSplitter,
    QStackedWidget,
    QWidget,
)

from engine.base.language import tr
from widgets.chat.conversation_list import ConversationList
from widgets.common.boxes import h_box, v_box
from widgets.common.elided_label import ElidedLabel
from widgets.common.inputs import ComboBox
from widgets.common.roles import tool_button

LIST_WIDTH_PX = 240


class ChatView(QWidget):
    """The list of conversations and the chat panes.

    `panes`: a stack with one chat pane for each model; it shows one of them.
    `right_stack`: a second stack at the right, which shows a chat with another model.
    `above`: a Qt layout for widgets above the chat.
    """

    side_model_chosen = Signal(int)
    """Emitted when the user has chosen a model for the right pane, with its index in the box that lists the models."""
    side_chat_closed = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "chat")
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self.conversations = ConversationList()
        self.panes = QStackedWidget()
        self.right_stack = QStackedWidget()
        self._left_label = ElidedLabel("", "strong")
        self.side_model_box = ComboBox()
        self.side_model_box.setAccessibleName(tr("Model on the right"))
        self.close_button = tool_button("×", tr("Show one conversation only"))
        self._left = _column((self._left_label,), self.panes)
        self._right = _column((self.side_model_box, self.close_button), self.right_stack)
        self._splitter = QSplitter(Qt.Orientation.Horizontal)
        self._splitter.setAccessibleName(tr("Conversations and chat"))
        self._splitter.addWidget(self.conversations)
        self._splitter.addWidget(self._left)
        self._splitter.addWidget(self._right)
        self._splitter.setStretchFactor(0, 0)
        self._splitter.setStretchFactor(1, 1)
        self._splitter.setStretchFactor(2, 1)
        # The list may be dragged away; a chat may not.
        self._splitter.setCollapsible(1, False)
        self._splitter.setCollapsible(2, False)
        self._splitter.setSizes([LIST_WIDTH_PX, 600])
        self.above = v_box(margins=(8, 0, 8, 0))
        layout = v_box(self, spacing=4, margins=(0, 4, 0, 0))
        layout.addLayout(self.above)
        layout.addWidget(self._splitter, 1)
        # `activated` is emitted only for a choice by the user, not while `show_side_chat` fills the box.
        self.side_model_box.activated.connect(self.side_model_chosen)
        self.close_button.clicked.connect(self.side_chat_closed.emit)
        self.hide_side_chat()

    def show_side_chat(self, left: str, names: Sequence[str], chosen: int) -> None:
        """Show a second pane at the right.

        `left`: name of the model at the left.
        `names`: names of the models that can be chosen for the right.
        `chosen`: index in `names` of the model at the right.
        """
        self._left_label.setText(left)
        self.side_model_box.clear()
        self.side_model_box.addItems(list(names))
        self.side_model_box.setCurrentIndex(chosen)
        if self._right.isHidden():
            self._left_label.setMinimumHeight(self.side_model_box.sizeHint().height())
            self._left_label.show()
            self._right.show()
            # A hidden list has a size of 0, and would stay closed when it is shown again.
            list_px, *rest = self._splitter.sizes()
            self._splitter.setSizes([list_px or LIST_WIDTH_PX, sum(rest) // 2, sum(rest) // 2])

    def hide_side_chat(self) -> None:
        """Hide the pane at the right."""
        self._left_label.hide()
        self._right.hide()

    def show_list(self, shown: bool) -> None:
        """Show or hide the list of conversations."""
        self.conversations.setVisible(shown)


def _column(heading: Sequence[QWidget], content: QWidget) -> QWidget:
    column = QWidget()
    row = h_box(margins=(8, 0, 8, 0))
    for index, widget in enumerate(heading):
        row.addWidget(widget, int(index == 0))
    layout = v_box(column, spacing=4)
    layout.addLayout(row)
    layout.addWidget(content, 1)
    return column
