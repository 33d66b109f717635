"""Looking for text in titles and messages: an index of trigrams, so that code and scripts without spaces are found."""

from __future__ import annotations

import sqlite3

from engine.chat.conversation import Hit
from engine.chat.schema import text as readable

DEFAULT_HITS = 100
TRIGRAM = 3
MAX_WANTED_CHARACTERS = 1000
"""What comes after these does not count: SQLite takes no pattern of any length."""
BEFORE_CHARACTERS, AFTER_CHARACTERS = 40, 120
"""How much of a message is shown around what was found."""


def search(connection: sqlite3.Connection, text: str, limit: int) -> tuple[Hit, ...]:
    """Return where `text` stands in conversations that are not deleted: titles first, then messages, newest first."""
    wanted = readable(text[:MAX_WANTED_CHARACTERS]).replace("\0", " ").strip(" ")
    if not wanted.strip():
        return ()
    pattern = "%" + wanted.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"
    titles = connection.execute(
        "SELECT id, title, NULL, title, updated_ms FROM conversation"
        " WHERE deleted_ms IS NULL AND title LIKE ? ESCAPE '\\' ORDER BY updated_ms DESC LIMIT ?",
        (pattern, limit),
    ).fetchall()
    if len(wanted) < TRIGRAM:
        matches, value = "message.state <> 'writing' AND message.content LIKE ? ESCAPE '\\'", pattern
    else:
        matches = "message.number IN (SELECT rowid FROM message_text WHERE message_text MATCH ?)"
        value = '"' + wanted.replace('"', '""') + '"'
    messages = connection.execute(
        "SELECT conversation.id, conversation.title, message.id, message.content, message.created_ms"
        # in this order: newest messages first, until there are enough
        " FROM message CROSS JOIN conversation ON conversation.id = message.conversation"
        f" WHERE conversation.deleted_ms IS NULL AND {matches} ORDER BY message.number DESC LIMIT ?",
        (value, limit),
    )
    return tuple(
        _hit(conversation, title, message, content, created_ms, wanted)
        for conversation, title, message, content, created_ms in [*titles, *messages][:limit]
    )


def _hit(conversation: str, title: str, message: str | None, text: str, created_ms: int, wanted: str) -> Hit:
    place = max(0, text.lower().find(wanted.lower()))
    first = max(0, place - BEFORE_CHARACTERS)
    last = min(len(text), place + len(wanted) + AFTER_CHARACTERS)
    lead = "…" if first else ""
    # one character for one: places stay what they are
    shown = "".join(letter if letter.isprintable() else " " for letter in text[first:last])
    begin = place - first + len(lead)
    return Hit(
        conversation=conversation,
        title=title,
        message=message,
        snippet=f"{lead}{shown}{'…' if last < len(text) else ''}",
        begin=begin,
        end=min(begin + len(wanted), len(lead) + len(shown)),
        created_ms=created_ms,
    )
