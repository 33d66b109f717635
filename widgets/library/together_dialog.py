"""Dialog that chooses models to be loaded together, and shows the layout that was found for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct
from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QHBoxLayout, QListWidget, QListWidgetItem, QPushButton, QWidget

from engine.base.language import tr
from widgets.common.dialog import Dialog
from widgets.common.inputs import ComboBox
from widgets.common.roles import plain_label
from widgets.common.row_table import RowTable

WIDTH_PX, HEIGHT_PX = 680, 560
LIST_HEIGHT_PX = 104


class ModelToChoose(Struct, frozen=True):
    """A model that can be chosen: its title, and the path of its file."""

    title: str
    path: Path


class TogetherDialog(Dialog):
    """Shows the chosen models, a layout for each, and the memory that all need on each device. It is not modal.

    `chosen_changed` requests new layouts; `load_requested` requests the loads of all models.
    """

    chosen_changed = Signal(object)  # tuple[Path, ...]
    load_requested = Signal()

    def __init__(self, models: Sequence[ModelToChoose], parent: QWidget | None = None) -> None:
        super().__init__(tr("Plan Several Models"), parent, once=True)
        self.model_box = ComboBox()
        self.model_box.setAccessibleDescription(tr("Model"))
        for model in models:
            self.model_box.addItem(model.title, model.path)
        self.add_model_button = QPushButton(tr("&Add"))
        self.add_model_button.clicked.connect(self._on_add)
        self.remove_button = QPushButton(tr("&Remove"))
        self.remove_button.clicked.connect(self._on_remove)
        self.up_button = QPushButton(tr("More &Important"))
        self.up_button.clicked.connect(self._on_up)
        self.chosen_list = QListWidget()
        self.chosen_list.setAccessibleName(tr("Models to load at the same time, the most important one first"))
        self.chosen_list.setMaximumHeight(LIST_HEIGHT_PX)
        self.chosen_list.currentRowChanged.connect(lambda _row: self._enable())
        self.models_table = RowTable(
            (tr("Model"), tr("Layers"), tr("Memory"), tr("Speed")), tr("Layouts, in the order of loading"), wide=1
        )
        self.devices_table = RowTable(
            (tr("Device"), tr("All models"), tr("Available")), tr("Memory of all models together"), wide=0
        )
        self._words = plain_label("", "dim", wrap=True)
        self._may_load = False
        choice = QHBoxLayout()
        choice.addWidget(self.model_box, 1)
        for button in (self.add_model_button, self.remove_button, self.up_button):
            choice.addWidget(button)
        introduction = tr(
            "Choose the models to load at the same time, the most important one first. Idle models that are loaded now "
            "are parked first, which unloads them until their next question."
        )
        self.load_button = self.add_button(tr("&Load All"), self._on_load)
        self.lay_out(
            plain_label(introduction, wrap=True),
            choice,
            self.chosen_list,
            self.models_table,
            self.devices_table,
            self._words,
        )
        self.resize(WIDTH_PX, HEIGHT_PX)
        self._enable()

    @property
    def chosen(self) -> tuple[Path, ...]:
        """Paths of the chosen models, the most important one first."""
        items = (self.chosen_list.item(row) for row in range(self.chosen_list.count()))
        return tuple(item.data(Qt.ItemDataRole.UserRole) for item in items)

    @property
    def text(self) -> str:
        """The sentence below the tables."""
        return self._words.text()

    def choose(self, paths: Sequence[Path]) -> None:
        """Select the models at `paths`; models that the dialog does not offer are ignored."""
        # Not `findData`, which compares Python objects by identity.
        rows = {self.model_box.itemData(row): row for row in range(self.model_box.count())}
        for path in paths:
            if path in rows:
                self._add(rows[path])
        self._changed()

    def show_plan(
        self, models: Sequence[Sequence[str]], devices: Sequence[Sequence[str]], sentence: str, *, may_load: bool
    ) -> None:
        """Show the layouts that were found, and the memory of each device.

        `models`: the rows of the table of models and their layouts.
        `devices`: the rows of the table of devices and their memory.
        `sentence`: a sentence below the tables.
        `may_load`: whether all models can be loaded together.
        """
        self.models_table.show_rows(models)
        self.devices_table.show_rows(devices)
        self._words.setText(sentence)
        self._may_load = may_load
        self._enable()

    def show_status(self, sentence: str) -> None:
        """Show a sentence in place of the layouts while there are none."""
        self.show_plan((), (), sentence, may_load=False)

    def _on_add(self) -> None:
        row = self.model_box.currentIndex()
        if row >= 0 and self.model_box.itemData(row) not in self.chosen:
            self._add(row)
            self._changed()

    def _add(self, row: int) -> None:
        item = QListWidgetItem(self.model_box.itemText(row))
        item.setData(Qt.ItemDataRole.UserRole, self.model_box.itemData(row))
        self.chosen_list.addItem(item)
        self.chosen_list.setCurrentRow(self.chosen_list.count() - 1)

    def _on_remove(self) -> None:
        self.chosen_list.takeItem(self.chosen_list.currentRow())
        self._changed()

    def _on_up(self) -> None:
        row = self.chosen_list.currentRow()
        item = self.chosen_list.takeItem(row)
        self.chosen_list.insertItem(row - 1, item)
        self.chosen_list.setCurrentRow(row - 1)
        self._changed()

    def _on_load(self) -> None:
        self.load_requested.emit()
        self.accept()

    def _changed(self) -> None:
        self._enable()
        self.chosen_changed.emit(self.chosen)

    def _enable(self) -> None:
        self.remove_button.setEnabled(bool(self.chosen))
        self.up_button.setEnabled(self.chosen_list.currentRow() > 0)
        self.add_model_button.setEnabled(self.model_box.count() > 0)
        self.load_button.setEnabled(self._may_load)
