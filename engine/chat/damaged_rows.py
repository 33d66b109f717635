"""Adds the rows that SQL can still read from a damaged conversation database to an undamaged copy of it."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import get_args

from msgspec import Struct

from engine.base.json_file import UNREADABLE
from engine.base.language import tr
from engine.base.sqlite_file import SQLITE_ERRORS
from engine.chat.conversation import TITLE_CHARACTERS
from engine.chat.message import ROLES, MessageState
from engine.chat.schema import calls_of, deltas_of, details_of, results_of, settings_of

_TABLES = ("conversation", "message", "piece", "attachment")
_MAX_GAP = 100_000
"""Largest number of row ids that are tried one by one in the gap between the forward and the backward scan.

The number is limited because a damaged page may contain any number as a row id.
"""
_JSON_CELLS: tuple[tuple[str, str, Callable[[str], object], str], ...] = (
    ("conversation", "settings", settings_of, "{}"),
    ("conversation", "results", results_of, "{}"),
    ("message", "details", details_of, "{}"),
    ("message", "calls", calls_of, ""),
    ("piece", "calls", deltas_of, ""),
)
"""Columns with JSON: table, column, the function that reads it, and its empty value."""
Value = int | float | str | bytes | None
Row = Mapping[str, Value]


class AddedRows(Struct, frozen=True):
    """Number of messages that a recovery added from the damaged database to the undamaged copy, and number of lost
    messages.

    `n_messages`: number of messages that the copy did not have, or had in an earlier state.
    `n_lost`: number of messages in the damaged file's index that neither file contains; None: the index cannot be read.
    """

    n_messages: int
    n_lost: int | None


def add_readable_rows(damaged: Path, connection: sqlite3.Connection) -> AddedRows:
    """Add the readable rows of a damaged database to an undamaged database of the current version.

    `damaged`: path of the damaged database.
    `connection`: open connection to the undamaged one.

    Raises:
        OSError, sqlite3.Error: the undamaged database cannot be written.
    """
    found: dict[str, tuple[Row, ...]] = dict.fromkeys(_TABLES, ())
    listed: set[str] | None = None
    connection.execute("BEGIN IMMEDIATE")  # foreign keys are off: rows come in any order
    with suppress(*SQLITE_ERRORS), closing(sqlite3.connect(damaged, isolation_level=None)) as source:
        source.execute("PRAGMA query_only = ON")
        found = {table: _sound_rows(source, connection, table) for table in _TABLES}
        _add_files(source, connection)
        # SQLite reads ids from the index of ids alone: it is another part of the file than the rows.
        listed = {ident for (ident,) in source.execute("SELECT id FROM message ORDER BY id")}
    for row in found["conversation"]:
        if _can_read(settings_of, row["settings"]):
            _put(connection, "conversation", _or_empty(row, "results", results_of, "{}"), replaces=True)
    added = sum(_add_message(connection, _or_empty(row, "calls", calls_of)) for row in found["message"])
    _add_pieces(connection, tuple(_or_empty(row, "calls", deltas_of) for row in found["piece"]))
    for row in found["attachment"]:
        _put(connection, "attachment", row)
    for table in ("piece", "attachment"):
        connection.execute(f"DELETE FROM {table} WHERE message NOT IN (SELECT id FROM message)")
    if listed is not None:
        listed -= {ident for (ident,) in connection.execute("SELECT id FROM message")}
    _begin_lost_conversations(connection)
    _fill_holes(connection)
    _empty_unreadable_cells(connection)
    connection.execute("COMMIT")
    return AddedRows(added, None if listed is None else len(listed))


# ---------------------------------------------------------------------- reading


def _sound_rows(source: sqlite3.Connection, target: sqlite3.Connection, table: str) -> tuple[Row, ...]:
    """Return the readable rows of a table that have all columns of schema version 1 and no unknown column.

    Rows with NUL characters in a text are left out, because they come from a page of zeros.
    `source`: the damaged database.
    `target`: the undamaged database, whose column names are the known ones.
    """
    columns = target.execute(f"PRAGMA table_info ({table})").fetchall()
    known = {name for _, name, *_ in columns} | {"rowid"}
    # Columns of later versions have a default, so rows of an old database lack them.
    of_first_version = {name for _, name, _, _, default, _ in columns if default is None}
    return tuple(
        row
        for row in _readable_rows(source, table)
        if of_first_version <= row.keys() <= known
        and not any(isinstance(value, str) and "\0" in value for value in row.values())
    )


def _readable_rows(source: sqlite3.Connection, table: str) -> Iterator[Row]:
    """Yield the readable rows of a table of the damaged database `source`, in the order of their row ids.

    A damaged page ends the forward scan. Then a backward scan begins at the last row. The row ids between the ends of
    both scans are tried one by one.
    """
    rows: dict[int, Row] = {}
    if not _scan(source, table, "ASC", rows):
        last = max(rows, default=0)
        _scan(source, table, "DESC", rows)
        first = min((number for number in rows if number > last), default=last)
        for number in range(last + 1, min(first, last + _MAX_GAP)):
            with suppress(*SQLITE_ERRORS):
                for row in _select(source, table, f"WHERE rowid = {number}"):
                    rows[number] = row
    for number in sorted(rows):
        yield rows[number]


def _scan(source: sqlite3.Connection, table: str, order: str, rows: dict[int, Row]) -> bool:
    """Scan a table of the damaged database `source` and add its rows to `rows` by row id; stop at the first row that is
    already in `rows`.

    Return False if damage ended the scan. `order`: ASC or DESC.
    """
    try:
        for row in _select(source, table, f"ORDER BY rowid {order}"):
            number = row["rowid"]
            if not isinstance(number, int) or number in rows:
                break
            rows[number] = row
    except SQLITE_ERRORS:
        return False
    return True


def _select(source: sqlite3.Connection, table: str, rest: str) -> Iterator[Row]:
    cursor = source.execute(f"SELECT rowid AS rowid, * FROM {table} NOT INDEXED {rest}")
    names = [column[0] for column in cursor.description]
    for values in cursor:
        yield dict(zip(names, values, strict=True))


def _can_read(read: Callable[[str], object], document: Value) -> bool:
    try:
        return isinstance(document, str) and read(document) is not None
    except (TypeError, ValueError, AttributeError, *UNREADABLE):
        return False


def _or_empty(row: Row, column: str, read: Callable[[str], object], empty: str = "") -> Row:
    """Return the row, with the value `empty` in `column` if `read` cannot parse the JSON in that column.

    Without this replacement the whole row would be lost.
    """
    return row if column not in row or _can_read(read, row[column]) else {**row, column: empty}


# ---------------------------------------------------------------------- writing


def _put(connection: sqlite3.Connection, table: str, row: Row, *, replaces: bool = False) -> int:
    """Insert a row into `table` with a new rowid; return the number of changed rows.

    `replaces`: whether to update an existing row with the same id; if false, the existing row is unchanged.
    """
    names = [name for name in row if name not in ("rowid", "number")]
    updates = ", ".join(f"{name} = excluded.{name}" for name in names if name != "id")
    conflict = f"ON CONFLICT (id) DO UPDATE SET {updates}" if replaces else "ON CONFLICT DO NOTHING"
    statement = f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))}) {conflict}"
    try:
        return connection.execute(statement, [row[name] for name in names]).rowcount
    except sqlite3.IntegrityError:
        return 0  # A value is missing: the row is damaged.


def _add_message(connection: sqlite3.Connection, row: Row) -> int:
    """Add a message to the undamaged database, or update it to the later state in `row`.

    Return the number of changed rows. The stored text of a message only grows, because an edit makes a new message. So
    if the text in `row` does not begin with the text in the undamaged database, `row` is damaged and is ignored.

    `connection`: the undamaged database. `row`: the message in the damaged database.
    """
    is_message = row["role"] in ROLES and row["state"] in get_args(MessageState)
    if not is_message or not _can_read(details_of, row["details"]):
        return 0
    kept = connection.execute(
        "SELECT content, reasoning, state, parent, pinned, details FROM message WHERE id = ?", (row["id"],)
    ).fetchone()
    if kept is None:
        return _put(connection, "message", row)
    content, reasoning, *others = kept
    continues = str(row["content"]).startswith(content) and str(row["reasoning"]).startswith(reasoning)
    changed = (row["content"], row["reasoning"], row["state"], row["parent"], row["pinned"], row["details"])
    # An older state than that of the copy is no gain.
    if not continues or changed == (content, reasoning, *others):
        return 0
    return _put(connection, "message", row, replaces=True)


def _add_pieces(connection: sqlite3.Connection, pieces: tuple[Row, ...]) -> None:
    """Replace the pieces (stored text) of each unfinished message by those in the damaged file, unless that file has
    fewer.
    """
    by_message: dict[Value, list[Row]] = {}
    for piece in pieces:
        by_message.setdefault(piece["message"], []).append(piece)
    for message, found in by_message.items():
        (count,) = connection.execute("SELECT count(*) FROM piece WHERE message = ?", (message,)).fetchone()
        if len(found) >= count:
            connection.execute("DELETE FROM piece WHERE message = ?", (message,))
            for piece in found:
                _put(connection, "piece", piece)
    connection.execute("DELETE FROM piece WHERE message IN (SELECT id FROM message WHERE state <> 'writing')")


def _add_files(source: sqlite3.Connection, connection: sqlite3.Connection) -> None:
    """Copy the bytes of attachments from the damaged database `source` to the undamaged `connection`.

    Only bytes that `connection` lacks are copied. Files are large, so they are copied one at a time.
    """
    with suppress(*SQLITE_ERRORS):
        for (sha256,) in source.execute("SELECT sha256 FROM file ORDER BY sha256").fetchall():
            if connection.execute("SELECT 1 FROM file WHERE sha256 = ?", (sha256,)).fetchone() is None:
                _add_file(source, connection, sha256)


def _add_file(source: sqlite3.Connection, connection: sqlite3.Connection, sha256: str) -> None:
    data: object = None
    with suppress(*SQLITE_ERRORS):
        (data,) = source.execute("SELECT data FROM file WHERE sha256 = ?", (sha256,)).fetchone()
    if isinstance(data, bytes) and hashlib.sha256(data).hexdigest() == sha256:
        connection.execute("INSERT INTO file (sha256, data) VALUES (?, ?)", (sha256, data))


def _begin_lost_conversations(connection: sqlite3.Connection) -> None:
    """Create a conversation for the messages whose conversation is lost. The title is the first question among these
    messages.
    """
    connection.execute(
        "INSERT INTO conversation (id, title, folder, pinned, system, preset, settings, template, draft, created_ms,"
        " updated_ms) SELECT conversation, coalesce((SELECT substr(trim(replace(content, char(10), ' ')), 1, ?)"
        " FROM message AS first WHERE first.conversation = message.conversation AND role = 'user'"
        " ORDER BY place LIMIT 1), ''), '', 0, '', '', '{}', '', '', min(created_ms), max(created_ms)"
        " FROM message WHERE conversation NOT IN (SELECT id FROM conversation) GROUP BY conversation",
        (TITLE_CHARACTERS,),
    )


def _fill_holes(connection: sqlite3.Connection) -> None:
    """Add a substitute for each lost message that has children, because chat templates expect alternating roles."""
    orphans = connection.execute(
        "SELECT conversation, place, parent, role, created_ms FROM message"
        " WHERE parent IS NOT NULL AND parent NOT IN (SELECT id FROM message) ORDER BY place, number"
    ).fetchall()
    for conversation, place, lost, role, created_ms in orphans:
        connection.execute(
            "INSERT INTO message (id, conversation, place, parent, role, content, reasoning, details, state, pinned,"
            " created_ms) VALUES (?1, ?2, ?3, (SELECT id FROM message WHERE conversation = ?2 AND place < ?3"
            " AND role = ?4 ORDER BY place DESC LIMIT 1), ?5, ?6, '', '{}', 'done', 0, ?7) ON CONFLICT DO NOTHING",
            (
                lost, conversation, place, role, "assistant" if role == "user" else "user",
                tr("(This message was lost with a damaged page of the database.)"), created_ms,
            ),
        )  # fmt: skip


def _empty_unreadable_cells(connection: sqlite3.Connection) -> None:
    """Empty the database cells whose JSON cannot be parsed.

    `PRAGMA quick_check` does not detect such cells, so the undamaged copy may contain them as well. With one such cell,
    no conversation could be read, and each start of the program would begin another recovery.
    """
    for table, column, read, empty in _JSON_CELLS:
        rows = connection.execute(f"SELECT rowid, {column} FROM {table} WHERE {column} <> ?", (empty,))
        for number in [number for number, document in rows if not _can_read(read, document)]:
            connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (empty, number))
