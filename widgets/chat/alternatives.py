"""How a token was chosen: a table of the likeliest ones, and a shade for how probable it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PySide6.QtCore import Qt
from PySide6.QtGui import QColor
from PySide6.QtWidgets import QHeaderView, QTableWidget, QTableWidgetItem, QWidget

from engine.language import tr
from widgets.chat.token_text import piece_words
from widgets.common.palette import Palette

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


class AlternativesTable(QTableWidget):
    """The likeliest tokens at a place."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(0, len(HEADINGS), parent)
        self.setAccessibleName(tr("What else there was"))
        self.setHorizontalHeaderLabels(HEADINGS)
        self.verticalHeader().hide()
        self.horizontalHeader().setSectionResizeMode(0, QHeaderView.ResizeMode.Stretch)
        # as wide as its heading, which some languages need a long word for
        self.horizontalHeader().setSectionResizeMode(1, QHeaderView.ResizeMode.ResizeToContents)
        self.setEditTriggers(QTableWidget.EditTrigger.NoEditTriggers)
        self.setSelectionBehavior(QTableWidget.SelectionBehavior.SelectRows)
        self.setFixedHeight(TABLE_HEIGHT_PX)

    def show_choice(self, choice: ShownChoice | None) -> None:
        """Show what else there was; None: nothing is known of it."""
        rows = () if choice is None else choice.likeliest
        self.setRowCount(len(rows))
        for row, (text, probability) in enumerate(rows):
            number = QTableWidgetItem(percent(probability))
            number.setTextAlignment(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
            self.setItem(row, 0, QTableWidgetItem(piece_words(text)))
            self.setItem(row, 1, number)


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
