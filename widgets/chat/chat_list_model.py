"""The Qt model of the conversation list, and the values of its rows. Texts are made only for visible rows."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from PySide6.QtCore import QAbstractListModel, QModelIndex, QObject, QPersistentModelIndex, Qt, Signal
from PySide6.QtGui import QFont

from engine.base.language import tr
from widgets.common.roles import plain_tool_tip


class ListedChat(Struct, frozen=True):
    """A conversation in the list. `folder`: name of its folder; empty if it is in no folder."""

    id: str
    title: str
    folder: str = ""
    pinned: bool = False


class ListedHit(Struct, frozen=True):
    """A match of a search over all conversations.

    `message`: id of the message; empty if the match is in the title.
    `snippet`: text around the match, on one line.
    `begin`, `end`: range of the match in `snippet`.
    """

    chat: str
    message: str
    title: str
    snippet: str
    begin: int = 0
    end: int = 0


class ChatTarget(Struct, frozen=True):
    """Ids of the conversation and the message that a row opens. `message` is empty if the row is a conversation."""

    chat: str
    message: str = ""


class ChatChange(Struct, frozen=True):
    """A request to rename a conversation or to move it to another folder.

    `chat`: id of the conversation.
    `text`: the new title with the signal `renamed`, the name of the new folder with the signal `moved`.
    """

    chat: str
    text: str


def folders_of(chats: tuple[ListedChat, ...]) -> list[str]:
    """Return the names of the folders that have conversations, sorted without regard to case."""
    return sorted({chat.folder for chat in chats if chat.folder}, key=str.casefold)


HIT_ROLE = Qt.ItemDataRole.UserRole
"""Data role of the `ListedHit` that a row shows. It is None for rows that are no search matches."""
AnyIndex = QModelIndex | QPersistentModelIndex
Row = ListedChat | ListedHit | str
"""A row of the list; a plain string is a heading."""


class ChatListModel(QAbstractListModel):
    """List model of the conversations or of the matches of a search. Conversations in folders come after the others."""

    renamed = Signal(ChatChange)
    """Emitted when a person has typed a new title for a conversation."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._rows: list[Row] = []
        self._row_of: dict[str, int] = {}

    def set_chats(self, chats: Sequence[ListedChat]) -> None:
        """List `chats`: first those without a folder, then each folder. Their order stays the same within a folder."""
        in_folders: dict[str, list[Row]] = {}
        for chat in chats:
            in_folders.setdefault(chat.folder, []).append(chat)
        rows = in_folders.get("", [])
        for folder in folders_of(tuple(chats)):
            rows += [folder, *in_folders[folder]]
        self._set_rows(rows, {row.id: index for index, row in enumerate(rows) if isinstance(row, ListedChat)})

    def set_hits(self, hits: Sequence[ListedHit]) -> None:
        """Show the matches of a search."""
        rows: list[Row] = [*hits] or [tr("No matches.")]
        # A conversation may have many matches in messages, but at most one in its title.
        self._set_rows(rows, {hit.chat: index for index, hit in enumerate(hits) if not hit.message})

    def row_of(self, chat: str) -> int | None:
        """Return the row of a conversation; None if it is not shown."""
        return self._row_of.get(chat)

    def target_at(self, index: AnyIndex) -> ChatTarget | None:
        """Return the conversation or message that a row opens; None for a heading."""
        match self._row(index):
            case ListedChat(id=chat):
                return ChatTarget(chat)
            case ListedHit(chat=chat, message=message):
                return ChatTarget(chat, message)
        return None

    def rowCount(self, parent: AnyIndex = QModelIndex()) -> int:  # noqa: B008 - Qt's signature
        return 0 if parent.isValid() else len(self._rows)

    def flags(self, index: AnyIndex) -> Qt.ItemFlag:
        row = self._row(index)
        if row is None or isinstance(row, str):
            return Qt.ItemFlag.NoItemFlags
        flags = Qt.ItemFlag.ItemIsEnabled | Qt.ItemFlag.ItemIsSelectable | Qt.ItemFlag.ItemNeverHasChildren
        return flags | Qt.ItemFlag.ItemIsEditable if isinstance(row, ListedChat) else flags

    def data(self, index: AnyIndex, role: int = Qt.ItemDataRole.DisplayRole) -> object:
        row = self._row(index)
        if row is None:
            return None
        match role:
            case Qt.ItemDataRole.DisplayRole | Qt.ItemDataRole.EditRole:
                return _text(row)
            case Qt.ItemDataRole.UserRole:  # HIT_ROLE; a bare name would be a capture pattern
                return row if isinstance(row, ListedHit) else None
            case Qt.ItemDataRole.ToolTipRole if not isinstance(row, str):
                # Bold text alone does not tell screen readers that a conversation is pinned.
                is_pinned = isinstance(row, ListedChat) and row.pinned
                return plain_tool_tip(tr("{title}\npinned", title=row.title) if is_pinned else _text(row))
            case Qt.ItemDataRole.FontRole if isinstance(row, ListedChat) and row.pinned:
                font = QFont()
                font.setBold(True)
                return font
        return None

    def setData(self, index: AnyIndex, value: object, role: int = Qt.ItemDataRole.EditRole) -> bool:
        """Emit `renamed` with the typed title. The row itself changes with the next `set_chats`."""
        row, title = self._row(index), " ".join(str(value).split())
        if role != Qt.ItemDataRole.EditRole or not isinstance(row, ListedChat) or title in ("", row.title):
            return False
        self.renamed.emit(ChatChange(row.id, title))
        return True

    def _row(self, index: AnyIndex) -> Row | None:
        return self._rows[index.row()] if index.isValid() and index.row() < len(self._rows) else None

    def _set_rows(self, rows: list[Row], row_of: dict[str, int]) -> None:
        if row_of == self._row_of and len(rows) == len(self._rows) and row_of:
            # The same conversations in the same rows: selection and open editor stay.
            changed = [index for index, row in enumerate(rows) if row != self._rows[index]]
            self._rows = rows
            if changed:
                self.dataChanged.emit(self.index(changed[0]), self.index(changed[-1]))
            return
        self.beginResetModel()
        self._rows, self._row_of = rows, row_of
        self.endResetModel()


def _text(row: Row) -> str:
    match row:
        case ListedHit(title=title, snippet=snippet, message=message) if message:
            return f"{title}\n{snippet}"
        case ListedChat(title=title) | ListedHit(title=title):
            return title
    return str(row)
