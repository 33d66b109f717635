"""What can be read of a damaged database of conversations, copied into an empty one.

Rows are told apart by their shape, since the page that says which tree is of which table may be the damaged one. What
was lost is where it leaves a hole in what is there: a conversation is begun again for messages without one, and a
message that others follow is replaced by one that says so.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import get_args

from engine.chats.message import ROLES, AttachmentKind, MessageState
from engine.chats.raw_pages import FoundRow, Value, read_rows
from engine.chats.rows import details_of, settings_of
from engine.json_file import UNREADABLE
from engine.language import tr

_STATES = get_args(MessageState)
_KINDS = get_args(AttachmentKind)
_TITLE_CHARACTERS = 60
_MESSAGES = "SELECT id, conversation, parent, role, place, created_ms FROM message ORDER BY conversation, place, number"
_Row = dict[str, Value]
_Message = tuple[str, str, str | None, str, int, int]


def salvage(damaged: Path, connection: sqlite3.Connection) -> int:
    """Copy what can be read of `damaged` into an empty database of this version; return how many conversations.

    Raises:
        OSError: the file cannot be read.
        sqlite3.Error: the new one cannot be written.
    """
    columns = {table: _columns(connection, table) for table in _SHAPES}
    connection.execute("BEGIN IMMEDIATE")  # foreign keys are off: rows come in any order
    for found in read_rows(damaged):
        for table, take in _SHAPES.items():
            if (row := take(found, columns[table])) is not None:
                statement = f"INSERT OR IGNORE INTO {table} ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})"
                connection.execute(statement, list(row.values()))
                break
    for table in ("piece", "attachment"):
        connection.execute(f"DELETE FROM {table} WHERE message NOT IN (SELECT id FROM message)")
    _begin_lost_conversations(connection)
    _fill_holes(connection)
    connection.execute("COMMIT")
    return int(connection.execute("SELECT count(*) FROM conversation WHERE deleted_ms IS NULL").fetchone()[0])


def _columns(connection: sqlite3.Connection, table: str) -> tuple[str, ...]:
    return tuple(name for _, name, *_ in connection.execute(f"PRAGMA table_info ({table})"))


# ---------------------------------------------------------------------- which table a row is of, and its sound values


def _conversation(found: FoundRow, columns: tuple[str, ...]) -> _Row | None:
    if len(found.values) != len(columns) or not _is_name(found.values[0]):
        return None
    row = dict(zip(columns, found.values, strict=True))
    texts = {name: _text(row[name]) for name in ("title", "folder", "system", "preset", "template", "draft")}
    optional = {name: row[name] if _is_name(row[name]) else None for name in ("leaf", "forked_from")}
    numbers = {name: _number(row[name]) for name in ("pinned", "created_ms", "updated_ms")}
    deleted_ms = row["deleted_ms"] if isinstance(row["deleted_ms"], int) else None
    settings = _readable(row["settings"], settings_of)
    return row | texts | optional | numbers | {"settings": settings, "deleted_ms": deleted_ms}


def _message(found: FoundRow, columns: tuple[str, ...]) -> _Row | None:
    if len(found.values) != len(columns) or found.values[0] is not None:
        return None
    row = dict(zip(columns, found.values, strict=True))
    if not (_is_name(row["id"]) and _is_name(row["conversation"]) and row["role"] in ROLES):
        return None
    details = _readable(row["details"], details_of)
    if not found.is_whole:
        said = tr("A part of this message was lost with a damaged page of the database.")
        details = json.dumps(json.loads(details) | {"note": said}, ensure_ascii=False)
    return row | {
        "number": found.number,
        "place": _number(row["place"]),
        "parent": row["parent"] if _is_name(row["parent"]) else None,
        "content": _text(row["content"]),
        "reasoning": _text(row["reasoning"]),
        "details": details,
        "state": row["state"] if row["state"] in _STATES else "done" if row["role"] == "user" else "interrupted",
        "writer": row["writer"] if _is_name(row["writer"]) else None,
        "pinned": _number(row["pinned"]),
        "created_ms": _number(row["created_ms"]),
    }


def _piece(found: FoundRow, columns: tuple[str, ...]) -> _Row | None:
    if len(found.values) != len(columns) or found.values[0] is not None or not _is_name(found.values[1]):
        return None
    message, content, reasoning = found.values[1:]
    return dict(zip(columns, (found.number, message, _text(content), _text(reasoning)), strict=True))


_FIRST_ATTACHMENT = 9
"""Columns of an attachment in the first version; later ones are not in rows that were written before."""


def _attachment(found: FoundRow, columns: tuple[str, ...]) -> _Row | None:
    values = found.values
    if not _FIRST_ATTACHMENT <= len(values) <= len(columns) or values[0] is not None or values[3] not in _KINDS:
        return None
    row = dict(zip(columns, values, strict=False))
    if not (_is_name(row["id"]) and _is_name(row["message"])):
        return None
    texts = {name: _text(row[name]) for name in ("name", "mime", "sha256", "text")}
    later = {name: _number(row[name]) for name in (*columns[_FIRST_ATTACHMENT:], "size_bytes") if name in row}
    return row | texts | later | {"number": found.number}


def _file(found: FoundRow, columns: tuple[str, ...]) -> _Row | None:
    if len(found.values) != len(columns):
        return None
    sha256, data = found.values
    is_sound = isinstance(data, bytes) and hashlib.sha256(data).hexdigest() == sha256
    return {"sha256": sha256, "data": data} if is_sound else None


_SHAPES: dict[str, Callable[[FoundRow, tuple[str, ...]], _Row | None]] = {
    "conversation": _conversation,
    "message": _message,
    "piece": _piece,
    "attachment": _attachment,
    "file": _file,
}


def _is_name(value: Value) -> bool:
    return isinstance(value, str) and bool(value)


def _text(value: Value) -> str:
    return value if isinstance(value, str) else ""


def _number(value: Value) -> int:
    return value if isinstance(value, int) else 0


def _readable(document: Value, read: Callable[[str], object]) -> str:
    """Return JSON of a column, an empty object where it cannot be read."""
    try:
        read(text := _text(document))
    except (TypeError, ValueError, AttributeError, *UNREADABLE):
        return "{}"
    return text


# ---------------------------------------------------------------------- what is in the place of what was lost


def _begin_lost_conversations(connection: sqlite3.Connection) -> None:
    """Begin conversations again whose messages are there; called by the first thing that was said."""
    connection.execute(
        "INSERT INTO conversation (id, title, folder, pinned, system, preset, settings, template, draft, created_ms,"
        " updated_ms) SELECT conversation, '', '', 0, '', '', '{}', '', '', min(created_ms), max(created_ms)"
        " FROM message WHERE conversation NOT IN (SELECT id FROM conversation) GROUP BY conversation"
    )
    connection.execute(
        "UPDATE conversation SET title = coalesce((SELECT substr(trim(replace(content, char(10), ' ')), 1, ?)"
        " FROM message WHERE conversation = conversation.id AND role = 'user' ORDER BY place LIMIT 1), '')"
        " WHERE title = '' AND leaf IS NULL",
        (_TITLE_CHARACTERS,),
    )


def _fill_holes(connection: sqlite3.Connection) -> None:
    """Put a message in the place of each that others follow and that is not there any more."""
    for _, messages in groupby(connection.execute(_MESSAGES).fetchall(), key=lambda message: message[1]):
        _fill_holes_of(connection, tuple(messages))


def _fill_holes_of(connection: sqlite3.Connection, messages: Iterable[_Message]) -> None:
    messages = tuple(messages)
    known = {message[0] for message in messages}
    before: list[_Message] = []
    for message in messages:
        _, conversation, parent, role, place, created_ms = message
        if parent is not None and parent not in known:
            lost_role = "assistant" if role == "user" else "user"
            other = next((each[0] for each in reversed(before) if each[3] != lost_role), None)
            connection.execute(
                "INSERT OR IGNORE INTO message (id, conversation, place, parent, role, content, reasoning, details,"
                " state, pinned, created_ms) VALUES (?, ?, ?, ?, ?, ?, '', '{}', 'done', 0, ?)",
                (parent, conversation, place, other, lost_role, _lost_words(), created_ms),
            )
            known.add(parent)
        before.append(message)


def _lost_words() -> str:
    return tr("(What stood here was lost with a damaged page of the database.)")
