"""Dialogs that show text token by token: the raw prompt, and the token probabilities of an answer."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from msgspec import Struct, field
from PySide6.QtCore import Qt
from PySide6.QtGui import QColor, QFontDatabase, QTextCharFormat, QTextCursor
from PySide6.QtWidgets import QPlainTextEdit, QWidget

from engine.base.language import tr
from engine.base.units import format_count
from widgets.common.dialog import Dialog
from widgets.common.palette import DARK, Palette
from widgets.common.roles import plain_label
from widgets.common.row_table import RowTable
from widgets.markdown.blocks import visible

MOST_SHADED = 8000
"""Maximum number of tokens with background shades; a longer text has none."""


class TokenText(QPlainTextEdit):
    """Read-only text that consists of tokens. The property `token` is the index of the token at the cursor."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setReadOnly(True)
        self.setFont(QFontDatabase.systemFont(QFontDatabase.SystemFont.FixedFont))
        self._ends: list[int] = []

    def show_tokens(self, pieces: Sequence[str], shade: Callable[[int], QColor | None]) -> None:
        """Show the texts of tokens, one after the other.

        `shade`: returns the background colour of the token at an index; None for no colour.
        """
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
        """Index of the token at the cursor; None if there are no tokens."""
        if not self._ends:
            return None
        # Ends ascend. `bisect_right`: a cursor between two tokens is at the one that begins there.
        return min(bisect_right(self._ends, self.textCursor().position()), len(self._ends) - 1)

    def select(self, token: int) -> None:
        """Move the cursor to the token with the index `token`."""
        cursor = self.textCursor()
        cursor.setPosition(self._ends[token - 1] if token else 0)
        self.setTextCursor(cursor)

    def _write(self, pieces: Sequence[str], shade: Callable[[int], QColor | None]) -> None:
        cursor = QTextCursor(self.document())
        # One edit block: Qt lays the document out once and not for each token.
        cursor.beginEditBlock()
        for number, piece in enumerate(pieces):
            look, ground = QTextCharFormat(), shade(number)
            if ground is not None:
                look.setBackground(ground)
            cursor.insertText(piece, look)
        cursor.endEditBlock()


def shown_piece(piece: str) -> str:
    """Return a token's text with control characters escaped; an incomplete UTF-8 character is shown as U+FFFD."""
    # `visible` escapes U+FFFD with its neighbours; the decoder puts it for bytes that are no whole character.
    return visible(piece).replace("\\ufffd", "\N{REPLACEMENT CHARACTER}")


def piece_words(piece: str) -> str:
    """Return the text of a token in quotation marks and on one line: arrows stand for line breaks."""
    return "“" + shown_piece(piece).replace("\n", "↵") + "”"


def _length(text: str) -> int:
    """Return the length of a text in a Qt document, in UTF-16 units."""
    # A character outside the basic plane is two UTF-16 units in Qt.
    return len(text) + sum(letter > "\uffff" for letter in text)


TABLE_HEIGHT_PX = 210
_ALIGNMENT = Qt.ItemDataRole.TextAlignmentRole
MOST_OPAQUE = 100
"""Alpha of the darkest shade, 0 to 255. Text on this shade is still readable."""
LIKELY = 0.999
"""A token with this probability or a higher one has no shade."""
HEADINGS = (tr("Token"), tr("Probability"))
SOURCE = tr("Probabilities before all samplers, at temperature 1. Darker tokens were less probable.")


class ShownChoice(Struct, frozen=True):
    """A token of an answer with its probability.

    `likeliest`: the likeliest tokens at the same position, most probable first.
    """

    text: str
    probability: float
    likeliest: Sequence[tuple[str, float]]


class AlternativesTable(RowTable):
    """Table of the likeliest tokens at one position."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(HEADINGS, tr("Alternatives"), parent, wide=0)
        self.setFixedHeight(TABLE_HEIGHT_PX)

    def show_choice(self, choice: ShownChoice | None) -> None:
        """Show the likeliest tokens of `choice`. The table is empty if `choice` is None (unknown)."""
        rows = () if choice is None else choice.likeliest
        self.show_rows([(piece_words(text), percent(probability)) for text, probability in rows])
        for row in range(len(rows)):
            number = self.model().index(row, 1)
            self.model().setData(number, Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter, _ALIGNMENT)


def doubt_shade(choice: ShownChoice, palette: Palette) -> QColor | None:
    """Return the background of a token, darker for a less probable one; None if it is nearly certain."""
    probability = min(1.0, max(0.0, choice.probability))
    if probability >= LIKELY:
        return None
    colour = QColor(palette.experts)
    colour.setAlpha(round(MOST_OPAQUE * (1 - probability)))
    return colour


def percent(probability: float) -> str:
    """Return a probability, 0 to 1, as text in percent."""
    return f"{100 * probability:.2f} %" if probability < 0.1 else f"{100 * probability:.1f} %"


SIZE_PX = (760, 620)


class TokenDialog(Dialog):
    """Base class of dialogs that show a text token by token.

    Below the text, a line names the token at the cursor, and a table shows the likeliest tokens at its position.
    """

    def __init__(self, title: str, name: str, parent: QWidget | None = None) -> None:
        super().__init__(title, parent)
        self._palette = DARK
        self.count_label = plain_label("", "strong")
        self.note_label = plain_label("", "error", wrap=True)
        self.note_label.hide()
        self.text_edit = TokenText()
        self.text_edit.setAccessibleName(name)
        self.token_label = plain_label("", "strong")
        self.table = AlternativesTable()
        self.source_label = plain_label(SOURCE, "dim", wrap=True)
        self.lay_out(self.count_label, self.note_label, self.text_edit, self.token_label, self.table, self.source_label)
        self.text_edit.cursorPositionChanged.connect(self._show_token)
        self.resize(*SIZE_PX)

    def apply_palette(self, palette: Palette) -> None:
        """Use the colours of `palette`."""
        self._palette = palette
        self._show_tokens()

    def _pieces(self) -> Sequence[str]:
        raise NotImplementedError

    def _choice(self, index: int) -> ShownChoice | None:
        """Return the probabilities of token number `index`, counted from 0; None if they are unknown."""
        raise NotImplementedError

    def _token_text(self, index: int) -> str:
        """Return the line that names the token at `index`."""
        raise NotImplementedError

    def _shade(self, index: int) -> QColor | None:
        choice = self._choice(index)
        return None if choice is None else doubt_shade(choice, self._palette)

    def _show_tokens(self) -> None:
        """Show the tokens, with the cursor at the first one."""
        self.text_edit.show_tokens(self._pieces(), self._shade)
        self._show_token()

    def _show_token(self) -> None:
        index = self.text_edit.token
        self.table.show_choice(None if index is None else self._choice(index))
        self.token_label.setText("" if index is None else self._token_text(index))


class ShownPrompt(Struct, frozen=True):
    """A prompt as the model's tokens.

    tokens: the id of each token.
    pieces: the text of each token; an image or a sound is one piece.
    n_ctx: the size of the context in tokens; None if unknown.
    note: a remark on the chat template; empty if there is none.
    n_tokens: the number of tokens, including those of images and sounds; None if each piece is one token.
    choices: stored probabilities of tokens of earlier answers, by the index in `pieces`.
    """

    tokens: Sequence[int]
    pieces: Sequence[str]
    n_ctx: int | None = None
    note: str = ""
    n_tokens: int | None = None
    choices: Mapping[int, ShownChoice] = field(default_factory=dict)


class PromptDialog(TokenDialog):
    """Dialog with the raw prompt. Neighbouring tokens without a known probability have alternating shades."""

    def __init__(self, parent: QWidget | None = None) -> None:
        self._prompt = ShownPrompt((), ())
        super().__init__(tr("Raw prompt"), tr("The prompt"), parent)
        self.count_label.setText(tr("Waiting for the prompt…"))
        self.table.hide()
        self.source_label.hide()

    def show_prompt(self, prompt: ShownPrompt) -> None:
        """Show `prompt`, with the cursor at its first token."""
        self._prompt = prompt
        room = "" if prompt.n_ctx is None else tr(" of {n_ctx}", n_ctx=format_count(prompt.n_ctx))
        count = len(prompt.pieces) if prompt.n_tokens is None else prompt.n_tokens
        self.count_label.setText(tr("{count}{room} tokens", count=format_count(count), room=room))
        self.note_label.setText(prompt.note)
        self.note_label.setVisible(bool(prompt.note))
        # Probabilities exist only for answers that were requested with them.
        self.table.setVisible(bool(prompt.choices))
        self.source_label.setVisible(bool(prompt.choices))
        self._show_tokens()

    def show_error(self, sentence: str) -> None:
        """Show `sentence` as the reason why there is no prompt."""
        self.show_prompt(ShownPrompt((), (), note=sentence))

    def _pieces(self) -> Sequence[str]:
        return self._prompt.pieces

    def _choice(self, index: int) -> ShownChoice | None:
        return self._prompt.choices.get(index)

    def _shade(self, index: int) -> QColor | None:
        if self._choice(index) is None and index % 2:
            return QColor(self._palette.line)
        return super()._shade(index)

    def _token_text(self, index: int) -> str:
        words = tr(
            "Token {number} · ID {id}: {piece}",
            number=format_count(index + 1),
            id=self._prompt.tokens[index],
            piece=piece_words(self._prompt.pieces[index]),
        )
        choice = self._choice(index)
        return words if choice is None else f"{words}, {percent(choice.probability)}"


class ChoicesDialog(TokenDialog):
    """Dialog with the tokens of an answer; the shade of a token shows its probability."""

    def __init__(self, parent: QWidget | None = None) -> None:
        self._choices: Sequence[ShownChoice] = ()
        super().__init__(tr("Tokens of an answer"), tr("The tokens of the answer"), parent)

    def show_choices(self, choices: Sequence[ShownChoice], note: str = "") -> None:
        """Show the tokens of an answer. `note`: a remark below the tokens; empty if there is none."""
        self._choices = choices
        count = tr("{count} tokens", count=format_count(len(choices)))
        self.count_label.setText(" · ".join(filter(None, (count, note))))
        self._show_tokens()

    def _pieces(self) -> Sequence[str]:
        return [choice.text for choice in self._choices]

    def _choice(self, index: int) -> ShownChoice:
        return self._choices[index]

    def _token_text(self, index: int) -> str:
        choice = self._choices[index]
        return tr(
            "Token {number}: {piece}, {percent}",
            number=format_count(index + 1),
            piece=piece_words(choice.text),
            percent=percent(choice.probability),
        )
