"""The kept conversations, as the window sees them: nothing waits, and what happened arrives as signals."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

import msgspec
from PySide6.QtCore import QObject, Qt, Signal

from app.background import Background
from app.models.answering import ChatStorage, Then
from app.notices import Notices
from engine.base.errors import ChatError, EngineError
from engine.base.language import tr
from engine.chat.conversation import Conversation as Chat
from engine.chat.conversation import Hit
from engine.chat.message import Message, now_ms
from engine.chat.store import ChatStore
from engine.chat.tree import MessageTree

KEPT_DELETED_MS = 30 * 24 * 3600 * 1000
"""What was deleted can be brought back for so long, by whoever opens the database."""

_T = TypeVar("_T")
_Write = Callable[[ChatStore], "Future[None]"]


def _nothing() -> None:
    """What follows a change that nobody waits for."""


class ChatArchive(QObject, ChatStorage):
    """Stores conversations. Where nothing can be kept it says so once, goes on, and says when it is kept."""

    changed = Signal()
    """Other conversations are there, or one has another title, folder or pin."""
    is_open_now = Signal()
    deleted = Signal(str)
    """The id of a conversation that is in no list any more."""
    brought_back = Signal(str)
    """The id of one that is there again."""

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
        """The store from the moment on in which it is open; a window may close before it hears of that."""
        self._is_closed = False
        self._waiting: list[tuple[_Write, Then]] | None = []
        """What is to be written once the store is open; None where there will be none."""
        self._chats: dict[str, Chat] = {}
        self._has_warned = False
        self._is_behind = False
        """Whether something of what was said waits for room on the disk."""
        self._done.connect(self._on_done, Qt.ConnectionType.QueuedConnection)
        self._copy_failed.connect(notices.tell, Qt.ConnectionType.QueuedConnection)

    # ------------------------------------------------------------------ opening

    def start(self) -> None:
        """Open the store, beside the GUI thread."""
        self._background.run(
            "Opening the conversations",
            self._open,
            self._on_opened,
            self._on_failed,
            quiet=True,
        )

    def close(self) -> None:
        """Keep what is still waiting."""
        self._store, self._waiting = None, None
        with self._lock:
            self._is_closed = True
        if self._opened is not None:
            self._opened.close()

    def _open(self) -> tuple[ChatStore, tuple[Chat, ...]]:
        store = ChatStore(self._path, self._tell_copy_failed)
        with self._lock:
            if not self._is_closed:
                self._opened = store
        if self._opened is None:
            store.close()
        return store, store.conversations()

    def _tell_copy_failed(self, error: ChatError) -> None:
        with suppress(RuntimeError):  # the window closed in the meantime
            self._copy_failed.emit(error)

    def _on_opened(self, opened: tuple[ChatStore, tuple[Chat, ...]]) -> None:
        self._store, chats = opened
        if self._store.notice:
            self._notices.say(self._store.notice, bad=True)
        began = self._chats
        self._chats = {chat.id: chat for chat in chats} | began
        waiting, self._waiting = self._waiting or [], []
        for write, then in waiting:
            self._do(write, then)
        self._store.purge(now_ms() - KEPT_DELETED_MS)
        self.changed.emit()
        self.is_open_now.emit()

    def _on_failed(self, error: EngineError) -> None:
        waiting, self._waiting = self._waiting or [], None
        self._warn(error)
        for _, then in waiting:
            then()

    # ------------------------------------------------------------------ what there is

    @property
    def chats(self) -> tuple[Chat, ...]:
        """All conversations, pinned ones first, then those that changed last."""
        newest_first = sorted(self._chats.values(), key=attrgetter("updated_ms"), reverse=True)
        return tuple(sorted(newest_first, key=attrgetter("pinned"), reverse=True))

    def chat(self, chat: str) -> Chat | None:
        """Return a conversation as it is now."""
        return self._chats.get(chat)

    def read(self, chat: str, on_read: Callable[[Chat, MessageTree], None]) -> None:
        """Read a conversation, with all that was written so far."""
        store = self._store
        if store is None:
            return

        def work() -> tuple[Chat, MessageTree]:
            store.settled().result()
            kept = store.conversation(chat)
            if kept is None:
                raise ChatError(tr("This conversation is not there any more."))
            return kept, store.tree(chat)

        def deliver(found: tuple[Chat, MessageTree]) -> None:
            on_read(*found)

        self._background.run("Reading a conversation", work, deliver, self._notices.tell, quiet=True)

    def search(self, text: str, on_found: Callable[[tuple[Hit, ...]], None]) -> None:
        """Look for `text` in titles and all messages."""
        store = self._store
        if store is not None:
            self._background.run(
                "Searching the conversations", lambda: store.search(text), on_found, self._notices.tell, quiet=True
            )

    def work(self, what: str, work: Callable[[ChatStore], _T], then: Callable[[_T], None]) -> None:
        """Do something with the store beside the GUI thread, with all that was written so far; `what` is for people."""
        store = self._store
        if store is None:
            self._notices.tell(ChatError(tr("The conversations cannot be read, so there is nothing to work on.")))
            return

        def settled_work() -> _T:
            store.settled().result()
            return work(store)

        self._background.run(what, settled_work, then, self._notices.tell)

    def take_in(self, chats: Sequence[Chat]) -> None:
        """List conversations that the store has taken in."""
        self._chats |= {chat.id: chat for chat in chats}
        self.changed.emit()

    def look_again(self) -> None:
        """List what another program, the command line, wrote to the store meanwhile."""
        store, before = self._store, dict(self._chats)
        if store is None:
            return

        def work() -> tuple[Chat, ...]:
            return store.conversations() if store.written_by_others() else ()

        def deliver(found: tuple[Chat, ...]) -> None:
            # what was changed or deleted here since then is newer
            news = {chat.id: chat for chat in found if self._chats.get(chat.id) is before.get(chat.id) != chat}
            if news:
                self._chats |= news
                self.changed.emit()

        def fail(_error: EngineError) -> None:
            """It is told where something is to be read or kept."""

        self._background.run("Looking for other conversations", work, deliver, fail, quiet=True)

    # ------------------------------------------------------------------ keeping

    def save(self, chat: Chat, before: Chat | None) -> None:
        """Keep a conversation, new or changed."""
        shown = self._chats.get(chat.id)
        self._chats[chat.id] = chat
        self._do(lambda store: store.save(chat, before), _nothing)
        if shown is None or _listed(shown) != _listed(chat):
            self.changed.emit()

    def apply(self, chat: str, before: MessageTree, after: MessageTree) -> None:
        """Keep what became of messages."""
        self._touch(chat)
        self._do(lambda store: store.apply(chat, before, after), _nothing)

    def keep_file(self, data: bytes) -> None:
        """Keep the bytes of an attachment."""
        self._do(lambda store: store.keep_file(data)[1], _nothing)

    def read_files(self, names: Sequence[str], then: Callable[[Mapping[str, bytes]], None]) -> None:
        """Read attachments by their SHA-256."""
        store = self._store
        if store is None:
            then({})
            return

        def work() -> dict[str, bytes]:
            store.settled().result()
            return {name: data for name in names if (data := store.file(name)) is not None}

        def fail(error: EngineError) -> None:
            self._notices.tell(error)
            then({})

        self._background.run("Reading attachments", work, then, fail, quiet=True)

    def append(self, message: str, content: str, reasoning: str, then: Then) -> None:
        """Keep more of an answer."""
        self._do(lambda store: store.append(message, content, reasoning), then)

    def finish(self, chat: str, message: Message, then: Then) -> None:
        """Keep an answer that is done."""
        self._do(lambda store: store.finish(chat, message), then)

    def delete(self, chat: str) -> None:
        """Take a conversation out of the list, until `restore`."""
        if self._chats.pop(chat, None) is not None:
            self._do(lambda store: store.delete(chat), _nothing)
            self.deleted.emit(chat)
            self.changed.emit()

    def restore(self, chat: Chat) -> None:
        """Bring back what was deleted."""
        self._chats[chat.id] = chat
        self._do(lambda store: store.restore(chat.id), _nothing)
        self.brought_back.emit(chat.id)
        self.changed.emit()

    # ------------------------------------------------------------------ inside

    def _touch(self, chat: str) -> None:
        known = self._chats.get(chat)
        if known is not None:
            self._chats[chat] = msgspec.structs.replace(known, updated_ms=now_ms())
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
        elif self._waiting is not None:
            self._waiting.append((write, then))
        else:
            then()

    def _store_write(self, store: ChatStore, write: _Write, then: Then) -> None:
        def tell(future: Future[None]) -> None:
            try:
                self._done.emit((future, then))
            except RuntimeError:
                return  # The window closed in the meantime.

        write(store).add_done_callback(tell)

    def _on_done(self, done: tuple[Future[None], Then]) -> None:
        future, then = done
        error = future.exception()
        if isinstance(error, EngineError):
            self._is_behind = self._is_behind or (self._store is not None and self._store.is_behind)
            self._warn(error)
        elif error is not None:
            raise error
        elif self._is_behind:
            # The store writes in order: what had no room before is on the disk too.
            self._is_behind = self._has_warned = False
            self._notices.say(tr("The conversations are kept again, with all that was said meanwhile."))
        then()

    def _warn(self, error: EngineError) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._notices.say(tr("{error} What is said now is shown, but not kept.", error=error.summary()), bad=True)


def _listed(chat: Chat) -> tuple[object, ...]:
    return chat.title, chat.folder, chat.pinned
