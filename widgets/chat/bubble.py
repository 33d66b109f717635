"""One message of the conversation: plain text that grows while it streams, selectable and copyable."""

from __future__ import annotations

from typing import Literal

from PySide6.QtCore import Qt
from PySide6.QtGui import QContextMenuEvent, QGuiApplication, QResizeEvent, QTextCursor, QTextOption, QWheelEvent
from PySide6.QtWidgets import QFrame, QMenu, QSizePolicy, QTextEdit, QVBoxLayout, QWidget

from widgets.common.elided_label import ElidedLabel
from widgets.common.roles import plain_label, set_role

Role = Literal["user", "assistant"]


class MessageText(QTextEdit):
    """Read-only plain text, as tall as it is long: the list around it scrolls."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setReadOnly(True)
        self.setUndoRedoEnabled(False)
        self.setAcceptRichText(False)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setWordWrapMode(QTextOption.WrapMode.WrapAtWordBoundaryOrAnywhere)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setTabChangesFocus(True)
        self.document().documentLayout().documentSizeChanged.connect(self._fit_height)
        self._fit_height()

    def append_text(self, text: str) -> None:
        """Add `text` at the end, leaving the reader's selection alone."""
        cursor = QTextCursor(self.document())
        cursor.movePosition(QTextCursor.MoveOperation.End)
        cursor.insertText(text)

    def wheelEvent(self, event: QWheelEvent) -> None:
        """Leave the wheel to the list."""
        event.ignore()

    def contextMenuEvent(self, event: QContextMenuEvent) -> None:
        menu = self.context_menu()
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        menu.popup(event.globalPos())

    def context_menu(self) -> QMenu:
        """Return the menu of this message; the caller shows it."""
        menu = QMenu(self)
        menu.addAction("Copy message", self.copy_all)
        selection = menu.addAction("Copy selection", self.copy)
        selection.setEnabled(self.textCursor().hasSelection())
        menu.addAction("Select all", self.selectAll)
        return menu

    def copy_all(self) -> None:
        """Put the whole message on the clipboard."""
        QGuiApplication.clipboard().setText(self.toPlainText())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit_height()

    def _fit_height(self) -> None:
        margins = self.height() - self.viewport().height()
        height = round(self.document().size().height()) + margins
        if height != self.height():
            self.setFixedHeight(height)


class Bubble(QWidget):
    """A message with who said it above and, for answers, speeds or the error below."""

    def __init__(self, role: Role, speaker: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.role: Role = role
        self.in_conversation = True
        self.text_edit = MessageText(self)
        self.text_edit.setProperty("role", "bubble-user" if role == "user" else "bubble-model")
        self.text_edit.setAccessibleName(f"Message of {speaker}")
        self._note = plain_label("", "dim", wrap=True)
        self._note.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self._note.hide()
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 8)
        layout.setSpacing(4)
        layout.addWidget(ElidedLabel(speaker, "dim"))
        layout.addWidget(self.text_edit)
        layout.addWidget(self._note)

    @property
    def text(self) -> str:
        return self.text_edit.toPlainText()

    @property
    def note(self) -> str:
        return self._note.text()

    def set_note(self, text: str, *, error: bool = False) -> None:
        """Show `text` below the message; an empty text shows nothing."""
        set_role(self._note, "error" if error else "dim")
        self._note.setText(text)
        self._note.setVisible(bool(text))
