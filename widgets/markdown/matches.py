"""Searches drawn Markdown for a text, either in the parsed blocks or in the `QTextDocument` made from them.

Both searches give the same matches in the same order, so the third match in the blocks is also the third in the
document.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from PySide6.QtGui import QTextCursor, QTextDocument

from widgets.markdown.blocks import Block, Line, TextSpan
from widgets.markdown.document import LINE_BREAK, OBJECT

NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"
_SPACES = str.maketrans({"\n": " ", LINE_BREAK: " ", NO_BREAK_SPACE: " ", "\t": " "})


def match_pattern(query: str) -> re.Pattern[str]:
    """Return the pattern for `query`: case is ignored, and a line break inside a paragraph counts as a space."""
    return re.compile(re.escape(query.translate(_SPACES)), re.IGNORECASE)


def drawn_lines(blocks: Iterable[Block]) -> Iterator[str]:
    """Yield the text of each paragraph, line of code and table cell, as `MarkdownDocument` writes them."""
    for block in blocks:
        if isinstance(block, Line):
            marker = f"{block.marker}\t" if block.marker else ""
            yield _line(marker + _text(block.spans))
        else:
            yield from (_line(_text(cell)) for row in block.rows for cell in row)


def find_matches(document: QTextDocument, pattern: re.Pattern[str]) -> Iterator[QTextCursor]:
    """Yield a cursor for each match of `pattern` in the document. The cursor selects the match."""
    # Not `QTextDocument.find`: counting in parsed blocks and highlighting must follow the same rules.
    block = document.begin()
    while block.isValid():
        text = _line(block.text())
        for match in pattern.finditer(text):
            cursor = QTextCursor(block)
            # A character outside the basic plane, such as an emoji, is two UTF-16 units.
            cursor.setPosition(block.position() + utf16_length(text[: match.start()]))
            cursor.setPosition(block.position() + utf16_length(text[: match.end()]), QTextCursor.MoveMode.KeepAnchor)
            yield cursor
        block = block.next()


def _text(spans: Iterable[TextSpan]) -> str:
    return "".join(OBJECT if span.formula else span.text for span in spans)


def _line(text: str) -> str:
    return text.translate(_SPACES)


def utf16_length(text: str) -> int:
    """Return the length of `text` in UTF-16 units, in which Qt counts positions."""
    return len(text.encode("utf-16-le", "surrogatepass")) // 2
