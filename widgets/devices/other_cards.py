"""Dialog to choose graphics cards that are not installed, and to compare a model's forecasts with and without them."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QHBoxLayout, QListWidget, QPushButton, QWidget

from engine.base.language import tr
from widgets.common.dialog import Dialog
from widgets.common.inputs import ComboBox
from widgets.common.roles import plain_label
from widgets.common.row_table import RowTable

WIDTH_PX, HEIGHT_PX = 560, 440


class OtherCardsDialog(Dialog):
    """Compares a model's forecasts on the present devices with those after the chosen cards are added. It is not modal.

    `chosen_changed` requests new figures; `use_requested` requests that the editor plans with the chosen cards.
    """

    chosen_changed = Signal(object)  # tuple[str, ...]
    use_requested = Signal(object)  # tuple[str, ...]

    def __init__(self, cards: Sequence[str], headings: Sequence[str], parent: QWidget | None = None) -> None:
        """Make the dialog.

        `cards`: names of the graphics cards to choose from.
        `headings`: names of the compared figures, one for each row of the comparison.
        """
        super().__init__(tr("Plan with Other Cards"), parent, once=True)
        self._headings = tuple(headings)
        self.card_box = ComboBox()
        self.card_box.setAccessibleDescription(tr("Graphics card"))
        self.card_box.addItems(list(cards))
        self.add_card_button = QPushButton(tr("&Add"))
        self.add_card_button.clicked.connect(self._on_add)
        self.remove_button = QPushButton(tr("&Remove"))
        self.remove_button.clicked.connect(self._on_remove)
        self.chosen_list = QListWidget()
        self.chosen_list.setAccessibleName(tr("Graphics cards to plan with"))
        self.chosen_list.setMaximumHeight(110)
        self.figures = RowTable(("", tr("this computer"), tr("with the chosen cards")), tr("Comparison"), wide=0)
        self._words = plain_label("", "dim", wrap=True)
        choice = QHBoxLayout()
        choice.addWidget(self.card_box, 1)
        choice.addWidget(self.add_card_button)
        choice.addWidget(self.remove_button)
        introduction = tr(
            "Choose graphics cards to see what a model would gain from them. The figures are forecasts from the "
            "makers' specifications."
        )
        self.use_button = self.add_button(tr("&Show in the Editor"), self._on_use)
        self.lay_out(plain_label(introduction, wrap=True), choice, self.chosen_list, self.figures, self._words)
        self.resize(WIDTH_PX, HEIGHT_PX)
        self._enable()

    @property
    def chosen(self) -> tuple[str, ...]:
        """Names of the chosen cards; a name occurs once for each card."""
        return tuple(self.chosen_list.item(row).text() for row in range(self.chosen_list.count()))

    @property
    def text(self) -> str:
        """The sentence below the table of figures, such as an error; empty if it is hidden."""
        return self._words.text()

    def show_figures(self, here: Sequence[str], there: Sequence[str]) -> None:
        """Show the compared figures as texts, one for each heading.

        `here`: figures with the present devices. `there`: figures with the chosen cards added.
        """
        self.figures.show_rows(list(zip(self._headings, here, there, strict=True)))

    def show_status(self, sentence: str) -> None:
        """Show a sentence below the table of figures, such as an error; an empty sentence hides it."""
        self._words.setText(sentence)

    def refuse(self, sentence: str) -> None:
        """Show why the chosen cards cannot be used, and disable the button Show in the Editor."""
        self.use_button.setEnabled(False)
        self.show_status(sentence)

    def _on_add(self) -> None:
        self.chosen_list.addItem(self.card_box.currentText())
        self.chosen_list.setCurrentRow(self.chosen_list.count() - 1)
        self._changed()

    def _on_remove(self) -> None:
        self.chosen_list.takeItem(self.chosen_list.currentRow())
        self._changed()

    def _on_use(self) -> None:
        self.use_requested.emit(self.chosen)
        self.accept()

    def _changed(self) -> None:
        self._enable()
        self.chosen_changed.emit(self.chosen)

    def _enable(self) -> None:
        self.remove_button.setEnabled(bool(self.chosen))
        self.use_button.setEnabled(bool(self.chosen))
