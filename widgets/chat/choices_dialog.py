"""How a model chose the tokens of an answer: each shaded by how probable it was, and what else there was."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtGui import QColor
from PySide6.QtWidgets import QDialog, QDialogButtonBox, QVBoxLayout, QWidget

from engine.language import tr
from widgets.chat.alternatives import SOURCE, AlternativesTable, ShownChoice, doubt_shade, percent
from widgets.chat.token_text import TokenText, piece_words
from widgets.common.counts import format_count
from widgets.common.palette import DARK, Palette
from widgets.common.roles import plain_label

SIZE_PX = (760, 620)


class ChoicesDialog(QDialog):
    """The table below is about the token at the cursor."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle(tr("Tokens of an answer"))
        self._palette = DARK
        self._choices: Sequence[ShownChoice] = ()
        self._note = ""
        self.count_label = plain_label("", "strong")
        self.text_edit = TokenText()
        self.text_edit.setAccessibleName(tr("The tokens of the answer"))
        self.token_label = plain_label("", "strong")
        self.table = AlternativesTable()
        self.buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Close)
        column = QVBoxLayout(self)
        source = plain_label(SOURCE, "dim", wrap=True)
        for widget in (self.count_label, self.text_edit, self.token_label, self.table, source, self.buttons):
            column.addWidget(widget)
        self.buttons.rejected.connect(self.reject)
        self.text_edit.cursorPositionChanged.connect(self._show_token)
        self.resize(*SIZE_PX)

    def apply_palette(self, palette: Palette) -> None:
        """Use the colours of `palette`."""
        self._palette = palette
        self.show_choices(self._choices, self._note)

    def show_choices(self, choices: Sequence[ShownChoice], note: str = "") -> None:
        """Show the choices of an answer from its beginning; `note`: what there is to say of them."""
        self._choices, self._note = choices, note
        self.count_label.setText(
            " · ".join([tr("{count} tokens", count=format_count(len(choices))), *([note] if note else [])])
        )
        self.text_edit.show_tokens([choice.text for choice in choices], self._shade)
        self._show_token()

    def _shade(self, place: int) -> QColor | None:
        return doubt_shade(self._choices[place], self._palette)

    def _show_token(self) -> None:
        place = self.text_edit.token
        choice = None if place is None else self._choices[place]
        self.table.show_choice(choice)
        if choice is None or place is None:
            self.token_label.setText("")
            return
        self.token_label.setText(
            tr(
                "Token {place}: {piece}, {percent}",
                place=format_count(place + 1),
                piece=piece_words(choice.text),
                percent=percent(choice.probability),
            )
        )
