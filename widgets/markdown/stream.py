"""Markdown that is still being written: finished blocks are parsed once, only the end is parsed again.

Whatever the pieces in which a text comes, the blocks in the end are the same. A block is finished where an empty line
and then a whole line follow that begin another one: nothing that comes later can change it any more, since definitions
of links far below are not looked at and formulas hold no empty lines.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.base.language import tr
from widgets.markdown.blocks import Block, Line, Room, Run, visible
from widgets.markdown.flow import Flow
from widgets.markdown.parse import parse_tokens, plain_blocks

MAX_SHOWN_CHARACTERS = 200_000
"""What is beyond is kept, copied and searched, but not drawn."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """What is new: blocks that are `finished` since the last time, and the open end, which replaces the last one."""

    finished: tuple[Block, ...]
    open_end: tuple[Block, ...]


class MarkdownStream:
    """Takes a text in pieces. `parse` may run in any one thread at a time."""

    def __init__(self) -> None:
        self._tail = ""
        """What is not finished, made visible."""
        self._held = ""
        """A carriage return that may be half of a line end."""
        self._taken = 0
        self._left_out = 0
        self._room = Room()
        """What the finished blocks have left."""

    def append(self, text: str) -> None:
        """Take more."""
        text = self._held + text
        self._held = "\r" if text.endswith("\r") else ""
        text = text.removesuffix(self._held) if self._held else text
        room = MAX_SHOWN_CHARACTERS - self._taken
        self._taken += min(len(text), room)
        self._left_out += max(len(text) - room, 0)
        self._tail += visible(text[:room])

    def parse(self) -> Parsed:
        """Return what became of the text since the last call."""
        tokens = parse_tokens(self._tail)
        if tokens is None:
            return Parsed((), self._end(plain_blocks(self._tail)))
        lines = self._tail.split("\n")
        cut_token = cut_line = 0
        for number, token in enumerate(tokens):
            if token.level or token.nesting < 0 or token.map is None:
                continue
            first = token.map[0]
            if 0 < first < len(lines) - 1 and not lines[first - 1].strip():
                cut_token, cut_line = number, first
        finished = self._room.take(Flow(tokens[:cut_token]).blocks())
        self._tail = "\n".join(lines[cut_line:])
        return Parsed(tuple(finished), self._end(Flow(tokens[cut_token:]).blocks()))

    def _end(self, blocks: list[Block]) -> tuple[Block, ...]:
        room = replace(self._room)
        return (*room.take(blocks), *_rest(self._left_out + room.left_out))


def _rest(left_out: int) -> tuple[Block, ...]:
    if not left_out:
        return ()
    words = tr(
        "… and {left_out:,} characters more, which are not drawn. “Copy as Markdown” has all of them.",
        left_out=left_out,
    )
    return (Line("rule"), Line("text", (Run(words, dim=True),)))


def parse_whole(text: str) -> tuple[Block, ...]:
    """Return the blocks of a text that is complete."""
    stream = MarkdownStream()
    stream.append(text)
    parsed = stream.parse()
    return (*parsed.finished, *parsed.open_end)
