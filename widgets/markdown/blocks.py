"""Blocks of Markdown: values that the parser returns and the document shows, with limits on their number.

A block is a line or a table. It consists of spans: pieces of text with one format.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from engine.base.values import replace

LineKind = Literal["text", "heading", "code", "rule"]
Alignment = Literal["left", "center", "right"]


class TextSpan(Struct, frozen=True):
    """Neighbouring characters of a line that have the same format.

    `struck`: whether the text is struck through. `dim`: whether it has the colour of secondary text.
    `formula`: kind of a formula, whose LaTeX source is `text`; empty for other text.
    `token`: kind of a token in highlighted code; empty for other text.
    `link`: address to which the text links; empty if it is no link.
    """

    text: str
    bold: bool = False
    italic: bool = False
    struck: bool = False
    code: bool = False
    dim: bool = False
    link: str = ""
    formula: Literal["", "inline", "display"] = ""
    token: str = ""


class Line(Struct, frozen=True):
    """One paragraph, heading, horizontal rule or line of code.

    `level`: level of a heading; 0 for other lines.
    `marker`: text before a list item: a bullet, a number or a check box.
    `indent`: number of lists around the line. `quote`: number of quotes around it.
    `language`: language of the code, as its fence names it.
    `begins`, `ends`: whether the line is the first or last line of a code block.
    `joins`: whether the line of code continues the previous line, which was too long.
    """

    kind: LineKind
    spans: tuple[TextSpan, ...] = ()
    level: int = 0
    indent: int = 0
    quote: int = 0
    marker: str = ""
    language: str = ""
    begins: bool = False
    ends: bool = False
    joins: bool = False
    centred: bool = False

    @property
    def all_spans(self) -> tuple[TextSpan, ...]:
        return self.spans

    @property
    def text(self) -> str:
        """The text of the line without formats."""
        return "".join(span.text for span in self.spans)


class Table(Struct, frozen=True):
    """A table. The first row is the heading; every row has a cell for each of `alignments`."""

    rows: tuple[tuple[tuple[TextSpan, ...], ...], ...]
    alignments: tuple[Alignment, ...]
    indent: int = 0
    quote: int = 0

    @property
    def all_spans(self) -> tuple[TextSpan, ...]:
        """The spans of all cells, row by row."""
        return tuple(span for row in self.rows for cell in row for span in cell)


Block = Line | Table


MAX_PIECES = 10_000
"""Maximum number of lines and table cells of a message: Qt needs about a second to lay out 10,000."""
MAX_FORMULAS = 200
"""Maximum number of formulas of a message; further formulas stay text.
The cache of formulas must have room for more than these, or formulas would be rendered again and again.
"""


class RemainingLimits(Struct):
    """Limits for the rest of a message, so that Qt lays the message out fast.

    `pieces`: number of lines and table cells that may still follow.
    `formulas`: number of formulas that may still be rendered; further ones are shown as LaTeX source.
    `left_out`: number of characters in the blocks that exceeded the limits so far.
    """

    pieces: int = MAX_PIECES
    formulas: int = MAX_FORMULAS
    left_out: int = 0

    def take(self, blocks: Iterable[Block]) -> list[Block]:
        """Return as many of the first blocks as the limits allow, and subtract them from the limits.

        If a code block is cut off, its last line is marked as its end.
        """
        taken: list[Block] = []
        for block in blocks:
            pieces = len(block.rows) * len(block.alignments) if isinstance(block, Table) else 1
            # All later blocks are left out as well, or text in the middle would be missing.
            if pieces > self.pieces:
                self.pieces = 0
                self.left_out += sum(len(span.text) for span in block.all_spans)
                continue
            self.pieces -= pieces
            taken.append(self._with_formulas(block))
        # The frame of code is drawn from its first to its last line.
        if taken and isinstance(last := taken[-1], Line) and last.kind == "code" and not last.ends:
            taken[-1] = replace(last, ends=True)
        return taken

    def _with_formulas(self, block: Block) -> Block:
        count = sum(bool(span.formula) for span in block.all_spans)
        if count <= self.formulas:
            self.formulas -= count
            return block
        if isinstance(block, Line):
            return replace(block, spans=self._words(block.spans))
        return replace(block, rows=tuple(tuple(self._words(cell) for cell in row) for row in block.rows))

    def _words(self, spans: Iterable[TextSpan]) -> tuple[TextSpan, ...]:
        result: list[TextSpan] = []
        for span in spans:
            if span.formula and not self.formulas:
                result.append(replace(span, formula=""))
                continue
            self.formulas -= bool(span.formula)
            result.append(span)
        return tuple(result)


_HIDDEN = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but tab and line feed
    "\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e"  # soft hyphen, invisible fillers, Arabic letter mark
    "\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"  # widthless space, direction marks, separators, overrides, isolates
    "\ufdd0-\ufdef\ufeff\ufff9-\uffff"  # what Qt's documents keep for frames and objects; marks
    "\ud800-\udfff"  # halves of a pair
    "\U000e0000-\U000e0fff"  # tags: text in characters that are not drawn
    "]"
)


def visible(text: str) -> str:
    r"""Return `text` with invisible characters as escapes, such as "\u200b", and with "\n" as the only line end.

    Invisible characters are control characters, direction marks and widthless spaces.
    """
    return _HIDDEN.sub(_escape, with_line_feeds(text))


def with_line_feeds(text: str) -> str:
    r"""Return `text` with "\n" as the only line end."""
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
