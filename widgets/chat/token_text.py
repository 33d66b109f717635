"""Text token by token: each has its own shade, and the cursor is at one of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

from PySide6.QtGui import QColor, QFontDatabase, QTextCharFormat, QTextCursor
from PySide6.QtWidgets import QPlainTextEdit, QWidget

from widgets.markdown.visible import visible

MOST_SHADED = 8000
"""So many tokens are told apart by their shade; of more the text alone is shown."""


class TokenText(QPlainTextEdit):
    """Read-only; the document's own signal `cursorPositionChanged` tells that another token may be at the cursor."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setReadOnly(True)
        self.setFont(QFontDatabase.systemFont(QFontDatabase.SystemFont.FixedFont))
        self._ends: list[int] = []

    def show_tokens(self, pieces: Sequence[str], shade: Callable[[int], QColor | None]) -> None:
        """Show tokens from the first on; `shade` gives the ground of each, None: that of the page."""
        shown = list(map(shown_piece, pieces))
        self._ends = list(accumulate(map(_length, shown)))
        self.setPlainText("")
        if len(shown) > MOST_SHADED:
            self.setPlainText("".join(shown))
        else:
            self._write(shown, shade)
        self.moveCursor(QTextCursor.MoveOperation.Start)

    @property
    def token(self) -> int | None:
        """The place of the token at the cursor, None where there are none."""
        if not self._ends:
            return None
        return min(bisect_right(self._ends, self.textCursor().position()), len(self._ends) - 1)

    def select(self, token: int) -> None:
        """Put the cursor at a token."""
        cursor = self.textCursor()
        cursor.setPosition(self._ends[token - 1] if token else 0)
        self.setTextCursor(cursor)

    def _write(self, pieces: Sequence[str], shade: Callable[[int], QColor | None]) -> None:
        cursor = QTextCursor(self.document())
        cursor.beginEditBlock()
        for number, piece in enumerate(pieces):
            look, ground = QTextCharFormat(), shade(number)
            if ground is not None:
                look.setBackground(ground)
            cursor.insertText(piece, look)
        cursor.endEditBlock()


def shown_piece(piece: str) -> str:
    """Return how a token is written; a character that is cut between two tokens is a mark in each."""
    return visible(piece).replace("\\ufffd", "\N{REPLACEMENT CHARACTER}")


def piece_words(piece: str) -> str:
    """Return how a token is named in a line."""
    return "“" + shown_piece(piece).replace("\n", "↵") + "”"


def _length(text: str) -> int:
    """Return how many positions a text takes in a document of Qt, which counts halves of pairs."""
    return len(text) + sum(letter > "\uffff" for letter in text)
