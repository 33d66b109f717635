"""How a token was chosen: a table of the likeliest ones, and a shade for how probable it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PySide6.QtCore import Qt
from PySide6.QtGui import QColor
from PySide6.QtWidgets import QWidget

from engine.language import tr
from widgets.chat.token_text import piece_words
from widgets.common.palette import Palette
from widgets.common.row_table import RowTable

TABLE_HEIGHT_PX = 210
_ALIGNMENT = Qt.ItemDataRole.TextAlignmentRole
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


class AlternativesTable(RowTable):
    """The likeliest tokens at a place."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(HEADINGS, tr("What else there was"), parent, wide=0)
        self.setFixedHeight(TABLE_HEIGHT_PX)

    def show_choice(self, choice: ShownChoice | None) -> None:
        """Show what else there was; None: nothing is known of it."""
        rows = () if choice is None else choice.likeliest
        self.show_rows([(piece_words(text), percent(probability)) for text, probability in rows])
        for row in range(len(rows)):
            number = self.model().index(row, 1)
            self.model().setData(number, Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter, _ALIGNMENT)


def doubt_shade(choice: ShownChoice, palette: Palette) -> QColor | None:
    """Return the ground of a token: darker where it was less probable; None: that of the page."""
    probability = min(1.0, max(0.0, choice.probability))
    if probability >= LIKELY:
        return None
    colour = QColor(palette.experts)
    colour.setAlpha(round(MOST_OPAQUE * (1 - probability)))
    return colour


def percent(probability: float) -> str:
    """Return a probability as people read it."""
    return f"{100 * probability:.2f} %" if probability < 0.1 else f"{100 * probability:.1f} %"
