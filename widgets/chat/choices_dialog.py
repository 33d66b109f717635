"""How a model chose the tokens of an answer: each shaded by how probable it was, and what else there was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PySide6.QtCore import Qt
from PySide6.QtGui import QColor
from PySide6.QtWidgets import (
    QDialog,
    QDialogButtonBox,
    QHeaderView,
    QTableWidget,
    QTableWidgetItem,
    QVBoxLayout,
    QWidget,
)

from engine.language import tr
from widgets.chat.token_text import TokenText, piece_words
from widgets.common.counts import format_count
from widgets.common.palette import DARK, Palette
from widgets.common.roles import plain_label

SIZE_PX = (760, 620)
TABLE_HEIGHT_PX = 210
MOST_OPAQUE = 100
"""Of 255: the words stay readable on the darkest shade."""
LIKELY = 0.999
"""From this probability on a token has no shade: there was no choice."""
HEADINGS = (tr("Token"), tr("Probability"))
SOURCE = tr("By the model's own numbers, before all samplers and at temperature 1. Darker tokens were less probable.")


@dataclass(frozen=True, slots=True)
class ShownChoice:
    """A token with its probability, and the likeliest ones there, the first of all first."""

    text: str
    probability: float
    likeliest: Sequence[tuple[str, float]]


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
        self.table = QTableWidget(0, len(HEADINGS))
        self.table.setAccessibleName(tr("What else there was"))
        self.table.setHorizontalHeaderLabels(HEADINGS)
        self.table.verticalHeader().hide()
        self.table.horizontalHeader().setSectionResizeMode(0, QHeaderView.ResizeMode.Stretch)
        self.table.setEditTriggers(QTableWidget.EditTrigger.NoEditTriggers)
        self.table.setSelectionBehavior(QTableWidget.SelectionBehavior.SelectRows)
        self.table.setFixedHeight(TABLE_HEIGHT_PX)
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
        probability = min(1.0, max(0.0, self._choices[place].probability))
        if probability >= LIKELY:
            return None
        colour = QColor(self._palette.experts)
        colour.setAlpha(round(MOST_OPAQUE * (1 - probability)))
        return colour

    def _show_token(self) -> None:
        place = self.text_edit.token
        choice = None if place is None else self._choices[place]
        rows = () if choice is None else choice.likeliest
        self.table.setRowCount(len(rows))
        if choice is None or place is None:
            self.token_label.setText("")
            return
        self.token_label.setText(
            tr(
                "Token {place}: {piece}, {percent}",
                place=format_count(place + 1),
                piece=piece_words(choice.text),
                percent=_percent(choice.probability),
            )
        )
        for row, (text, probability) in enumerate(rows):
            number = QTableWidgetItem(_percent(probability))
            number.setTextAlignment(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
            self.table.setItem(row, 0, QTableWidgetItem(piece_words(text)))
            self.table.setItem(row, 1, number)


def _percent(probability: float) -> str:
    return f"{100 * probability:.2f} %" if probability < 0.1 else f"{100 * probability:.1f} %"
