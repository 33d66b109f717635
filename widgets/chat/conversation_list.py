"""The list of conversations with folders, pinned conversations, full-text search and a menu for each row."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from msgspec import Struct
from PySide6.QtCore import (
    QEvent,
    QModelIndex,
    QObject,
    QPersistentModelIndex,
    QPoint,
    QPointF,
    QRect,
    QSize,
    Qt,
    Signal,
)
from PySide6.QtGui import (
    QFont,
    QFontMetrics,
    QKeyEvent,
    QMouseEvent,
    QPainter,
    QPalette,
    QShowEvent,
    QTextLayout,
)
from PySide6.QtWidgets import (
    QFrame,
    QLineEdit,
    QListView,
    QMenu,
    QPushButton,
    QStyle,
    QStyledItemDelegate,
    QStyleOptionViewItem,
    QWidget,
)

from engine.base.language import tr
from widgets.chat.chat_list_model import (
    HIT_ROLE,
    ChatChange,
    ChatListModel,
    ChatTarget,
    ListedChat,
    ListedHit,
    folders_of,
)
from widgets.common.boxes import h_box, v_box
from widgets.common.delayed_call import DelayedCall
from widgets.common.roles import plain_label
from widgets.markdown.matches import utf16_length

SEARCH_DELAY_MS = 180


class ConversationList(QWidget):
    """Shows conversations or search results. Enter opens the current row, F2 renames it, Delete deletes it."""

    came_into_sight = Signal()
    """Emitted when the list becomes visible. The owner of the list can delay updates until then."""

    opened = Signal(ChatTarget)
    new_requested = Signal()
    renamed = Signal(ChatChange)
    moved = Signal(ChatChange)
    pin_toggled = Signal(str)
    delete_requested = Signal(str)
    export_requested = Signal(str)
    undo_requested = Signal()
    search_requested = Signal(str)
    folder_requested = Signal(str)
    """Requests a new folder for the conversation with this id."""

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
        # Qt then measures one row instead of all 10,000.
        self.list_view.setUniformItemSizes(True)
        self.list_view.setTextElideMode(Qt.TextElideMode.ElideRight)
        self.list_view.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.list_view.setItemDelegate(ChatRows(self.list_view))
        self.list_view.setMouseTracking(True)
        # Clicks on the menu sign are filtered before the view sees them.
        self.list_view.viewport().installEventFilter(self)
        self.list_view.setContextMenuPolicy(Qt.ContextMenuPolicy.CustomContextMenu)
        self.undo_button = QPushButton(tr("Undo"))
        self._undo_label = plain_label("", wrap=True)
        self._undo_bar = QFrame()
        self._undo_bar.setProperty("role", "card")
        row = h_box(self._undo_bar, margins=(8, 6, 6, 6))
        row.addWidget(self._undo_label, 1)
        row.addWidget(self.undo_button)
        self._undo_bar.hide()
        layout = v_box(self, spacing=8, margins=(8, 0, 0, 8))
        for widget in (self.new_button, self.search_edit):
            layout.addWidget(widget)
        layout.addWidget(self.list_view, 1)
        layout.addWidget(self._undo_bar)
        # A search starts after a pause, and not for each letter.
        self._timer = DelayedCall(self, lambda: self.search_requested.emit(self.search_edit.text()), SEARCH_DELAY_MS)
        self.new_button.clicked.connect(self.new_requested.emit)
        self.undo_button.clicked.connect(self.undo_requested.emit)
        self.search_edit.textChanged.connect(self._on_search_typed)
        self.list_view.clicked.connect(self._on_row)
        self.list_view.activated.connect(self._on_row)
        self.list_model.renamed.connect(self.renamed)
        self.list_view.customContextMenuRequested.connect(self._on_menu)

    # ------------------------------------------------------------------ values

    def show_chats(self, chats: Sequence[ListedChat]) -> None:
        """List `chats`: first those without a folder, then each folder. Their order stays the same within a folder."""
        if tuple(chats) != self._chats:
            self._chats = tuple(chats)
            if self._hits is None:
                self._fill()

    def show_current(self, chat: str) -> None:
        """Select the row of the conversation with the id `chat`."""
        self._current = chat
        self._select_current()

    def show_hits(self, hits: Sequence[ListedHit] | None) -> None:
        """Show the matches of a search, or all conversations if `hits` is None."""
        self._hits = None if hits is None or not self.search_edit.text().strip() else tuple(hits)
        self._fill()

    def offer_undo(self, title: str) -> None:
        """Offer to undo the deletion of the conversation `title`; an empty title hides the offer."""
        self._undo_label.setText(tr("“{title}” was deleted.", title=title))
        self._undo_bar.setVisible(bool(title))

    def folders(self) -> list[str]:
        """Return the names of the folders that have conversations, sorted without regard to case."""
        return folders_of(self._chats)

    # ------------------------------------------------------------------ the list

    def _fill(self) -> None:
        # Rows of matches in messages have a second line.
        self.list_view.setUniformItemSizes(self._hits is None)
        if self._hits is None:
            self.list_model.set_chats(self._chats)
        else:
            self.list_model.set_hits(self._hits)
        self._select_current()

    def _select_current(self) -> None:
        row = self.list_model.row_of(self._current)
        self.list_view.setCurrentIndex(QModelIndex() if row is None else self.list_model.index(row))

    # ------------------------------------------------------------------ what people do

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.came_into_sight.emit()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        """Request the deletion of the current conversation if Delete is pressed."""
        target = self.list_model.target_at(self.list_view.currentIndex())
        if event.key() == Qt.Key.Key_Delete and self.list_view.hasFocus() and target is not None:
            self.delete_requested.emit(target.chat)
            return
        super().keyPressEvent(event)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        """Open the menu of a row if the sign "⋯" at its end is clicked; such a click does not open the conversation."""
        # The second press of a double click is an event of its own, which the view takes as a wish to open the row.
        kinds = (QEvent.Type.MouseButtonPress, QEvent.Type.MouseButtonDblClick, QEvent.Type.MouseButtonRelease)
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
        return sign_rect(self.list_view.visualRect(index), self.layoutDirection()).contains(position)

    def _on_search_typed(self, text: str) -> None:
        if text.strip():
            self._timer.start()
        else:
            self._timer.stop()
            self.show_hits(None)

    def _on_row(self, index: QModelIndex) -> None:
        target = self.list_model.target_at(index)
        if target is not None:
            self.opened.emit(target)

    def _on_menu(self, position: QPoint) -> None:
        index = self.list_view.indexAt(position)
        if self.list_model.target_at(index) is not None:
            menu = self.menu_for(index)
            menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
            menu.popup(self.list_view.viewport().mapToGlobal(position))

    def _edit(self, chat: str) -> None:
        row = self.list_model.row_of(chat)  # The list may have changed while the menu was open.
        if row is not None:
            self.list_view.edit(self.list_model.index(row))

    def _move(self, chat: str, folder: str) -> None:
        self.moved.emit(ChatChange(chat, folder))

    def menu_for(self, index: QModelIndex) -> QMenu:
        """Return the menu of a row. The caller shows it."""
        target = self.list_model.target_at(index)
        chat = next((each for each in self._chats if target is not None and each.id == target.chat), None)
        menu = QMenu(self)
        if chat is None:
            return menu
        if index.flags() & Qt.ItemFlag.ItemIsEditable:
            menu.addAction(tr("Rename"), lambda: self._edit(chat.id))
        else:
            menu.addAction(tr("Rename (clear the search first)")).setEnabled(False)
        menu.addAction(tr("Unpin") if chat.pinned else tr("Pin"), lambda: self.pin_toggled.emit(chat.id))
        folders = menu.addMenu(tr("Move to folder"))
        for folder in self.folders():
            # Qt takes a single ampersand for a mnemonic.
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
"""Width in pixels of the sign "⋯" at the end of a row. A click on it opens the row's menu."""
_PADDING_PX = 8
"""Padding of `QListView::item` in the stylesheet, on each side."""
_IDLE_OPACITY = 0.55
"""Opacity of the sign "⋯" on rows that are neither current nor under the pointer."""
_LINE_PX = 2
"""Gap between the title of a search match and its snippet, in pixels."""
LEAD_DIVISOR = 3
"""The match in a snippet begins within the first `1 / LEAD_DIVISOR` of the line, so that text after it can be read."""


def sign_rect(row: QRect, direction: Qt.LayoutDirection) -> QRect:
    """Return the rectangle of the sign "⋯" in a row: at the right end, in a right-to-left layout at the left end."""
    rect = QRect(row.right() - SIGN_PX + 1, row.top(), SIGN_PX, row.height())
    return QStyle.visualRect(direction, row, rect)


class FittedSnippet(Struct, frozen=True):
    """The snippet of a search match, cut to a width. `begin`, `end`: range of the match in `text`."""

    text: str
    begin: int
    end: int


def fit_snippet(hit: ListedHit, metrics: QFontMetrics, width: int) -> FittedSnippet:
    """Return the snippet of a search match, cut at the left so that the match begins in the first third of the line.

    `metrics`: metrics of the font of the line. `width`: width of the line in pixels.
    """
    begin = hit.begin
    # Text after the match is elided at the right, as usual.
    room = width // LEAD_DIVISOR
    first = 0
    while first < begin and metrics.horizontalAdvance(hit.snippet[first:begin]) > room:
        following = hit.snippet.find(" ", first + 1, begin)
        # A word that is longer than the room is cut inside.
        first = following + 1 if following >= 0 else first + 1
    lead = "…" if first else ""
    text = lead + hit.snippet[first:]
    moved = len(lead) - first
    return FittedSnippet(text, begin + moved, max(hit.end, begin) + moved)


def bold_range(text: str, fitted: FittedSnippet) -> QTextLayout.FormatRange:
    """Return the format that draws the search match in bold.

    `text`: text of `fitted`, which may be elided at its end.
    """
    bold = QTextLayout.FormatRange()
    bold.start = utf16_length(text[: fitted.begin])
    bold.length = utf16_length(text[fitted.begin : fitted.end])
    bold.format.setFontWeight(QFont.Weight.Bold)
    return bold


class ChatRows(QStyledItemDelegate):
    """Item delegate of the list. It draws the sign "⋯" on conversations, and the matching text on search results."""

    def paint(
        self, painter: QPainter, option: QStyleOptionViewItem, index: QModelIndex | QPersistentModelIndex
    ) -> None:
        hit = index.data(HIT_ROLE)
        if isinstance(hit, ListedHit):
            self._paint_hit(painter, option, index, hit)
        elif index.flags() & Qt.ItemFlag.ItemIsEditable:
            self._paint_with_sign(painter, option, index)
        else:
            super().paint(painter, option, index)

    def sizeHint(self, option: QStyleOptionViewItem, index: QModelIndex | QPersistentModelIndex) -> QSize:
        """Return the size of a row: one line, or two lines for a search match in a message."""
        size = super().sizeHint(option, index)
        hit = index.data(HIT_ROLE)
        if isinstance(hit, ListedHit) and hit.message:
            size.setHeight(2 * option.fontMetrics.lineSpacing() + _LINE_PX + 2 * _PADDING_PX)
        return size

    def _paint_with_sign(
        self, painter: QPainter, option: QStyleOptionViewItem, index: QModelIndex | QPersistentModelIndex
    ) -> None:
        shown = QStyleOptionViewItem(option)
        self.initStyleOption(shown, index)
        room = shown.rect.width() - SIGN_PX - 2 * _PADDING_PX
        shown.text = shown.fontMetrics.elidedText(shown.text, Qt.TextElideMode.ElideRight, room)
        style = shown.widget.style()
        style.drawControl(QStyle.ControlElement.CE_ItemViewItem, shown, painter, shown.widget)
        is_marked = bool(option.state & (QStyle.StateFlag.State_MouseOver | QStyle.StateFlag.State_Selected))
        painter.save()
        # The sign is always there: at the end of a long title the dots of the cut would be taken for it.
        painter.setOpacity(1.0 if is_marked else _IDLE_OPACITY)
        painter.setPen(shown.palette.color(QPalette.ColorRole.Text))
        rect = sign_rect(shown.rect, shown.direction)
        painter.drawText(rect, int(Qt.AlignmentFlag.AlignCenter), SIGN)
        painter.restore()

    def _paint_hit(
        self,
        painter: QPainter,
        option: QStyleOptionViewItem,
        index: QModelIndex | QPersistentModelIndex,
        hit: ListedHit,
    ) -> None:
        shown = QStyleOptionViewItem(option)
        self.initStyleOption(shown, index)
        shown.text = ""
        style = shown.widget.style()
        style.drawControl(QStyle.ControlElement.CE_ItemViewItem, shown, painter, shown.widget)
        room = shown.rect.adjusted(_PADDING_PX + 2, 0, -_PADDING_PX - 2, 0)
        colour = shown.palette.color(QPalette.ColorRole.Text)
        metrics = shown.fontMetrics
        painter.save()
        painter.setFont(shown.font)
        painter.setPen(colour)
        if not hit.message:
            self._draw_line(painter, shown, QPointF(room.left(), room.center().y() - metrics.height() / 2), room, hit)
            painter.restore()
            return
        top = room.top() + _PADDING_PX
        title = metrics.elidedText(hit.title, Qt.TextElideMode.ElideRight, room.width())
        line = QRect(room.left(), top, room.width(), metrics.lineSpacing())
        painter.drawText(line, int(Qt.AlignmentFlag.AlignVCenter | Qt.AlignmentFlag.AlignLeading), title)
        below = QPointF(room.left(), top + metrics.lineSpacing() + _LINE_PX)
        painter.setOpacity(0.85)
        self._draw_line(painter, shown, below, room, hit)
        painter.restore()

    def _draw_line(
        self, painter: QPainter, shown: QStyleOptionViewItem, position: QPointF, room: QRect, hit: ListedHit
    ) -> None:
        """Draw the snippet of the search match `hit` on one line, with the match itself in bold.

        `shown`: the row with its font and colours.
        `position`: top left corner of the line.
        `room`: rectangle outside of which nothing is drawn; its width is that of the line.
        """
        fitted = fit_snippet(hit, shown.fontMetrics, room.width())
        text = shown.fontMetrics.elidedText(fitted.text, Qt.TextElideMode.ElideRight, room.width())
        layout = QTextLayout(text, shown.font)
        layout.setFormats([bold_range(text, fitted)])
        layout.beginLayout()
        line = layout.createLine()
        line.setLineWidth(room.width())
        layout.endLayout()
        painter.setClipRect(room)
        # A text layout and no `drawText`: it draws bold parts of bidirectional text correctly.
        layout.draw(painter, position)
