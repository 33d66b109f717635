"""The list of conversations: folders, pinned ones first, search through all that was said, and what can be done."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from PySide6.QtCore import QEvent, QModelIndex, QObject, QPersistentModelIndex, QPoint, QRect, Qt, QTimer, Signal
from PySide6.QtGui import QKeyEvent, QMouseEvent, QPainter, QPalette, QShowEvent
from PySide6.QtWidgets import (
    QFrame,
    QHBoxLayout,
    QLineEdit,
    QListView,
    QMenu,
    QPushButton,
    QStyle,
    QStyledItemDelegate,
    QStyleOptionViewItem,
    QVBoxLayout,
    QWidget,
)

from engine.base.language import tr
from widgets.chat.chat_list_model import ChatChange, ChatListModel, ChatPlace, ListedChat, ListedHit, folders_of
from widgets.common.roles import plain_label

SEARCH_DELAY_MS = 180


class ConversationList(QWidget):
    """Shows what it is given; keys: Enter opens, F2 renames, Delete deletes."""

    came_into_sight = Signal()
    """People see the list from now on; nobody needs to keep it up to date before."""

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
        self.new_button = QPushButton(tr("New conversation"))
        self.search_edit = QLineEdit()
        self.search_edit.setPlaceholderText(tr("Search conversations…"))
        self.search_edit.setAccessibleName(tr("Search all conversations"))
        self.search_edit.setClearButtonEnabled(True)
        self.list_model = ChatListModel(self)
        self.list_view = QListView()
        self.list_view.setModel(self.list_model)
        self.list_view.setAccessibleName(tr("Conversations"))
        self.list_view.setProperty("role", "chats")
        self.list_view.setUniformItemSizes(True)
        self.list_view.setTextElideMode(Qt.TextElideMode.ElideRight)
        self.list_view.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.list_view.setItemDelegate(ChatRows(self.list_view))
        self.list_view.setMouseTracking(True)
        self.list_view.viewport().installEventFilter(self)
        self.list_view.setContextMenuPolicy(Qt.ContextMenuPolicy.CustomContextMenu)
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
        layout.addWidget(self.list_view, 1)
        layout.addWidget(self._undo_bar)
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.setInterval(SEARCH_DELAY_MS)
        self._timer.timeout.connect(lambda: self.search_requested.emit(self.search_edit.text()))
        self.new_button.clicked.connect(self.new_requested.emit)
        self.undo_button.clicked.connect(self.undo_requested.emit)
        self.search_edit.textChanged.connect(self._on_search_typed)
        self.list_view.clicked.connect(self._on_row)
        self.list_view.activated.connect(self._on_row)
        self.list_model.renamed.connect(self.renamed)
        self.list_view.customContextMenuRequested.connect(self._on_menu)

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
        return folders_of(self._chats)

    # ------------------------------------------------------------------ the list

    def _fill(self) -> None:
        # A place that was found has a line of what is said there below its title.
        self.list_view.setUniformItemSizes(self._hits is None)
        if self._hits is None:
            self.list_model.set_chats(self._chats)
        else:
            self.list_model.set_hits(self._hits)
        self._mark()

    def _mark(self) -> None:
        row = self.list_model.row_of(self._current)
        self.list_view.setCurrentIndex(QModelIndex() if row is None else self.list_model.index(row))

    # ------------------------------------------------------------------ what people do

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.came_into_sight.emit()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        """Delete deletes the conversation that is marked."""
        place = self.list_model.place_at(self.list_view.currentIndex())
        if event.key() == Qt.Key.Key_Delete and self.list_view.hasFocus() and place is not None:
            self.delete_requested.emit(place.chat)
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
        index = self.list_view.indexAt(position)
        if not index.flags() & Qt.ItemFlag.ItemIsEditable:
            return False
        return sign_place(self.list_view.visualRect(index), self.layoutDirection()).contains(position)

    def _on_search_typed(self, text: str) -> None:
        if text.strip():
            self._timer.start()
        else:
            self._timer.stop()
            self.show_hits(None)

    def _on_row(self, index: QModelIndex) -> None:
        place = self.list_model.place_at(index)
        if place is not None:
            self.opened.emit(place)

    def _on_menu(self, position: QPoint) -> None:
        index = self.list_view.indexAt(position)
        if self.list_model.place_at(index) is not None:
            menu = self.menu_for(index)
            menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
            menu.popup(self.list_view.viewport().mapToGlobal(position))

    def _edit(self, chat: str) -> None:
        row = self.list_model.row_of(chat)  # the list may have changed under the menu
        if row is not None:
            self.list_view.edit(self.list_model.index(row))

    def _move(self, chat: str, folder: str) -> None:
        self.moved.emit(ChatChange(chat, folder))

    def menu_for(self, index: QModelIndex) -> QMenu:
        """Return the menu of a conversation; the caller shows it."""
        place = self.list_model.place_at(index)
        chat = next((each for each in self._chats if place is not None and each.id == place.chat), None)
        menu = QMenu(self)
        if chat is None:
            return menu
        rename = menu.addAction(tr("Rename"), lambda: self._edit(chat.id))
        rename.setEnabled(bool(index.flags() & Qt.ItemFlag.ItemIsEditable))
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


SIGN = "⋯"
SIGN_PX = 28
"""How wide the place of the sign is."""
_PADDING_PX = 8
"""Beside a title, as of the stylesheet."""


def sign_place(row: QRect, direction: Qt.LayoutDirection) -> QRect:
    """Return where in a row the sign is."""
    place = QRect(row.right() - SIGN_PX + 1, row.top(), SIGN_PX, row.height())
    return QStyle.visualRect(direction, row, place)


class ChatRows(QStyledItemDelegate):
    """Paints rows as the style does; titles end before the sign."""

    def paint(
        self, painter: QPainter, option: QStyleOptionViewItem, index: QModelIndex | QPersistentModelIndex
    ) -> None:
        state = option.state
        is_marked = bool(state & (QStyle.StateFlag.State_MouseOver | QStyle.StateFlag.State_Selected))
        if not is_marked or not index.flags() & Qt.ItemFlag.ItemIsEditable:
            super().paint(painter, option, index)
            return
        self._paint_with_sign(painter, option, index)

    def _paint_with_sign(
        self, painter: QPainter, option: QStyleOptionViewItem, index: QModelIndex | QPersistentModelIndex
    ) -> None:
        shown = QStyleOptionViewItem(option)
        self.initStyleOption(shown, index)
        words = shown.text
        room = shown.rect.width() - SIGN_PX - 2 * _PADDING_PX
        shown.text = shown.fontMetrics.elidedText(words, Qt.TextElideMode.ElideRight, room)
        style = shown.widget.style()
        style.drawControl(QStyle.ControlElement.CE_ItemViewItem, shown, painter, shown.widget)
        painter.save()
        painter.setPen(shown.palette.color(QPalette.ColorRole.Text))
        place = sign_place(shown.rect, shown.direction)
        painter.drawText(place, int(Qt.AlignmentFlag.AlignCenter), SIGN)
        painter.restore()
