"""The tables of the conversation database, its upgrade from earlier versions, and the conversion of values to rows.

The version is SQLite's `user_version`. Each script in `SCRIPTS` upgrades to the next version, and is never changed
after its release. While an answer is written, its text is added as rows of the table `piece`, so that a long answer is
not written again with each piece. A message is added to the full-text index when its text is complete.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from engine.chat.conversation import Conversation
from engine.chat.message import Attachment, Cut, Message, Timings
from engine.chat.tool_calls import CallDelta, calls_with
from engine.runtime.protocol.messages import TokenChoice
from engine.runtime.protocol.requests import ToolCall

CONVERSATION_FIELDS = Conversation.__struct_fields__
CONVERSATION_COLUMNS = ", ".join(CONVERSATION_FIELDS)
ATTACHMENT_FIELDS = Attachment.__struct_fields__
ATTACHMENT_COLUMNS = ", ".join(ATTACHMENT_FIELDS)
MESSAGE_COLUMNS = "id, role, content, parent, reasoning, state, pinned, created_ms, details, calls, writer"
DETAILS = (
    *("model", "model_identity", "layout", "settings", "timings", "stop_reason", "note", "choices", "cut"),
    "call_id",
)
"""Fields of a message that no query uses. They are one JSON column, so that a new field needs no upgrade."""

_SELDOM = ("choices", "cut", "call_id")
"""Fields of `DETAILS` that are written only if they are not empty."""
_TYPED: Mapping[str, Any] = {"timings": Timings, "choices": tuple[TokenChoice, ...], "cut": Cut}
"""Types of the fields of `DETAILS` that are not texts or plain JSON."""


def text(value: str) -> str:
    """Return text that can be encoded as UTF-8: a lone surrogate becomes a question mark."""
    return value.encode("utf-8", "replace").decode("utf-8")


def conversation_value(field: str, value: object) -> object:
    """Convert the value of a conversation's field to the value for its column in the database."""
    if field in ("settings", "results"):
        return _document(value)
    return text(value) if isinstance(value, str) else value


def read_conversation(row: Sequence[Any]) -> Conversation:
    """Return the conversation that a database row contains."""
    values = dict(zip(CONVERSATION_FIELDS, row, strict=True))
    documents = {"settings": settings_of(values["settings"]), "results": results_of(values["results"])}
    return msgspec.convert({**values, **documents, "pinned": bool(values["pinned"])}, Conversation)


def message_values(message: Message, conversation: str, writer: str) -> dict[str, object]:
    """Return the values of a message's database row by column name.

    `conversation`: id of the conversation.
    `writer`: id of the process that writes the message; stored only while the message is in state `writing`.
    """
    details = {name: getattr(message, name) for name in DETAILS if name not in _SELDOM or getattr(message, name)}
    return {
        "id": message.id,
        "conversation": conversation,
        "parent": message.parent,
        "role": message.role,
        "content": text(message.content),
        "reasoning": text(message.reasoning),
        "details": _document(details),
        "calls": calls_value(message.calls),
        "state": message.state,
        "writer": writer if message.state == "writing" else None,
        "pinned": message.pinned,
        "created_ms": message.created_ms,
    }


def read_message(
    row: Sequence[Any], pieces: Sequence[tuple[str, str, str]], attachments: Iterable[Attachment], is_alive: bool
) -> Message:
    """Return a message from its database row, with the text that was appended to it.

    `row`: all columns of the table `message`.
    `pieces`: (content, reasoning, calls as JSON) of the message's rows in the table `piece`, in order.
    `is_alive`: whether the process that writes the message still runs. If not, state `writing` becomes `interrupted`.
    """
    ident, role, content, parent, reasoning, state, pinned, created_ms, details, calls, _writer = row
    return Message(
        id=ident,
        role=role,
        # An answer that is being written is stored in pieces, so that each step writes only what is new.
        content=content + "".join(piece[0] for piece in pieces),
        parent=parent,
        reasoning=reasoning + "".join(piece[1] for piece in pieces),
        # Its process has ended without finishing it.
        state="interrupted" if state == "writing" and not is_alive else state,
        pinned=bool(pinned),
        created_ms=created_ms,
        attachments=tuple(attachments),
        calls=joined_calls(calls, (piece[2] for piece in pieces)),
        **details_of(details),
    )


def piece_value(calls: Sequence[CallDelta]) -> str:
    """Return pieces of tool calls as JSON for the column `calls` of the table `piece`."""
    return _document(calls) if calls else ""


def calls_of(document: str) -> tuple[ToolCall, ...]:
    """Return the tool calls in a message's column `calls`."""
    return msgspec.json.decode(document, type=tuple[ToolCall, ...]) if document else ()


def joined_calls(document: str, pieces: Iterable[str]) -> tuple[ToolCall, ...]:
    """Return all tool calls of a message.

    `document`: the message's column `calls`.
    `pieces`: the columns `calls` of the message's rows in the table `piece`, whose calls are added.
    """
    return calls_with(calls_of(document), (delta for piece in pieces for delta in deltas_of(piece)))


def calls_value(calls: Sequence[ToolCall]) -> str:
    """Return the calls of a message as the value of the column `calls`."""
    return _document(calls) if calls else ""


def deltas_of(document: str) -> tuple[CallDelta, ...]:
    """Return the pieces of tool calls in the column `calls` of a row of the table `piece`."""
    return msgspec.json.decode(document, type=tuple[CallDelta, ...]) if document else ()


def read_attachment(row: sqlite3.Row | Sequence[Any]) -> Attachment:
    """Return the attachment that a database row contains."""
    return Attachment(**dict(zip(ATTACHMENT_FIELDS, row, strict=True)))


def _document(value: object) -> str:
    """Return a value as JSON. NaN and infinity, such as the probabilities of a faulty model, become null.

    Uses `json` and not msgspec, which refuses lone surrogates. Imported files may contain them.
    """
    value = msgspec.to_builtins(value)
    try:
        return text(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except ValueError:
        return text(json.dumps(_with_null(json.dumps(value)), ensure_ascii=False))


def _with_null(document: str) -> Any:
    """Parse JSON text that may contain NaN and Infinity; these become None."""
    return json.loads(document, parse_constant=lambda _name: None)


def _object_of(document: str) -> dict[str, Any]:
    """Return the JSON object in a database column.

    Raises:
        TypeError, ValueError: the column has no JSON object.
    """
    try:
        found = msgspec.json.decode(document)
    except msgspec.DecodeError:
        found = _with_null(document)  # earlier versions wrote NaN and Infinity
    if not isinstance(found, dict):
        raise TypeError("a column has no JSON object")
    return found


def settings_of(document: str) -> dict[str, object]:
    """Return a JSON object from a database column, such as the sampling settings of a conversation."""
    return _object_of(document)


def results_of(document: str) -> dict[str, str]:
    """Return the tool results that the user has entered in a conversation, from their JSON column."""
    return msgspec.json.decode(document, type=dict[str, str])


def details_of(document: str) -> dict[str, Any]:
    """Return the message fields that are stored together as JSON in the column `details` (those named in `DETAILS`).

    A field whose value has the wrong type is left out, such as `choices` with a probability that is not a number.
    """
    # A newer program may have stored further fields.
    values = {name: value for name, value in _object_of(document).items() if name in DETAILS}
    for name, kind in _TYPED.items():
        value = values.pop(name, None)
        if value is not None:
            with suppress(msgspec.ValidationError):
                values[name] = msgspec.convert(value, kind)
    return values


_FIRST = (
    """CREATE TABLE conversation (
        id TEXT PRIMARY KEY, title TEXT NOT NULL, folder TEXT NOT NULL, pinned INTEGER NOT NULL, leaf TEXT,
        system TEXT NOT NULL, preset TEXT NOT NULL, settings TEXT NOT NULL, template TEXT NOT NULL,
        draft TEXT NOT NULL, forked_from TEXT, created_ms INTEGER NOT NULL, updated_ms INTEGER NOT NULL,
        deleted_ms INTEGER)""",
    "CREATE INDEX conversation_by_time ON conversation (deleted_ms, pinned, updated_ms)",
    """CREATE TABLE message (
        number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE,
        conversation TEXT NOT NULL REFERENCES conversation (id) ON DELETE CASCADE,
        place INTEGER NOT NULL, parent TEXT, role TEXT NOT NULL, content TEXT NOT NULL,
        reasoning TEXT NOT NULL, details TEXT NOT NULL, state TEXT NOT NULL, writer TEXT,
        pinned INTEGER NOT NULL, created_ms INTEGER NOT NULL)""",
    "CREATE INDEX message_by_conversation ON message (conversation, place)",
    "CREATE INDEX message_being_written ON message (writer) WHERE writer IS NOT NULL",
    """CREATE TABLE piece (
        number INTEGER PRIMARY KEY, message TEXT NOT NULL REFERENCES message (id) ON DELETE CASCADE,
        content TEXT NOT NULL, reasoning TEXT NOT NULL)""",
    "CREATE INDEX piece_by_message ON piece (message, number)",
    """CREATE TABLE attachment (
        number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE,
        message TEXT NOT NULL REFERENCES message (id) ON DELETE CASCADE,
        kind TEXT NOT NULL, name TEXT NOT NULL, mime TEXT NOT NULL, sha256 TEXT NOT NULL,
        size_bytes INTEGER NOT NULL, text TEXT NOT NULL)""",
    "CREATE INDEX attachment_by_message ON attachment (message, number)",
    "CREATE INDEX attachment_by_content ON attachment (sha256)",
    "CREATE TABLE file (sha256 TEXT PRIMARY KEY, data BLOB NOT NULL)",
    # An external-content index: it has no copy of the text. Triggers keep it up to date for messages that are complete.
    """CREATE VIRTUAL TABLE message_text USING fts5 (
        content, content='message', content_rowid='number', tokenize='trigram')""",
    """CREATE TRIGGER message_added AFTER INSERT ON message WHEN new.state <> 'writing' BEGIN
        INSERT INTO message_text (rowid, content) VALUES (new.number, new.content); END""",
    """CREATE TRIGGER message_gone AFTER DELETE ON message WHEN old.state <> 'writing' BEGIN
        INSERT INTO message_text (message_text, rowid, content) VALUES ('delete', old.number, old.content); END""",
    """CREATE TRIGGER message_taken_out AFTER UPDATE OF content, state ON message
        WHEN old.state <> 'writing' AND (new.state = 'writing' OR new.content IS NOT old.content) BEGIN
        INSERT INTO message_text (message_text, rowid, content) VALUES ('delete', old.number, old.content); END""",
    """CREATE TRIGGER message_taken_in AFTER UPDATE OF content, state ON message
        WHEN new.state <> 'writing' AND (old.state = 'writing' OR new.content IS NOT old.content) BEGIN
        INSERT INTO message_text (rowid, content) VALUES (new.number, new.content); END""",
)
_IMAGES = tuple(
    f"ALTER TABLE attachment ADD COLUMN {side}_px INTEGER NOT NULL DEFAULT 0" for side in ("width", "height")
)
_SOUNDS = ("ALTER TABLE attachment ADD COLUMN length_ms INTEGER NOT NULL DEFAULT 0",)
_TOOLS = (
    "ALTER TABLE conversation ADD COLUMN tools TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE conversation ADD COLUMN results TEXT NOT NULL DEFAULT '{}'",
    "ALTER TABLE message ADD COLUMN calls TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE piece ADD COLUMN calls TEXT NOT NULL DEFAULT ''",
    # A search scans the calls, which few messages have.
    "CREATE INDEX message_with_calls ON message (number) WHERE calls <> ''",
)
SCRIPTS: tuple[tuple[str, ...], ...] = (_FIRST, _IMAGES, _SOUNDS, _TOOLS)
"""Statements that upgrade from version 0 (an empty file) to 1, from 1 to 2, and so on."""
VERSION = len(SCRIPTS)


def version_of(connection: sqlite3.Connection) -> int:
    """Return the version of an open database; 0 if it is new."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def upgrade(connection: sqlite3.Connection) -> None:
    """Upgrade a database to the current schema version, in one transaction."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        # The version is read inside the transaction: another process may have upgraded meanwhile.
        for number in range(version_of(connection), VERSION):
            for statement in SCRIPTS[number]:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {number + 1}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise
