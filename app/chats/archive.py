"""The database of conversations for the GUI thread. Calls do not block; results arrive as signals or callbacks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

from PySide6.QtCore import QObject, Qt, Signal

from app.background import Background
from app.models.answering import ChatStorage, Then
from app.notices import Notices
from engine.base.errors import ChatError, EngineError, LockedError
from engine.base.language import tr
from engine.base.values import replace
from engine.chat.answer import Append
from engine.chat.conversation import Conversation as Chat
from engine.chat.conversation import Hit
from engine.chat.message import Message, now_ms
from engine.chat.store import ChatStore
from engine.chat.tree import MessageTree

KEPT_DELETED_MS = 30 * 24 * 3600 * 1000
"""Milliseconds for which deleted conversations stay in the database: 30 days."""

RETRY_SECONDS = 2.0
"""Time in seconds between two attempts to open the database while another program is writing to it."""
CLOSE_SECONDS = 10.0
"""Longest time in seconds for which `ChatArchive.close` waits for the database to open."""

_T = TypeVar("_T")
_Write = Callable[[ChatStore], "Future[None]"]


def _nothing() -> None:
    """Do nothing. Callback after a change was stored, for callers that do not wait for it."""


class ChatArchive(QObject, ChatStorage):
    """Stores conversations in the database (`ChatStore`), which writes in its own thread. Calls do not block.

    Each error of a write is shown once. When a later write succeeds, a notice says so.
    """

    changed = Signal()
    """Emitted when conversations were added or removed, or when one has another title, folder, pin or order."""
    is_open_now = Signal()
    deleted = Signal(str)
    """Carries the id of a conversation that was deleted."""
    brought_back = Signal(str)
    """Carries the id of a conversation whose deletion was undone."""

    _done = Signal(object)
    _copy_failed = Signal(object)

    def __init__(self, path: Path, background: Background, notices: Notices, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._path = path
        self._background = background
        self._notices = notices
        self._store: ChatStore | None = None
        self._lock = threading.Lock()
        self._opened: ChatStore | None = None
        """The open database, which `close` closes; None before it is open.

        The background thread sets it, because the window may close before `_on_opened` is called.
        """
        self._closing = threading.Event()
        self._opening_ended = threading.Event()
        self._opening_ended.set()
        self._waiting: list[tuple[_Write, Then]] | None = []
        """Changes that wait until the database is open, each with the callback for its end.

        None if the database cannot be opened.
        """
        self._later: list[Callable[[], None]] = []
        """Functions passed to `work`, which wait until the database is open."""
        self._chats: dict[str, Chat] = {}
        self._warned: set[str] = set()
        """Sentences of the errors that were shown since changes were stored the last time."""
        self._is_behind = False
        """Whether changes still wait to be written after a failed write, for example because the disk is full."""
        self._done.connect(self._on_done, Qt.ConnectionType.QueuedConnection)
        # Emitted by the thread that makes copies.
        self._copy_failed.connect(notices.show_error, Qt.ConnectionType.QueuedConnection)

    # ------------------------------------------------------------------ opening

    def start(self) -> None:
        """Open the database in the background. While another program is writing to it, try again."""
        self._opening_ended.clear()
        self._background.run(
            "Opening the conversations",
            self._open,
            self._on_opened,
            self._on_failed,
            quiet=True,
        )

    def close(self) -> None:
        """Write the waiting changes, close the database and copy it. Blocks for a bounded time.

        If changes wait because the database is still being opened, the call waits for it, at most `CLOSE_SECONDS`.
        """
        waiting = self._waiting or []
        self._store, self._waiting = None, None
        self._later.clear()
        if waiting:
            self._opening_ended.wait(CLOSE_SECONDS)
        with self._lock:
            self._closing.set()
        if self._opened is not None:
            for write, _ in waiting:
                write(self._opened)
            self._opened.close()

    def _open(self) -> tuple[ChatStore, tuple[Chat, ...]]:
        try:
            store = self._connected()
            with self._lock:
                if not self._closing.is_set():
                    self._opened = store
            if self._opened is None:
                store.close()
            return store, store.conversations()
        finally:
            self._opening_ended.set()

    def _connected(self) -> ChatStore:
        """Return the open database. While another program is writing to it, wait and try again."""
        while True:
            try:
                return ChatStore(self._path, self._emit_copy_failed)
            except LockedError as error:
                self._background.deliver(partial(self._on_locked, error))
                if self._closing.wait(RETRY_SECONDS):
                    raise

    def _emit_copy_failed(self, error: ChatError) -> None:
        with suppress(RuntimeError):  # the window closed in the meantime
            self._copy_failed.emit(error)

    def _on_locked(self, error: EngineError) -> None:
        """Warn that another program locks the database, and let answers be shown before they are stored.

        The changes still wait until the database can be written. Their callbacks, which show the text of an answer, are
        called now. From now on `_do` calls the callback of a new change at once.
        """
        self._warn(error)
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, [(write, _nothing) for write, _ in self._waiting]
            for _, then in waiting:
                then()

    def _on_opened(self, opened: tuple[ChatStore, tuple[Chat, ...]]) -> None:
        self._store, chats = opened
        if self._store.notice:
            self._notices.show(self._store.notice, bad=True)
        # Conversations may have been begun before the database was open.
        began = self._chats
        self._chats = {chat.id: chat for chat in chats} | began
        waiting, self._waiting = self._waiting or [], []
        for write, then in waiting:
            self._do(write, then)
        if self._warned:
            self._show_saved_again()
        # After the waiting changes, which may restore a deleted conversation.
        self._store.purge(now_ms() - KEPT_DELETED_MS)
        later, self._later = self._later, []
        for begin in later:
            begin()
        self.changed.emit()
        self.is_open_now.emit()

    def _on_failed(self, error: EngineError) -> None:
        waiting, self._waiting = self._waiting or [], None
        self._warn(error)
        for _, then in waiting:
            then()
        later, self._later = self._later, []
        for begin in later:
            begin()

    # ------------------------------------------------------------------ what there is

    @property
    def chats(self) -> tuple[Chat, ...]:
        """All conversations: pinned ones first, then by the time of the last change, newest first."""
        newest_first = sorted(self._chats.values(), key=attrgetter("updated_ms"), reverse=True)
        # Sorting is stable, so the order by time stays within both groups.
        return tuple(sorted(newest_first, key=attrgetter("pinned"), reverse=True))

    def chat(self, chat: str) -> Chat | None:
        """Return the conversation with this id; None if it is not stored or was deleted."""
        return self._chats.get(chat)

    def read(self, chat: str, on_read: Callable[[Chat, MessageTree], None]) -> None:
        """Read a conversation after all earlier changes have been written, and call `on_read` with it.

        While the database is not open, a notice says so, and `on_read` is not called.
        """
        store = self._store
        if store is None:
            # Not later: the person may be reading or writing something else by then.
            sentence = tr(
                "This conversation cannot be shown, because the database of conversations is not open. Try again in a "
                "moment. If it stays closed, restart Layerdeck."
            )
            self._notices.show_error(ChatError(sentence))
            return

        def work() -> tuple[Chat, MessageTree]:
            store.settled().result()
            kept = store.conversation(chat)
            if kept is None:
                raise ChatError(tr("This conversation no longer exists."))
            return kept, store.tree(chat)

        def deliver(found: tuple[Chat, MessageTree]) -> None:
            on_read(*found)

        self._background.run("Reading a conversation", work, deliver, self._notices.show_error, quiet=True)

    def search(self, text: str, on_found: Callable[[tuple[Hit, ...]], None]) -> None:
        """Search titles and all messages for `text` in the background, and call `on_found` with the matches."""
        store = self._store
        if store is not None:
            self._background.run(
                "Searching the conversations",
                lambda: store.search(text),
                on_found,
                self._notices.show_error,
                quiet=True,
            )

    def work(self, what: str, work: Callable[[ChatStore], _T], then: Callable[[_T], None]) -> None:
        """Call `work` with the database in a background thread, then call `then` with its result in the GUI thread.

        `work` sees all changes that were made before this call. `what`: description of the work for people.
        """
        store = self._store
        if store is None and self._waiting is not None:
            self._later.append(lambda: self.work(what, work, then))
            return
        if store is None:
            self._notices.show_error(ChatError(tr("The conversations cannot be read.")))
            return

        def settled_work() -> _T:
            store.settled().result()
            return work(store)

        self._background.run(what, settled_work, then, self._notices.show_error)

    def take_in(self, chats: Sequence[Chat]) -> None:
        """Add imported conversations to the list. The import has already written them to the database."""
        self._chats |= {chat.id: chat for chat in chats}
        self.changed.emit()

    def look_again(self) -> None:
        """Look for conversations that other programs have stored, such as the command line; add them to the list."""
        store, before = self._store, dict(self._chats)
        if store is None:
            return

        def work() -> tuple[Chat, ...]:
            return store.conversations() if store.written_by_others() else ()

        def deliver(found: tuple[Chat, ...]) -> None:
            # A conversation that was changed or deleted here since then is newer.
            news = {chat.id: chat for chat in found if self._chats.get(chat.id) is before.get(chat.id) != chat}
            if news:
                self._chats |= news
                self.changed.emit()

        def fail(_error: EngineError) -> None:
            """Ignore the error: the next read or write reports it."""

        self._background.run("Looking for other conversations", work, deliver, fail, quiet=True)

    # ------------------------------------------------------------------ keeping

    def save(self, chat: Chat, before: Chat | None) -> None:
        """Store a new or changed conversation. `before`: its last stored version; None if it is new."""
        shown = self._chats.get(chat.id)
        # Each message moves the time of the last change, which `chat` does not know.
        last_ms = chat.updated_ms if shown is None else max(chat.updated_ms, shown.updated_ms)
        self._chats[chat.id] = replace(chat, updated_ms=last_ms)
        self._do(lambda store: store.save(chat, before), _nothing)
        # Drafts are saved with every pause in typing; the list does not show them.
        if shown is None or _listed(shown) != _listed(chat):
            self.changed.emit()

    def apply(self, chat: str, before: MessageTree, after: MessageTree) -> None:
        """Store how the messages of conversation `chat` have changed. `before`, `after`: all its messages."""
        self._touch(chat)
        self._do(lambda store: store.apply(chat, before, after), _nothing)

    def keep_file(self, data: bytes) -> None:
        """Store the bytes of an attachment. Called before the message that refers to it is stored."""
        self._do(lambda store: store.keep_file(data)[1], _nothing)

    def read_files(self, names: Sequence[str], then: Callable[[Mapping[str, bytes]], None]) -> None:
        """Read attachments, then call `then` with a mapping from SHA-256 to bytes, for those that are stored.

        `names`: SHA-256 of each attachment to read.
        """
        store = self._store
        if store is None:
            then({})
            return

        def work() -> dict[str, bytes]:
            store.settled().result()
            return {name: data for name in names if (data := store.file(name)) is not None}

        def fail(error: EngineError) -> None:
            self._notices.show_error(error)
            then({})

        self._background.run("Reading attachments", work, then, fail, quiet=True)

    def append(self, piece: Append, then: Then) -> None:
        """Append the text of `piece` to the stored answer that is being written, then call `then`."""
        self._do(lambda store: store.append(piece.message, piece.content, piece.reasoning, piece.calls), then)

    def finish(self, chat: str, message: Message, then: Then) -> None:
        """Store the complete answer `message`, which has ended, in conversation `chat`; then call `then`."""
        self._do(lambda store: store.finish(chat, message), then)

    def delete(self, chat: str) -> None:
        """Delete the conversation with this id. `restore` undoes it."""
        if self._chats.pop(chat, None) is not None:
            self._do(lambda store: store.delete(chat), _nothing)
            self.deleted.emit(chat)
            self.changed.emit()

    def restore(self, chat: Chat) -> None:
        """Undo the deletion of a conversation in the database, and put it into the list again."""
        self._chats[chat.id] = chat
        self._do(lambda store: store.restore(chat.id), _nothing)
        self.brought_back.emit(chat.id)
        self.changed.emit()

    # ------------------------------------------------------------------ inside

    def _touch(self, chat: str) -> None:
        known = self._chats.get(chat)
        if known is not None:
            self._chats[chat] = replace(known, updated_ms=now_ms())
            # A conversation that is the first already stays in place, so that streaming does not refresh the list.
            was_first = all(
                each.updated_ms < known.updated_ms
                for each in self._chats.values()
                if each.pinned == known.pinned and each.id != chat
            )
            if not was_first:
                self.changed.emit()

    def _do(self, write: _Write, then: Then) -> None:
        if self._store is not None:
            self._store_write(self._store, write, then)
        elif self._waiting is None:
            then()
        elif self._warned:  # another program is writing to the database
            self._waiting.append((write, _nothing))
            then()
        else:
            self._waiting.append((write, then))

    def _store_write(self, store: ChatStore, write: _Write, then: Then) -> None:
        def finish(future: Future[None]) -> None:
            try:
                self._done.emit((future, then))
            except RuntimeError:
                return  # The window closed in the meantime.

        # The callback runs in the thread of the store; the signal leads into the GUI thread.
        write(store).add_done_callback(finish)

    def _on_done(self, done: tuple[Future[None], Then]) -> None:
        future, then = done
        error = future.exception()
        if isinstance(error, EngineError):
            self._is_behind = self._is_behind or (self._store is not None and self._store.is_behind)
            self._warn(error)
        # Not an error of the disk but a bug; it is reported as one.
        elif error is not None:
            raise error
        elif self._is_behind:
            # The store writes in order, so changes that had no room before are on the disk as well.
            self._show_saved_again()
        then()

    def _warn(self, error: EngineError) -> None:
        sentence = error.summary()
        if sentence not in self._warned:
            self._warned.add(sentence)
            self._notices.show(tr("{error} New messages are shown, but not saved.", error=sentence), bad=True)

    def _show_saved_again(self) -> None:
        self._is_behind = False
        self._warned.clear()
        self._notices.show(tr("Conversations are being saved again, including the messages since the failure."))


def _listed(chat: Chat) -> tuple[object, ...]:
    return chat.title, chat.folder, chat.pinned
