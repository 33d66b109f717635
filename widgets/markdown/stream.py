"""Parses streamed Markdown: finished blocks are parsed once, and only the end is parsed again.

The blocks do not depend on the division of the text into pieces. A block is finished if an empty line and a complete
line of another block follow. Later text cannot change it, since reference definitions are disabled and formulas contain
no empty lines.
"""

from __future__ import annotations

from msgspec import Struct

from engine.base.language import tr
from engine.base.values import replace
from widgets.markdown.blocks import Block, Line, RemainingLimits, TextSpan, visible, with_line_feeds
from widgets.markdown.flow import Flow
from widgets.markdown.highlight import TimeUsed
from widgets.markdown.parse import parse_tokens, plain_blocks

MAX_SHOWN_CHARACTERS = 200_000
"""Maximum number of characters that are drawn; the rest is stored and copied, but not drawn."""


class Parsed(Struct, frozen=True):
    """The result of one call of `MarkdownStream.parse`.

    `finished`: blocks that became final since the last call.
    `open_end`: the last blocks, which may still change. They replace `open_end` of the last call.
    """

    finished: tuple[Block, ...]
    open_end: tuple[Block, ...]


class MarkdownStream:
    """Parses a Markdown text that is appended in pieces. Only one thread may use it at a time."""

    def __init__(self) -> None:
        self._tail = ""
        """The text of the blocks that are not finished, with hidden characters escaped."""
        self._held = ""
        """A carriage return at the end of the last piece, which may be the first half of a line end."""
        self._taken = 0
        self._left_out = 0
        self._highlighting = TimeUsed()
        self._limits = RemainingLimits()
        """Limits for lines, table cells and formulas after the finished blocks."""

    def append(self, text: str) -> None:
        """Append a piece of the text."""
        text = self._held + text
        # \r\n may be cut between two pieces.
        self._held = "\r" if text.endswith("\r") else ""
        text = text.removesuffix(self._held) if self._held else text
        room = MAX_SHOWN_CHARACTERS - self._taken
        # Counted before escaping, which makes one hidden character into several.
        self._taken += min(len(text), room)
        self._left_out += max(len(text) - room, 0)
        self._tail += visible(text[:room])

    def parse(self) -> Parsed:
        """Parse the appended text, and return the blocks that are new or may have changed since the last call."""
        tokens = parse_tokens(self._tail)
        if tokens is None:
            return Parsed((), self._end(plain_blocks(self._tail)))
        lines = self._tail.split("\n")
        cut_token = cut_line = 0
        # Finds the last top-level block that begins after an empty line and is followed by more text.
        for number, token in enumerate(tokens):
            if token.level or token.nesting < 0 or token.map is None:
                continue
            first = token.map[0]
            if 0 < first < len(lines) - 1 and not lines[first - 1].strip():
                cut_token, cut_line = number, first
        finished = self._limits.take(Flow(tokens[:cut_token], self._highlighting).blocks())
        self._tail = "\n".join(lines[cut_line:])
        # A copy, as in `_end`: the time for a part that is parsed again and again would soon use up the limit.
        return Parsed(tuple(finished), self._end(Flow(tokens[cut_token:], replace(self._highlighting)).blocks()))

    def _end(self, blocks: list[Block]) -> tuple[Block, ...]:
        # A copy: what the open end takes of the limits is free again when it is parsed anew.
        limits = replace(self._limits)
        return (*limits.take(blocks), *_rest(self._left_out + limits.left_out))


def _rest(left_out: int) -> tuple[Block, ...]:
    if not left_out:
        return ()
    words = tr(
        "… {left_out:,} more characters are not shown. “Copy” copies the whole message.",
        left_out=left_out,
    )
    return (Line("rule"), Line("text", (TextSpan(words, dim=True),)))


def parse_whole(text: str) -> tuple[Block, ...]:
    """Return the blocks of a complete text."""
    stream = MarkdownStream()
    stream.append(text)
    parsed = stream.parse()
    return (*parsed.finished, *parsed.open_end)


def code_sources(text: str) -> list[str]:
    """Return the source of each code block of a complete text, in order. Nothing is cut off, and nothing is escaped."""
    text = with_line_feeds(text)
    lines = text.split("\n")
    sources = []
    # Parsed with escaped characters, as the blocks are: so both have the same code blocks.
    for token in parse_tokens(visible(text)) or ():
        if token.type in ("fence", "code_block") and token.map is not None:
            first = token.map[0] + (token.type == "fence")
            shown = token.content.removesuffix("\n").split("\n")
            sources.append("\n".join(map(_unescaped, shown, lines[first : first + len(shown)])))
    return sources


def _unescaped(shown: str, line: str) -> str:
    """Return a line of a code block as it was written, without escapes.

    A code block shows invisible characters as escapes (`visible`). Return the end of `line` that becomes `shown` when
    it is escaped. If there is none, return `shown`. This happens if a tab belongs partly to the indent.

    `shown`: the line as the code block shows it.
    `line`: the same line in the Markdown text, where it may begin with the indent of lists and quotes.
    """
    if visible(line) == line:
        return shown
    start, length = len(line), 0
    while start and length < len(shown):
        start -= 1
        length += len(visible(line[start]))
    return line[start:] if visible(line[start:]) == shown else shown
