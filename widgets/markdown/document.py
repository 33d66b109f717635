"""A message as a `QTextDocument`. An update rewrites it only from the first changed block on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from PySide6.QtCore import QObject, Qt, QUrl
from PySide6.QtGui import QTextBlockFormat, QTextCharFormat, QTextCursor, QTextDocument, QTextTable

from widgets.markdown.blocks import Block, Line, Table, TextSpan
from widgets.markdown.formulas import FORMULA_TYPE, SOURCE, FormulaKey, FormulaObject, Formulas
from widgets.markdown.styles import EDGE, Styles

OBJECT = "\N{OBJECT REPLACEMENT CHARACTER}"
LINE_BREAK = "\N{LINE SEPARATOR}"
EDGE_TEXT = "\N{NO-BREAK SPACE}"
"""Text of the empty lines above and below code in its frame: a no-break space. Qt gives a line without text no height
if it follows a table.
"""
DOCUMENT_MARGIN = 2.0


class CodeRange(Struct, frozen=True):
    """The position of a code block in the document.

    `first`, `last`: numbers, counted from 0, of the empty text blocks above and below the code. The code's frame is
    drawn around both.
    `lines`: the lines of the code.
    """

    first: int
    last: int
    language: str
    lines: tuple[Line, ...]

    @property
    def text(self) -> str:
        """The code as shown: hidden characters are escaped, and lines beyond the limits of a message are missing.

        Lines that were cut because of their length are joined.
        """
        parts = [("" if line.joins or number == 0 else "\n") + line.text for number, line in enumerate(self.lines)]
        return "".join(parts)


class QuoteLine(Struct, frozen=True):
    """The position of a quoted line in the document.

    `block`: number of the line's text block, counted from 0.
    `indent`: number of lists around the line.
    `levels`: number of quotes around the line.
    """

    block: int
    indent: int
    levels: int


class Decorations(Struct, frozen=True):
    """Places of code blocks, quotes and horizontal rules, whose frames and lines `MarkdownView` paints.

    `rules`: numbers of the text blocks that are horizontal rules.
    """

    code: tuple[CodeRange, ...] = ()
    quotes: tuple[QuoteLine, ...] = ()
    rules: tuple[int, ...] = ()

    def __add__(self, other: Decorations) -> Decorations:
        return Decorations(self.code + other.code, self.quotes + other.quotes, self.rules + other.rules)


class MarkdownDocument(QTextDocument):
    """A `QTextDocument` that shows Markdown blocks as selectable text. It loads no resources."""

    def __init__(self, styles: Styles, formulas: Formulas, parent: QObject | None = None) -> None:
        super().__init__(parent)
        # Undo would keep a copy of every streamed piece.
        self.setUndoRedoEnabled(False)
        self.setDocumentMargin(DOCUMENT_MARGIN)
        self._styles = styles
        self._formula_object = FormulaObject(formulas, self)
        # Qt calls the handler for the size and the drawing of each formula.
        self.documentLayout().registerHandler(FORMULA_TYPE, self._formula_object)
        formulas.drawn.connect(self._lay_out_formula)
        self._finished: list[Block] = []
        self._open_end: tuple[Block, ...] = ()
        self._finished_decorations = Decorations()
        self._starts: list[int] = []
        """Character position at which each block begins, in the order of the blocks."""

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks of the document: the final ones, then those that may still change."""
        return (*self._finished, *self._open_end)

    def loadResource(self, _kind: int, _name: QUrl | str) -> Any:
        """Return nothing: blocks have no resources, and a message must not make Qt open files."""
        return None

    def restyle(self, styles: Styles) -> None:
        """Write the whole document again with the formats of `styles`."""
        self._styles = styles
        blocks, count = self.blocks, len(self._finished)
        self._write(0, blocks)
        self._finished, self._open_end = list(blocks[:count]), blocks[count:]

    def reset(self) -> None:
        """Remove all blocks."""
        self.clear()
        self._finished, self._open_end, self._starts = [], (), []
        self._finished_decorations = Decorations()

    def update_blocks(self, finished: Sequence[Block], open_end: Sequence[Block]) -> None:
        """Append `finished` blocks, which are final, and replace the blocks after them by `open_end`.

        The blocks of `open_end` may change again in the next call.
        """
        before, kept = self._open_end, len(self._finished)
        wanted = (*finished, *open_end)
        # Most updates add to the last block; blocks before it are not written again.
        same = 0
        while same < min(len(before), len(wanted)) and before[same] == wanted[same]:
            same += 1
        if same < max(len(before), len(wanted)):
            self._write(kept + same, wanted[same:])
        if finished:
            self._finished_decorations += self._decorations(kept, finished)
            self._finished += finished
        self._open_end = tuple(open_end)

    @property
    def decorations(self) -> Decorations:
        """Places of code blocks, quotes and horizontal rules in the document."""
        return self._finished_decorations + self._decorations(len(self._finished), self._open_end)

    def _decorations(self, index: int, blocks: Sequence[Block]) -> Decorations:
        code: list[CodeRange] = []
        quotes: list[QuoteLine] = []
        rules: list[int] = []
        lines: list[Line] = []
        for block, start in zip(blocks, self._starts[index:], strict=False):
            if block.quote:
                quotes.append(QuoteLine(self.findBlock(start).blockNumber(), block.indent, block.quote))
            if isinstance(block, Table):
                continue
            if block.kind == "rule":
                rules.append(self.findBlock(start).blockNumber())
            if block.kind == "code":
                lines = [block] if block.begins else [*lines, block]
                if block.ends:
                    last = self.findBlock(start).blockNumber() + 1 + (len(lines) == 1)
                    code.append(CodeRange(last - len(lines) - 1, last, block.language, tuple(lines)))
        return Decorations(tuple(code), tuple(quotes), tuple(rules))

    def text_between(self, first: int, last: int) -> str:
        """Return the text between two character positions, with formulas as LaTeX source.

        The character at `first` is included, that at `last` is not.
        """
        parts: list[str] = []
        block = self.findBlock(first)
        while block.isValid() and block.position() <= last:
            words: list[str] = []
            fragments = block.begin()
            while not fragments.atEnd():
                fragment = fragments.fragment()
                begin, end = max(first, fragment.position()), min(last, fragment.position() + fragment.length())
                if begin < end:
                    text = fragment.text()[begin - fragment.position() : end - fragment.position()]
                    # A formula is one object character in the document.
                    source = fragment.charFormat().property(SOURCE)
                    words.append(text if source is None else str(source))
                fragments += 1
            if not block.blockFormat().hasProperty(EDGE):
                parts.append("".join(words).replace(LINE_BREAK, "\n"))
            block = block.next()
        return "\n".join(parts)

    def _is_table(self, index: int) -> bool:
        kept = len(self._finished)
        return isinstance(self._finished[index] if index < kept else self._open_end[index - kept], Table)

    def _write(self, index: int, blocks: Sequence[Block]) -> None:
        """Replace the blocks of the document from `index` to the end by `blocks`."""
        cursor = QTextCursor(self)
        # Layout happens once, at the end of the edit block.
        cursor.beginEditBlock()
        if index < len(self._starts):
            cursor.setPosition(self._starts[index])
            cursor.movePosition(QTextCursor.MoveOperation.End, QTextCursor.MoveMode.KeepAnchor)
            cursor.removeSelectedText()
            if not blocks and index and not self._is_table(index - 1):
                cursor.deletePreviousChar()
            # The removed blocks leave an empty one, which the next block uses.
            fresh = True
        else:
            cursor.movePosition(QTextCursor.MoveOperation.End)
            # Qt adds an empty block after a table.
            fresh = index == 0 or self._is_table(index - 1)
        del self._starts[index:]
        for block in blocks:
            fresh = self._write_block(cursor, block, fresh=fresh)
        cursor.endEditBlock()

    def _write_block(self, cursor: QTextCursor, block: Block, *, fresh: bool) -> bool:
        """Write one block at the end of the document; return whether Qt leaves an empty text block after it.

        `fresh`: whether the document ends with an empty text block, which this block can use.
        """
        # Qt puts a text block before each table.
        if isinstance(block, Table):
            first = _EMPTY_LINE
        elif block.begins:
            first = self._styles.code_edge(block, is_head=True)
        else:
            first = self._styles.block(block)
        if fresh:
            cursor.setBlockFormat(first)
            cursor.setBlockCharFormat(_PLAIN)
        else:
            cursor.insertBlock(first, _PLAIN)
        self._starts.append(cursor.position())
        if isinstance(block, Table):
            self._write_table(cursor, block)
            cursor.movePosition(QTextCursor.MoveOperation.End)
            return True
        if block.begins:
            cursor.insertText(EDGE_TEXT, self._styles.character(_EDGE_SPAN))
            cursor.insertBlock(self._styles.block(block), _PLAIN)
        level = -1 if block.kind == "code" else block.level
        if block.marker:
            cursor.insertText(
                f"{block.marker}\t", self._styles.character(TextSpan("", dim=block.marker[0] not in "☐☑"))
            )
        self._write_spans(cursor, block.spans, level)
        if not block.spans and block.kind != "rule":
            cursor.setBlockCharFormat(self._styles.character(TextSpan("", code=block.kind == "code"), level))
        if block.ends:
            cursor.insertBlock(self._styles.code_edge(block, is_head=False), _PLAIN)
            cursor.insertText(EDGE_TEXT, self._styles.character(_EDGE_SPAN))
        return False

    def _write_spans(
        self, cursor: QTextCursor, spans: Sequence[TextSpan], level: int = 0, *, bold: bool = False
    ) -> None:
        for span in spans:
            if span.formula:
                cursor.insertText(OBJECT, self._styles.formula(span))
            else:
                shown = TextSpan("", bold=True, link=span.link) if bold and not span.code else span
                cursor.insertText(span.text.replace("\n", LINE_BREAK), self._styles.character(shown, level))

    def _write_table(self, cursor: QTextCursor, table: Table) -> None:
        made: QTextTable = cursor.insertTable(len(table.rows), len(table.alignments), self._styles.table(table))
        for row, cells in enumerate(table.rows):
            for column, (spans, alignment) in enumerate(zip(cells, table.alignments, strict=True)):
                inside = made.cellAt(row, column).firstCursorPosition()
                inside.setBlockFormat(_CELL_FORMATS[alignment])
                self._write_spans(inside, spans, bold=row == 0)

    def _lay_out_formula(self, key: FormulaKey) -> None:
        """Lay out again the blocks with this formula, because its image has now replaced its source text."""
        for number, block in enumerate(self.blocks):
            if any(span.formula and span.text == key.source for span in block.all_spans):
                start = self._starts[number]
                end = self._starts[number + 1] if number + 1 < len(self._starts) else self.characterCount() - 1
                self.markContentsDirty(start, end - start)


def _cell_format(alignment: str) -> QTextBlockFormat:
    result = QTextBlockFormat()
    flags = {"left": Qt.AlignmentFlag.AlignLeft, "right": Qt.AlignmentFlag.AlignRight}
    result.setAlignment(flags.get(alignment, Qt.AlignmentFlag.AlignHCenter))
    return result


def _empty_line() -> QTextBlockFormat:
    """Return the format of the text block that Qt needs before a table. It is as low as possible."""
    result = QTextBlockFormat()
    result.setLineHeight(1, QTextBlockFormat.LineHeightTypes.FixedHeight.value)
    return result


_EDGE_SPAN = TextSpan("")
_PLAIN = QTextCharFormat()
_EMPTY_LINE = _empty_line()
_CELL_FORMATS = {name: _cell_format(name) for name in ("left", "center", "right")}
