"""What a model reads of a conversation: the text by its template, token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from PySide6.QtGui import QColor
from PySide6.QtWidgets import QDialog, QDialogButtonBox, QVBoxLayout, QWidget

from engine.language import tr
from widgets.chat.alternatives import SOURCE, AlternativesTable, ShownChoice, doubt_shade, percent
from widgets.chat.token_text import TokenText, piece_words
from widgets.common.counts import format_count
from widgets.common.palette import DARK, Palette
from widgets.common.roles import plain_label

SIZE_PX = (760, 620)


@dataclass(frozen=True, slots=True)
class ShownPrompt:
    """`tokens` with how each of them is written. `note`: what there is to say of the template; empty: nothing.

    `n_tokens`: how many there are, where an image or a sound, which is one of `pieces`, counts as it is long; None: as
    many as `pieces`. `choices`: how tokens of earlier answers were chosen, by their places, where that was kept.
    """

    tokens: Sequence[int]
    pieces: Sequence[str]
    n_ctx: int | None = None
    note: str = ""
    n_tokens: int | None = None
    choices: Mapping[int, ShownChoice] = field(default_factory=dict)


class PromptDialog(QDialog):
    """Shows a prompt; the line below names the token at the cursor."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle(tr("What the model reads"))
        self._palette = DARK
        self._prompt = ShownPrompt((), ())
        self.count_label = plain_label(tr("Asking the model…"), "strong")
        self.note_label = plain_label("", "error", wrap=True)
        self.note_label.hide()
        self.text_edit = TokenText()
        self.text_edit.setAccessibleName(tr("The prompt"))
        self.token_label = plain_label("", "dim")
        self.table = AlternativesTable()
        self.source_label = plain_label(SOURCE, "dim", wrap=True)
        self.table.hide()
        self.source_label.hide()
        self.buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Close)
        column = QVBoxLayout(self)
        for widget in (
            self.count_label,
            self.note_label,
            self.text_edit,
            self.token_label,
            self.table,
            self.source_label,
            self.buttons,
        ):
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
        room = "" if prompt.n_ctx is None else tr(" of {n_ctx}", n_ctx=format_count(prompt.n_ctx))
        count = len(prompt.pieces) if prompt.n_tokens is None else prompt.n_tokens
        self.count_label.setText(tr("{count}{room} tokens", count=format_count(count), room=room))
        self.note_label.setText(prompt.note)
        self.note_label.setVisible(bool(prompt.note))
        self.table.setVisible(bool(prompt.choices))
        self.source_label.setVisible(bool(prompt.choices))
        self.text_edit.show_tokens(prompt.pieces, self._shade)
        self._show_token()

    def show_fault(self, sentence: str) -> None:
        """Say why there is nothing to show."""
        self.show_prompt(ShownPrompt((), (), note=sentence))

    def _shade(self, place: int) -> QColor | None:
        choice = self._prompt.choices.get(place)
        if choice is not None:
            return doubt_shade(choice, self._palette)
        return QColor(self._palette.line) if place % 2 else None

    def _show_token(self) -> None:
        place = self.text_edit.token
        choice = None if place is None else self._prompt.choices.get(place)
        self.table.show_choice(choice)
        if place is None:
            self.token_label.setText("")
            return
        piece = piece_words(self._prompt.pieces[place])
        words = tr(
            "Token {place}: number {tokens}, {piece}",
            place=format_count(place + 1),
            tokens=self._prompt.tokens[place],
            piece=piece,
        )
        if choice is not None:
            words += ", " + percent(choice.probability)
        self.token_label.setText(words)
