"""The list of conversations: folders, pinned ones first, search through all that was said, and what can be done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from PySide6.QtCore import QEvent, QObject, QPoint, Qt, QTimer, Signal
from PySide6.QtGui import QKeyEvent, QMouseEvent
from PySide6.QtWidgets import (
    QFrame,
    QHBoxLayout,
    QLineEdit,
    QListWidget,
    QListWidgetItem,
    QMenu,
    QPushButton,
    QVBoxLayout,
    QWidget,
)

from engine.language import tr
from widgets.chat.chat_rows import ChatRows, sign_place
from widgets.common.roles import plain_label
from widgets.common.tool_tips import plain_tool_tip

SEARCH_DELAY_MS = 180
ID_ROLE = Qt.ItemDataRole.UserRole
MESSAGE_ROLE = Qt.ItemDataRole.UserRole + 1


@dataclass(frozen=True, slots=True)
class ListedChat:
    """A conversation in the list; `folder` empty: in none."""

    id: str
    title: str
    folder: str = ""
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class ListedHit:
    """A place that a search found; `message` empty: the title."""

    chat: str
    message: str
    title: str
    snippet: str


@dataclass(frozen=True, slots=True)
class ChatPlace:
    """Where to go: a conversation, and a message in it or none."""

    chat: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class ChatChange:
    """A new title or folder for a conversation."""

    chat: str
    text: str


class ConversationList(QWidget):
    """Shows what it is given; keys: Enter opens, F2 renames, Delete deletes."""

    opened = Signal(ChatPlace)
    new_requested = Signal()
    renamed = Signal(ChatChange)
    moved = Signal(ChatChange)
    pin_toggled = Signal(str)
    delete_requested = Signal(str)
    export_requested = Signal(str)
    undo_requested = Signal()
    search_requested = Signal(str)
    folder_requested = Signal(str)
    """Somebody wants a new folder for this conversation."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._chats: tuple[ListedChat, ...] = ()
        self._hits: tuple[ListedHit, ...] | None = None
        self._current = ""
        self._is_filling = False
        self.new_button = QPushButton(tr("New conversation"))
        self.search_edit = QLineEdit()
        self.search_edit.setPlaceholderText(tr("Search conversations…"))
        self.search_edit.setAccessibleName(tr("Search all conversations"))
        self.search_edit.setClearButtonEnabled(True)
        self.list_widget = QListWidget()
        self.list_widget.setAccessibleName(tr("Conversations"))
        self.list_widget.setProperty("role", "chats")
        self.list_widget.setUniformItemSizes(False)
        self.list_widget.setTextElideMode(Qt.TextElideMode.ElideRight)
        self.list_widget.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.list_widget.setItemDelegate(ChatRows(self.list_widget))
        self.list_widget.setMouseTracking(True)
        self.list_widget.viewport().installEventFilter(self)
        self.list_widget.setContextMenuPolicy(Qt.ContextMenuPolicy.CustomContextMenu)
        self.undo_button = QPushButton(tr("Undo"))
        self._undo_label = plain_label("", wrap=True)
        self._undo_bar = QFrame()
        self._undo_bar.setProperty("role", "card")
        row = QHBoxLayout(self._undo_bar)
        row.setContentsMargins(8, 6, 6, 6)
        row.addWidget(self._undo_label, 1)
        row.addWidget(self.undo_button)
        self._undo_bar.hide()
        layout = QVBoxLayout(self)
        layout.setContentsMargins(8, 0, 0, 8)
        layout.setSpacing(8)
        for widget in (self.new_button, self.search_edit):
            layout.addWidget(widget)
        layout.addWidget(self.list_widget, 1)
        layout.addWidget(self._undo_bar)
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.setInterval(SEARCH_DELAY_MS)
        self._timer.timeout.connect(lambda: self.search_requested.emit(self.search_edit.text()))
        self.new_button.clicked.connect(self.new_requested.emit)
        self.undo_button.clicked.connect(self.undo_requested.emit)
        self.search_edit.textChanged.connect(self._on_search_typed)
        self.list_widget.itemClicked.connect(self._on_item)
        self.list_widget.itemActivated.connect(self._on_item)
        self.list_widget.itemChanged.connect(self._on_item_changed)
        self.list_widget.customContextMenuRequested.connect(self._on_menu)

    # ------------------------------------------------------------------ values

    def show_chats(self, chats: Sequence[ListedChat]) -> None:
        """Show these, in this order within their folders."""
        if tuple(chats) != self._chats:
            self._chats = tuple(chats)
            if self._hits is None:
                self._fill()

    def show_current(self, chat: str) -> None:
        """Mark the conversation that is open."""
        self._current = chat
        self._mark()

    def show_hits(self, hits: Sequence[ListedHit] | None) -> None:
        """Show what a search found in place of all; None: all again."""
        self._hits = None if hits is None or not self.search_edit.text().strip() else tuple(hits)
        self._fill()

    def offer_undo(self, title: str) -> None:
        """Offer the way back from a deletion; empty: no more."""
        self._undo_label.setText(tr("“{title}” was deleted.", title=title))
        self._undo_bar.setVisible(bool(title))

    def folders(self) -> list[str]:
        """Return the names of folders."""
        return sorted({chat.folder for chat in self._chats if chat.folder}, key=str.casefold)

    # ------------------------------------------------------------------ the list

    def _fill(self) -> None:
        self._is_filling = True
        self.list_widget.clear()
        if self._hits is not None:
            for hit in self._hits:
                self._add(hit.chat, f"{hit.title}\n{hit.snippet}" if hit.message else hit.title, hit.message)
            if not self._hits:
                self._add_heading(tr("Nothing was found."))
        else:
            loose = [chat for chat in self._chats if not chat.folder]
            for chat in loose:
                self._add_chat(chat)
            for folder in self.folders():
                self._add_heading(folder)
                for chat in self._chats:
                    if chat.folder == folder:
                        self._add_chat(chat)
        self._is_filling = False
        self._mark()

    def _add_chat(self, chat: ListedChat) -> None:
        item = self._add(chat.id, chat.title)
        item.setFlags(item.flags() | Qt.ItemFlag.ItemIsEditable)
        if chat.pinned:
            font = item.font()
            font.setBold(True)
            item.setFont(font)
            item.setToolTip(plain_tool_tip(tr("{title}\npinned", title=chat.title)))

    def _add(self, chat: str, text: str, message: str = "") -> QListWidgetItem:
        item = QListWidgetItem(text, self.list_widget)
        item.setData(ID_ROLE, chat)
        item.setData(MESSAGE_ROLE, message)
        item.setToolTip(plain_tool_tip(text))
        return item

    def _add_heading(self, text: str) -> None:
        item = QListWidgetItem(text, self.list_widget)
        item.setFlags(Qt.ItemFlag.NoItemFlags)

    def _mark(self) -> None:
        for row in range(self.list_widget.count()):
            item = self.list_widget.item(row)
            if item.data(ID_ROLE) == self._current and not item.data(MESSAGE_ROLE):
                self.list_widget.setCurrentItem(item)
                return
        self.list_widget.setCurrentRow(-1)

    # ------------------------------------------------------------------ what people do

    def keyPressEvent(self, event: QKeyEvent) -> None:
        """Delete deletes the conversation that is marked."""
        item = self.list_widget.currentItem()
        if event.key() == Qt.Key.Key_Delete and self.list_widget.hasFocus() and item is not None:
            self.delete_requested.emit(item.data(ID_ROLE))
            return
        super().keyPressEvent(event)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        """A click on the sign of a row opens its menu and not the conversation."""
        kinds = (QEvent.Type.MouseButtonPress, QEvent.Type.MouseButtonRelease)
        if isinstance(event, QMouseEvent) and event.type() in kinds and event.button() == Qt.MouseButton.LeftButton:
            position = event.position().toPoint()
            if self._is_on_sign(position):
                if event.type() is QEvent.Type.MouseButtonRelease:
                    self._on_menu(position)
                return True
        return super().eventFilter(watched, event)

    def _is_on_sign(self, position: QPoint) -> bool:
        item = self.list_widget.itemAt(position)
        if item is None or not item.flags() & Qt.ItemFlag.ItemIsEditable:
            return False
        row = self.list_widget.visualItemRect(item)
        return sign_place(row, self.layoutDirection()).contains(position)

    def _on_search_typed(self, text: str) -> None:
        if text.strip():
            self._timer.start()
        else:
            self._timer.stop()
            self.show_hits(None)

    def _on_item(self, item: QListWidgetItem) -> None:
        chat = item.data(ID_ROLE)
        if chat:
            self.opened.emit(ChatPlace(chat, item.data(MESSAGE_ROLE) or ""))

    def _on_item_changed(self, item: QListWidgetItem) -> None:
        chat = item.data(ID_ROLE)
        if not self._is_filling and chat:
            title = " ".join(item.text().split())
            before = next((each.title for each in self._chats if each.id == chat), "")
            if title and title != before:
                self.renamed.emit(ChatChange(chat, title))
            elif not title:
                self._fill()

    def _on_menu(self, position: QPoint) -> None:
        item = self.list_widget.itemAt(position)
        if item is not None and item.data(ID_ROLE):
            menu = self.menu_for(item)
            menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
            menu.popup(self.list_widget.viewport().mapToGlobal(position))

    def _move(self, chat: str, folder: str) -> None:
        self.moved.emit(ChatChange(chat, folder))

    def menu_for(self, item: QListWidgetItem) -> QMenu:
        """Return the menu of a conversation; the caller shows it."""
        chat = next((each for each in self._chats if each.id == item.data(ID_ROLE)), None)
        menu = QMenu(self)
        if chat is None:
            return menu
        menu.addAction(tr("Rename"), lambda: self.list_widget.editItem(item))
        menu.addAction(tr("Unpin") if chat.pinned else tr("Pin"), lambda: self.pin_toggled.emit(chat.id))
        folders = menu.addMenu(tr("Move to folder"))
        for folder in self.folders():
            name = folder.replace("&", "&&")
            folders.addAction(name, partial(self._move, chat.id, folder))
        folders.addAction(tr("New folder…"), lambda: self.folder_requested.emit(chat.id))
        if chat.folder:
            folders.addAction(tr("No folder"), lambda: self.moved.emit(ChatChange(chat.id, "")))
        menu.addAction(tr("Export…"), lambda: self.export_requested.emit(chat.id))
        menu.addSeparator()
        menu.addAction(tr("Delete"), lambda: self.delete_requested.emit(chat.id))
        return menu
