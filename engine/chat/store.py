"""The conversation database: one SQLite file, written by one thread and read from any thread.

Reading blocks on the disk. Writing does not block: it returns a `Future`, which is done when the change is on disk and
survives even a killed process. If the change cannot be stored, the future holds a `ChatError`. Callbacks of futures run
in the writing thread. Changes are written in the order of the calls. If the disk is full, a change stays in memory,
where reading finds it, and is written when there is room. If another program locks the database for long, changes stay
in memory as well, and reading fails until they are written.

An answer is stored in three steps: `apply` a tree with a message in state `writing`; `append` its text piece by piece,
and show each piece when its future is done; `finish` with the complete message. After a crash the message has all
stored pieces and the state `interrupted`.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue

from engine.base.errors import ChatError
from engine.base.json_file import UNREADABLE
from engine.base.language import tr
from engine.base.sqlite_file import SQLITE_ERRORS
from engine.chat import database, schema
from engine.chat.conversation import Conversation, Hit
from engine.chat.copies import BackgroundCopies, DamageFound, DatabaseCopies
from engine.chat.database import is_alive, open_database, open_read_only, our_name
from engine.chat.message import Attachment, Message, now_ms
from engine.chat.recovery import damage_met, is_open_elsewhere
from engine.chat.search import DEFAULT_HITS, search
from engine.chat.tool_calls import CallDelta
from engine.chat.tree import MessageTree, difference, mended_tree
from engine.chat.writer import Writer

_MERGED_PAGES = 1000
"""Pages of the text index that are merged in one transaction, which takes about 0.2 s."""


class ChatStore:
    """The conversation database: reads from any thread, and writes in its own thread.

    `notice`: a sentence for people if the database was recovered or renamed; else empty.
    """

    def __init__(
        self,
        path: Path,
        report: Callable[[ChatError], None] | None = None,
        *,
        makes_copies: bool = True,
        only_reads: bool = False,
    ) -> None:
        """Open the database, or create it. A damaged database is recovered, and a database of a newer version is
        renamed.

        `report`: called in another thread with errors of the background copies.
        `makes_copies`: whether to copy the database in the background.
        `only_reads`: whether the caller writes nothing. Then a database that cannot be written is opened as well.

        Raises:
            LockedError: another program is writing to the database.
            ChatError: the database cannot be opened or created.
        """
        self.path = path
        self._connect_reader = _connect_reader
        self._is_alone = not (os.path.isfile(path) and is_open_elsewhere(path))  # noqa: PTH113
        try:
            connection, self.notice = open_database(path)
        except ChatError:
            if not only_reads or not os.path.isfile(path):  # noqa: PTH113
                raise
            connection, self.notice = open_read_only(path), ""
            self._connect_reader = open_read_only
        # Stored with messages in state `writing`, so that the next start knows which of them were abandoned.
        self._me = our_name()
        self._readers: SimpleQueue[sqlite3.Connection] = SimpleQueue()
        self._closed = False
        self._version = database.data_version(connection)
        self._writer = Writer(connection, path)
        self._report = report
        self._copies = BackgroundCopies(DatabaseCopies(path), self._on_copy_failed) if makes_copies else None

    def close(self) -> None:
        """Write all queued changes, close the database, and copy it if it has changed since the last copy."""
        if self._copies is not None and not self._closed:
            self._copies.stop()
        # This is found out before closing: closing the database changes the time of its file.
        is_copied = self._copies is not None and self._is_copied()
        self._closed = True
        self._writer.close()
        self._close_readers()
        if self._copies is not None:
            self._copies.make_last(is_current=is_copied)

    def _is_copied(self) -> bool:
        with suppress(ChatError):
            self._writer.settled().result()
            return self._copies is not None and not self._writer.is_behind and self._copies.is_current()
        return True  # it is closed already

    def _on_copy_failed(self, error: ChatError | DamageFound) -> None:
        met = damage_met(self.path, error) if isinstance(error, DamageFound) else error
        if self._report is not None and met is not None:
            self._report(met)

    def _close_readers(self) -> None:
        while True:
            try:
                self._readers.get_nowait().close()
            except Empty:
                return

    @property
    def is_behind(self) -> bool:
        """Whether changes are only in memory because the disk is full or the database is locked."""
        return self._writer.is_behind

    # ------------------------------------------------------------------ reading

    def conversations(self, *, deleted: bool = False) -> tuple[Conversation, ...]:
        """Return all conversations, pinned ones first, then by their last change, newest first.

        `deleted`: whether to return the deleted conversations; if false, the ones that are not deleted.
        """
        with self._reading() as connection:
            found = connection.execute(
                f"SELECT {schema.CONVERSATION_COLUMNS} FROM conversation"
                f" WHERE deleted_ms IS {'NOT NULL' if deleted else 'NULL'} ORDER BY pinned DESC, updated_ms DESC"
            )
            return tuple(map(schema.read_conversation, found))

    def conversation(self, conversation: str) -> Conversation | None:
        """Return one conversation, deleted or not; None if it does not exist."""
        with self._reading() as connection:
            row = connection.execute(
                f"SELECT {schema.CONVERSATION_COLUMNS} FROM conversation WHERE id = ?", (conversation,)
            ).fetchone()
            return None if row is None else schema.read_conversation(row)

    def tree(self, conversation: str) -> MessageTree:
        """Return the message tree of a conversation; an empty tree if it has no messages."""
        with self._reading() as connection:
            # One read transaction: pieces, attachments and messages must be of the same moment.
            connection.execute("SAVEPOINT tree")
            try:
                return self._read_tree(connection, conversation)
            finally:
                connection.execute("RELEASE tree")

    def file(self, sha256: str) -> bytes | None:
        """Return the bytes of an attachment; None if they are not stored."""
        with self._reading() as connection:
            row = connection.execute("SELECT data FROM file WHERE sha256 = ?", (sha256,)).fetchone()
            return None if row is None else bytes(row[0])

    def search(self, text: str, limit: int = DEFAULT_HITS) -> tuple[Hit, ...]:
        """Return at most `limit` matches of `text` in conversations that are not deleted; case is ignored.

        Matches in titles come first, then matches in messages of all branches; each newest first.
        """
        with self._reading() as connection:
            return search(connection, text, limit)

    # ------------------------------------------------------------------ writing

    def save(self, conversation: Conversation, before: Conversation | None = None) -> Future[None]:
        """Store a conversation, without its messages.

        `before`: the state that is stored now; only fields that differ are written. None: the conversation is new.
        """
        statement, values = _saving(conversation, before)
        return self._writer.do(lambda connection: _execute(connection, statement, values))

    def save_all(self, changes: Sequence[tuple[Conversation, Conversation]]) -> Future[None]:
        """Store changed conversations, without their messages, in one transaction: all of them or none.

        `changes`: pairs of the new state of a conversation and the state that is stored now; only different fields are
        written.
        """
        statements = [_saving(conversation, before) for conversation, before in changes]

        def job(connection: sqlite3.Connection) -> None:
            for statement, values in statements:
                _execute(connection, statement, values)

        return self._writer.do(job)

    def apply(self, conversation: str, before: MessageTree, after: MessageTree) -> Future[None]:
        """Store the change of a conversation's messages from the tree `before` to the tree `after`.

        A call with the two trees exchanged undoes the change.
        """
        change = difference(before, after)
        # New messages come last. Only an undone deletion brings one back in the middle; then all places are written.
        new = {message.id for message in change.put} - set(before.messages)
        moved = any(message not in new for message in list(after.messages)[len(after.messages) - len(new) :])

        def job(connection: sqlite3.Connection) -> None:
            # Children of deleted messages are among `put`, with other parents.
            for removed in change.removed:
                connection.execute("DELETE FROM message WHERE id = ?", (removed,))
            for message in change.put:
                self._put(connection, conversation, message)
            if moved:
                for index, message_id in enumerate(after.messages):
                    connection.execute("UPDATE message SET place = ? WHERE id = ?", (index, message_id))
            connection.execute(
                "UPDATE conversation SET leaf = ?, updated_ms = ? WHERE id = ?", (change.leaf, now_ms(), conversation)
            )

        return self._writer.do(job)

    def append(
        self, message: str, content: str = "", reasoning: str = "", calls: Sequence[CallDelta] = ()
    ) -> Future[None]:
        """Store more text and tool calls of a message in state `writing`.

        The caller shows the text when the future is done.

        `message`: id of the message.
        `content`, `reasoning`: new text of the answer, and new reasoning (thinking) text before it.
        """
        return self._writer.do(
            lambda connection: _execute(
                connection,
                "INSERT INTO piece (message, content, reasoning, calls) VALUES (?, ?, ?, ?)",
                [message, content, reasoning, schema.piece_value(calls)],
            ),
            is_repeated_later=True,
        )

    def finish(self, conversation: str, message: Message) -> Future[None]:
        """Store the complete message in place of the pieces of text that `append` has stored."""

        def job(connection: sqlite3.Connection) -> None:
            self._put(connection, conversation, message)
            connection.execute("UPDATE conversation SET updated_ms = ? WHERE id = ?", (now_ms(), conversation))

        return self._writer.do(job)

    def keep_file(self, data: bytes) -> tuple[str, Future[None]]:
        """Store the bytes of an attachment and return their SHA-256.

        Call it before storing the message that refers to them.
        """
        sha256 = hashlib.sha256(data).hexdigest()
        statement = "INSERT OR IGNORE INTO file (sha256, data) VALUES (?, ?)"
        return sha256, self._writer.do(lambda connection: _execute(connection, statement, [sha256, data]))

    def settled(self) -> Future[None]:
        """Return a future that is done when all earlier changes can be read."""
        return self._writer.settled()

    def written_by_others(self) -> bool:
        """Return whether another process wrote to the database since the last call. Blocks while changes are written.

        It must not be called from two threads at a time.

        Raises:
            ChatError: the database cannot be read.
        """
        try:
            now = self._writer.data_version()
        except SQLITE_ERRORS as error:
            raise ChatError(tr("The conversations cannot be read.")) from error
        before, self._version = self._version, now
        return self._version != before

    def delete(self, conversation: str) -> Future[None]:
        """Mark a conversation as deleted: lists and searches leave it out until it is restored or purged."""
        statement = "UPDATE conversation SET deleted_ms = ? WHERE id = ?"
        return self._writer.do(lambda connection: _execute(connection, statement, [now_ms(), conversation]))

    def restore(self, conversation: str) -> Future[None]:
        """Restore a deleted conversation that is not purged yet."""
        statement = "UPDATE conversation SET deleted_ms = NULL WHERE id = ?"
        return self._writer.do(lambda connection: _execute(connection, statement, [conversation]))

    def purge(self, deleted_before_ms: int) -> Future[None]:
        """Erase conversations that were deleted before a time (ms since 1970), and attached files that no message uses.

        The files are not erased if another process had the database open when this store opened it: a user of that
        process may still undo the removal of a message with such a file. If conversations were erased, the text index
        is merged in the background afterwards.
        """
        erased: list[int] = []

        def job(connection: sqlite3.Connection) -> None:
            found = connection.execute("DELETE FROM conversation WHERE deleted_ms < ?", (deleted_before_ms,))
            erased.append(found.rowcount)
            if self._is_alone:
                connection.execute("DELETE FROM file WHERE sha256 NOT IN (SELECT sha256 FROM attachment)")

        def merge(_purged: Future[None]) -> None:
            # A negative number begins to merge all parts of the index, a positive one goes on with it.
            if any(erased):
                self._merge_index(-_MERGED_PAGES)

        # If it fails, the next start purges.
        purged = self._writer.do(job, is_upkeep=True)
        purged.add_done_callback(merge)
        return purged

    def _merge_index(self, n_pages: int) -> None:
        """Merge parts of the full-text index, so that it loses the trigrams of deleted messages.

        Each step is a job of its own: FTS5's "optimize" takes 12 s for 50 MB of text, in one transaction.

        `n_pages`: number of pages of one step (argument of FTS5's command "merge"); negative in the first step.
        """
        changes: list[int] = []

        def job(connection: sqlite3.Connection) -> None:
            before = connection.total_changes
            connection.execute("INSERT INTO message_text (message_text, rank) VALUES ('merge', ?)", (n_pages,))
            changes.append(connection.total_changes - before)

        def go_on(merged: Future[None]) -> None:
            # FTS5 changes fewer than two rows if nothing is left to merge.
            if merged.exception() is None and changes[-1] > 1:
                self._merge_index(abs(n_pages))

        self._writer.do(job, is_upkeep=True).add_done_callback(go_on)

    # ------------------------------------------------------------------ parts

    def _put(self, connection: sqlite3.Connection, conversation: str, message: Message) -> None:
        values = schema.message_values(message, conversation, self._me)
        updates = ", ".join(f"{column} = excluded.{column}" for column in values if column != "id")
        connection.execute(
            f"INSERT INTO message ({', '.join(values)}, place) VALUES ({', '.join('?' * len(values))},"
            " (SELECT coalesce(max(place), -1) + 1 FROM message WHERE conversation = ?))"
            # An upsert keeps the row number, by which the text index refers to the message.
            f" ON CONFLICT (id) DO UPDATE SET {updates}",
            [*values.values(), conversation],
        )
        # The message now has all its text; pieces would be added a second time.
        connection.execute("DELETE FROM piece WHERE message = ?", (message.id,))
        connection.execute("DELETE FROM attachment WHERE message = ?", (message.id,))
        for attachment in message.attachments:
            _execute(
                connection,
                f"INSERT INTO attachment (message, {schema.ATTACHMENT_COLUMNS})"
                f" VALUES (?, {', '.join('?' * len(schema.ATTACHMENT_FIELDS))})",
                [message.id, *(getattr(attachment, field) for field in schema.ATTACHMENT_FIELDS)],
            )

    def _read_tree(self, connection: sqlite3.Connection, conversation: str) -> MessageTree:
        pieces: dict[str, list[tuple[str, str, str]]] = {}
        for message, *texts in connection.execute(
            "SELECT piece.message, piece.content, piece.reasoning, piece.calls"
            " FROM message JOIN piece ON piece.message = message.id"
            " WHERE message.conversation = ? AND message.writer IS NOT NULL ORDER BY piece.number",
            (conversation,),
        ):
            content, reasoning, calls = texts
            pieces.setdefault(message, []).append((content, reasoning, calls))
        attachments: dict[str, list[Attachment]] = {}
        columns = ", ".join(f"attachment.{field}" for field in schema.ATTACHMENT_FIELDS)
        for row in connection.execute(
            f"SELECT attachment.message, {columns} FROM message JOIN attachment ON attachment.message = message.id"
            " WHERE message.conversation = ? ORDER BY attachment.number",
            (conversation,),
        ):
            attachments.setdefault(row[0], []).append(schema.read_attachment(row[1:]))
        messages = [
            schema.read_message(
                row, pieces.get(row[0], ()), attachments.get(row[0], ()), row[-1] is not None and is_alive(row[-1])
            )
            for row in connection.execute(
                f"SELECT {schema.MESSAGE_COLUMNS} FROM message WHERE conversation = ? ORDER BY place, number",
                (conversation,),
            )
        ]
        leaf = connection.execute("SELECT leaf FROM conversation WHERE id = ?", (conversation,)).fetchone()
        return mended_tree(messages, None if leaf is None else leaf[0])

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """Provide a connection for reading. Reads include changes that wait in memory.

        Raises:
            LockedError: changes wait in memory, and another program is writing.
            ChatError: the database cannot be read.
        """
        if self._closed:
            raise ChatError(tr("The database of conversations is closed; start Layerdeck again."))
        try:
            if self._writer.is_behind:
                with self._writer.with_all() as connection:
                    yield connection
                return
            try:
                connection = self._readers.get_nowait()
            except Empty:
                connection = self._connect_reader(self.path)
            try:
                yield connection
            finally:
                self._readers.put(connection)
                if self._closed:  # while this was read
                    self._close_readers()
        except (sqlite3.Error, TypeError, ValueError, *UNREADABLE) as error:  # a damaged page may have any values
            raise damage_met(self.path, error) or ChatError(
                tr(
                    "The conversations in {name} cannot be read ({error}); check the disk and the permissions of the "
                    "file.",
                    name=self.path.name,
                    error=error,
                )
            ) from None


def _saving(conversation: Conversation, before: Conversation | None) -> tuple[str, list[object]]:
    """Return the SQL statement that stores a conversation, and its values; the statement is empty if no field differs.

    `before`: the state that is stored now; None: the conversation is new.
    """
    fields = tuple(
        field
        for field in schema.CONVERSATION_FIELDS
        if before is None or getattr(before, field) != getattr(conversation, field)
    )
    values = [schema.conversation_value(field, getattr(conversation, field)) for field in fields]
    if before is None:
        return f"INSERT INTO conversation ({', '.join(fields)}) VALUES ({', '.join('?' * len(fields))})", values
    if not fields:
        return "", []
    assignments = ", ".join(f"{field} = ?" for field in fields)
    return f"UPDATE conversation SET {assignments} WHERE id = ?", [*values, conversation.id]


def _execute(connection: sqlite3.Connection, statement: str, values: list[object]) -> None:
    connection.execute(statement, [schema.text(value) if isinstance(value, str) else value for value in values])


def _connect_reader(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA query_only = ON")
    return connection
