"""Search in the messages of one conversation: in the text as it is drawn, not in its Markdown source.

Thoughts and tool calls are not searched.

Messages are searched from the first to the last in batches, in the thread that parses Markdown. A message is parsed
only if its Markdown source shows that it may contain the text.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from msgspec import Struct
from PySide6.QtCore import QObject, Signal

from widgets.chat.shown import ShownMessage
from widgets.markdown.matches import drawn_lines, match_pattern
from widgets.markdown.stream import parse_whole
from widgets.markdown.typesetter import Typesetter

BATCH_S = 0.02
"""Duration of a batch in seconds. It is short, because the thread also parses the answer that is being generated."""
_MARKUP = re.compile(r"[*_`~\\\[\]]")
"""Markdown characters that can stand inside a word. A search ignores them: "in**side**" is drawn as "inside"."""
_WORD = re.compile(r"[^\W_]+")


class Match(Struct, frozen=True):
    """A match of the search in a message.

    message: id of the message.
    index: index of the message in the conversation.
    number: number of the match in the message, counted from 0.
    """

    message: str
    index: int
    number: int


class _Batch(Struct, frozen=True):
    """The result of one batch of the search.

    `ticket`: number of the search to which the batch belongs; batches of an earlier search are dropped.
    `begin`: index of the first message of the next batch.
    """

    ticket: int
    begin: int
    matches: tuple[Match, ...]


class MessageSearch(QObject):
    """Search in one conversation for one text at a time. A new search replaces the previous one."""

    progressed = Signal()
    """Emitted after each batch; `matches` and `is_done` have new values."""

    def __init__(self, typesetter: Typesetter, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._typesetter = typesetter
        self._messages: tuple[ShownMessage, ...] = ()
        self._ticket = 0
        self._counts: dict[tuple[str, str], int] = {}
        """Number of matches of the current query in each message that was searched, by the message's (id, text)."""
        self.query = ""
        self.matches: list[Match] = []
        self.is_done = True

    def start(self, query: str, messages: Sequence[ShownMessage]) -> None:
        """Start a search for `query` in `messages`, ignoring case. An empty query has no matches."""
        if query != self.query:
            self._counts.clear()
        self.query, self._messages = query, tuple(messages)
        # Batches of the search before are dropped by their ticket.
        self._ticket += 1
        self.matches = []
        self.is_done = not query.strip()
        if self.is_done:
            self.progressed.emit()
        else:
            self._search_from(0)

    def _search_from(self, begin: int) -> None:
        ticket, query, messages, counts = self._ticket, self.query, self._messages, self._counts

        def work() -> _Batch:
            return _search(ticket, query, messages, begin, counts)

        self._typesetter.parse(work, self._on_batch)

    def _on_batch(self, batch: _Batch) -> None:
        if batch.ticket != self._ticket:
            return  # another search has begun
        self.matches += batch.matches
        self.is_done = batch.begin >= len(self._messages)
        self.progressed.emit()
        if not self.is_done and batch.ticket == self._ticket:
            self._search_from(batch.begin)


def _search(
    ticket: int, query: str, messages: Sequence[ShownMessage], begin: int, counts: dict[tuple[str, str], int]
) -> _Batch:
    """Search `messages` from the index `begin` for `BATCH_S` seconds, but at least one message, and return the matches.

    `ticket`: number of the search, copied to the result.
    `counts`: number of matches in each message searched before, by the message's (id, text). New numbers are added.
    """
    end_s = time.monotonic() + BATCH_S
    pattern = match_pattern(query)
    # Markup is removed from both sides, since "in**side**" is drawn as "inside".
    longest = max(_WORD.findall(_MARKUP.sub("", query)), key=len, default="")
    word = re.compile(re.escape(longest), re.IGNORECASE)
    found: list[Match] = []
    index = begin
    while index < len(messages):
        message = messages[index]
        key = (message.id, message.text)
        # Unchanged messages are not parsed again when the conversation goes on.
        if key not in counts:
            counts[key] = _count(pattern, word, message.text)
        found += (Match(message.id, index, number) for number in range(counts[key]))
        index += 1
        if time.monotonic() >= end_s:
            break
    return _Batch(ticket, index, tuple(found))


def _count(pattern: re.Pattern[str], word: re.Pattern[str], text: str) -> int:
    # An entity such as "&auml;" is drawn as a letter that the source does not have.
    if "&" not in text and word.search(_MARKUP.sub("", text)) is None:
        return 0
    return sum(1 for line in drawn_lines(parse_whole(text)) for _ in pattern.finditer(line))
