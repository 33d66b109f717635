"""Full-text search in titles and messages. The trigram index also finds parts of words, as in code, and text in
languages that are written without spaces.
"""

from __future__ import annotations

import re
import sqlite3
from itertools import islice

from engine.base.texts import replace_controls
from engine.chat.conversation import Hit
from engine.chat.schema import calls_of
from engine.chat.schema import text as readable

DEFAULT_HITS = 100
TRIGRAM = 3
MAX_WANTED_CHARACTERS = 1000
"""Largest number of characters of a search text; further ones are ignored, because SQLite limits the length of LIKE
patterns.
"""
BEFORE_CHARACTERS, AFTER_CHARACTERS = 40, 120
"""Largest numbers of characters that a snippet has before the match, and after it."""


def search(connection: sqlite3.Connection, text: str, limit: int) -> tuple[Hit, ...]:
    """Return at most `limit` matches of `text` in conversations that are not deleted.

    Matches in titles come first, then matches in messages; each newest first.
    """
    wanted = readable(text[:MAX_WANTED_CHARACTERS]).replace("\0", " ").strip(" ")
    if not wanted.strip():
        return ()
    # %, _ and the escape character itself have a meaning in LIKE patterns.
    pattern = "%" + wanted.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"
    match = re.compile(re.escape(wanted), re.IGNORECASE)
    # Titles are few. LIKE ignores the case of ASCII letters only.
    rows = connection.execute(
        "SELECT id, title, NULL, title, updated_ms, '' FROM conversation"
        " WHERE deleted_ms IS NULL ORDER BY updated_ms DESC"
    )
    titles = islice((row for row in rows if match.search(row[1])), limit)
    # A text shorter than three characters has no trigram; all messages are scanned for it.
    if len(wanted) < TRIGRAM:
        matches, value = "message.state <> 'writing' AND message.content LIKE ? ESCAPE '\\'", pattern
    else:
        matches = "message.number IN (SELECT rowid FROM message_text WHERE message_text MATCH ?)"
        # In quotation marks FTS5 takes the text as one phrase, and not as query syntax.
        value = '"' + wanted.replace('"', '""') + '"'
    # Calls are few, and in no index.
    called = (
        "message.number IN (SELECT message.number FROM message, json_each(message.calls) AS call"
        " WHERE message.calls <> '' AND json_valid(message.calls)"
        " AND call.value ->> '$.name' || ' ' || (call.value ->> '$.arguments') LIKE ? ESCAPE '\\')"
    )
    messages = connection.execute(
        "SELECT conversation.id, conversation.title, message.id, message.content, message.created_ms, message.calls"
        # CROSS JOIN keeps this order of loops: newest messages first, and SQLite stops at the limit.
        " FROM message CROSS JOIN conversation ON conversation.id = message.conversation"
        f" WHERE conversation.deleted_ms IS NULL AND ({matches} OR {called}) ORDER BY message.number DESC LIMIT ?",
        (value, pattern, limit),
    )
    return tuple(
        _hit(conversation, title, message, _text_with(match, content, calls), created_ms, match)
        for conversation, title, message, content, created_ms, calls in [*titles, *messages][:limit]
    )


def _text_with(match: re.Pattern[str], content: str, calls: str) -> str:
    """Return the part of a message that contains the match: its content, or else its tool calls."""
    if not calls or match.search(content):
        return content
    return " ".join(f"{call.name} {call.arguments}" for call in calls_of(calls))


def _hit(conversation: str, title: str, message: str | None, text: str, created_ms: int, match: re.Pattern[str]) -> Hit:
    # SQLite ignores case by other rules than Python. If the match is not found, the snippet is the beginning.
    found = match.search(text)
    begin, end = found.span() if found else (0, 0)
    first = max(0, begin - BEFORE_CHARACTERS)
    last = min(len(text), end + AFTER_CHARACTERS)
    lead = "…" if first else ""
    # Each character is replaced by one character, so that `begin` and `end` stay right.
    shown = replace_controls(text[first:last], " ").replace("\n", " ").replace("\t", " ")
    return Hit(
        conversation=conversation,
        title=title,
        message=message,
        snippet=f"{lead}{shown}{'…' if last < len(text) else ''}",
        begin=begin - first + len(lead),
        end=end - first + len(lead),
        created_ms=created_ms,
    )
