"""Values to rows of the tables and back."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from engine.chats.conversation import Conversation
from engine.chats.message import Attachment, Cut, Message, Timings
from engine.protocol.messages import TokenChoice

CONVERSATION_FIELDS = Conversation.__struct_fields__
CONVERSATION_COLUMNS = ", ".join(CONVERSATION_FIELDS)
ATTACHMENT_FIELDS = Attachment.__struct_fields__
ATTACHMENT_COLUMNS = ", ".join(ATTACHMENT_FIELDS)
MESSAGE_COLUMNS = "id, role, content, parent, reasoning, state, pinned, created_ms, details, writer"
DETAILS = ("model", "model_identity", "layout", "settings", "timings", "stop_reason", "note", "choices", "cut")
"""What is shown with a message and never looked for: one column, so that more of it needs no other tables."""

_SELDOM = ("choices", "cut")
"""Not written where a message has none."""


def text(value: str) -> str:
    """Return text as UTF-8 can have it: half a surrogate pair becomes a question mark."""
    return value.encode("utf-8", "replace").decode("utf-8")


def conversation_value(field: str, value: object) -> object:
    """Return the value of one field as its column has it."""
    if field == "settings":
        return _document(value)
    return text(value) if isinstance(value, str) else value


def read_conversation(row: Sequence[Any]) -> Conversation:
    values = dict(zip(CONVERSATION_FIELDS, row, strict=True))
    return Conversation(**{**values, "pinned": bool(values["pinned"]), "settings": settings_of(values["settings"])})


def message_values(message: Message, conversation: str, writer: str) -> dict[str, object]:
    """Return the columns of a message; `writer`: who writes it, where it is being written."""
    details = {name: getattr(message, name) for name in DETAILS if name not in _SELDOM or getattr(message, name)}
    return {
        "id": message.id,
        "conversation": conversation,
        "parent": message.parent,
        "role": message.role,
        "content": text(message.content),
        "reasoning": text(message.reasoning),
        "details": _document(details),
        "state": message.state,
        "writer": writer if message.state == "writing" else None,
        "pinned": message.pinned,
        "created_ms": message.created_ms,
    }


def read_message(
    row: Sequence[Any], pieces: Sequence[tuple[str, str]], attachments: Iterable[Attachment], is_alive: bool
) -> Message:
    """Return a message with the pieces that are not part of its row yet; `is_alive`: somebody still writes it."""
    ident, role, content, parent, reasoning, state, pinned, created_ms, details, _writer = row
    return Message(
        id=ident,
        role=role,
        content=content + "".join(piece[0] for piece in pieces),
        parent=parent,
        reasoning=reasoning + "".join(piece[1] for piece in pieces),
        state="interrupted" if state == "writing" and not is_alive else state,
        pinned=bool(pinned),
        created_ms=created_ms,
        attachments=tuple(attachments),
        **details_of(details),
    )


def read_attachment(row: sqlite3.Row | Sequence[Any]) -> Attachment:
    return Attachment(**dict(zip(ATTACHMENT_FIELDS, row, strict=True)))


def _document(value: object) -> str:
    """Return JSON; unlike msgspec's own it may be of text that UTF-8 cannot have, which comes from files of others."""
    return text(json.dumps(msgspec.to_builtins(value), ensure_ascii=False))


def settings_of(document: str) -> dict[str, object]:
    """Return what a chat sets itself, from its column."""
    found: Mapping[str, object] = msgspec.json.decode(document)
    return dict(found)


def details_of(document: str) -> dict[str, Any]:
    """Return the fields of a message that are in one column."""
    values = {name: value for name, value in msgspec.json.decode(document).items() if name in DETAILS}
    if values.get("timings") is not None:
        values["timings"] = msgspec.convert(values["timings"], Timings)
    if "choices" in values:
        values["choices"] = msgspec.convert(values["choices"], tuple[TokenChoice, ...])
    if "cut" in values:
        values["cut"] = msgspec.convert(values["cut"], Cut)
    return values
