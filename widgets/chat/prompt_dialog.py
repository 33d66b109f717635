"""What a model reads of a conversation: the text by its template, token by token."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from PySide6.QtGui import QColor, QFontDatabase, QTextCharFormat, QTextCursor
from PySide6.QtWidgets import QDialog, QDialogButtonBox, QPlainTextEdit, QVBoxLayout, QWidget

from widgets.common.counts import format_count
from widgets.common.palette import DARK, Palette
from widgets.common.roles import plain_label
from widgets.markdown.visible import visible

MOST_SHADED = 8000
"""So many tokens are told apart by their shade; of more the text alone is shown."""
SIZE_PX = (760, 620)


@dataclass(frozen=True, slots=True)
class ShownPrompt:
    """`tokens` with how each of them is written. `note`: what there is to say of the template; empty: nothing."""

    tokens: Sequence[int]
    pieces: Sequence[str]
    n_ctx: int | None = None
    note: str = ""


class PromptDialog(QDialog):
    """Shows a prompt; the line below names the token at the cursor."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle("What the model reads")
        self._palette = DARK
        self._prompt = ShownPrompt((), ())
        self._ends: list[int] = []
        self.count_label = plain_label("Asking the model…", "strong")
        self.note_label = plain_label("", "error", wrap=True)
        self.note_label.hide()
        self.text_edit = QPlainTextEdit()
        self.text_edit.setReadOnly(True)
        self.text_edit.setAccessibleName("The prompt")
        self.text_edit.setFont(QFontDatabase.systemFont(QFontDatabase.SystemFont.FixedFont))
        self.token_label = plain_label("", "dim")
        self.buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Close)
        column = QVBoxLayout(self)
        for widget in (self.count_label, self.note_label, self.text_edit, self.token_label, self.buttons):
            column.addWidget(widget)
        self.buttons.rejected.connect(self.reject)
        self.text_edit.cursorPositionChanged.connect(self._show_token)
        self.resize(*SIZE_PX)

    def apply_palette(self, palette: Palette) -> None:
        """Use the colours of `palette`."""
        self._palette = palette
        self.show_prompt(self._prompt)

    def show_prompt(self, prompt: ShownPrompt) -> None:
        """Show a prompt from its beginning."""
        self._prompt = prompt
        pieces = list(map(_shown, prompt.pieces))
        self._ends = list(accumulate(map(_length, pieces)))
        room = "" if prompt.n_ctx is None else f" of {format_count(prompt.n_ctx)}"
        self.count_label.setText(f"{format_count(len(pieces))}{room} tokens")
        self.note_label.setText(prompt.note)
        self.note_label.setVisible(bool(prompt.note))
        self.text_edit.setPlainText("")
        if len(pieces) > MOST_SHADED:
            self.text_edit.setPlainText("".join(pieces))
        else:
            self._write_shaded(pieces)
        self.text_edit.moveCursor(QTextCursor.MoveOperation.Start)
        self._show_token()

    def show_fault(self, sentence: str) -> None:
        """Say why there is nothing to show."""
        self.show_prompt(ShownPrompt((), (), note=sentence))

    def _write_shaded(self, pieces: Sequence[str]) -> None:
        plain, shaded = QTextCharFormat(), QTextCharFormat()
        shaded.setBackground(QColor(self._palette.line))
        cursor = QTextCursor(self.text_edit.document())
        cursor.beginEditBlock()
        for number, piece in enumerate(pieces):
            cursor.insertText(piece, shaded if number % 2 else plain)
        cursor.endEditBlock()

    def _show_token(self) -> None:
        if not self._ends:
            self.token_label.setText("")
            return
        place = min(bisect_right(self._ends, self.text_edit.textCursor().position()), len(self._ends) - 1)
        piece = _shown(self._prompt.pieces[place]).replace("\n", "↵")
        self.token_label.setText(f"Token {format_count(place + 1)}: number {self._prompt.tokens[place]}, “{piece}”")


def _shown(piece: str) -> str:
    """Return how a token is written; a character that is cut between two tokens is a mark in each."""
    return visible(piece).replace("\\ufffd", "\N{REPLACEMENT CHARACTER}")


def _length(text: str) -> int:
    """Return how many positions a text takes in a document of Qt, which counts halves of pairs."""
    return len(text) + sum(letter > "\uffff" for letter in text)
