"""The dialog of Layout > Named Layouts: it lists the saved layouts of the current model."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from PySide6.QtCore import Signal, SignalInstance
from PySide6.QtWidgets import QHBoxLayout, QLineEdit, QPushButton, QWidget

from engine.base.language import tr
from widgets.common.dialog import Dialog
from widgets.common.roles import plain_label
from widgets.common.row_table import RowTable

WIDTH_PX, HEIGHT_PX = 640, 420
MAX_NAME = 80


class NamedLayoutRow(Struct, frozen=True):
    """Texts of a named layout for a row of the table.

    `layout`: number of layers on each device, such as "CUDA0 20, CPU 12".
    `made_for`: names of the devices that the layout was made for.
    """

    name: str
    layout: str
    made_for: str


class NamedLayoutsDialog(Dialog):
    """Lists the named layouts of a model. Signals for a layout carry the index of its row. The dialog is not modal."""

    use_requested = Signal(int)
    duplicate_requested = Signal(int)
    delete_requested = Signal(int)
    export_requested = Signal(int)
    rename_requested = Signal(int, str)
    save_requested = Signal(str)
    restore_requested = Signal()
    import_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(tr("Named Layouts"), parent)
        self._rows: tuple[NamedLayoutRow, ...] = ()
        self._has_model = False
        headings = (tr("name"), tr("layers per device"), tr("devices it was made for"))
        self.table = RowTable(headings, tr("Named layouts"), wide=1)
        self.name_edit = QLineEdit()
        self.name_edit.setMaxLength(MAX_NAME)
        self.name_edit.setPlaceholderText(tr("Name"))
        self.name_edit.setAccessibleName(tr("Name of a layout"))
        self.save_button = QPushButton(tr("&Save Current Layout"))
        self.rename_button = QPushButton(tr("Re&name"))
        self.use_button = QPushButton(tr("&Use"))
        self.duplicate_button = QPushButton(tr("&Duplicate"))
        self.delete_button = QPushButton(tr("De&lete"))
        self.restore_button = QPushButton(tr("&Restore"))
        self.restore_button.setToolTip(tr("Bring back the layout that was deleted last"))
        self.words = plain_label("", "dim", wrap=True)
        naming, doing = QHBoxLayout(), QHBoxLayout()
        for widget in (self.name_edit, self.save_button, self.rename_button):
            naming.addWidget(widget, 1 if widget is self.name_edit else 0)
        for button in (self.use_button, self.duplicate_button, self.delete_button, self.restore_button):
            doing.addWidget(button)
        doing.addStretch(1)
        self.import_button = self.add_button(tr("&Import…"), self.import_requested.emit)
        self.export_button = self.add_button(tr("&Export…"), self._on_export)
        self._connect()
        self.lay_out(self.table, doing, naming, self.words)
        self.resize(WIDTH_PX, HEIGHT_PX)
        self._refresh()

    def show_layouts(self, rows: Sequence[NamedLayoutRow], *, has_model: bool, can_restore: bool) -> None:
        """List the named layouts `rows`.

        `has_model`: whether a model is open.
        `can_restore`: whether the layout that was deleted last can be restored.
        """
        chosen = self.table.chosen_row
        before = None if chosen is None or chosen >= len(self._rows) else self._rows[chosen].name
        self._rows, self._has_model = tuple(rows), has_model
        again = next((at for at, row in enumerate(rows) if row.name == before), None)
        self.table.show_rows([(row.name, row.layout, row.made_for) for row in rows], chosen=again)
        self.restore_button.setEnabled(can_restore)
        if not has_model:
            self.words.setText(tr("No model is open."))
        elif not rows:
            self.words.setText(tr("This model has no named layouts yet. Type a name to save the current layout."))
        else:
            self.words.setText("")
        self._refresh()

    @property
    def name(self) -> str:
        """The typed name in one line, without spaces at its ends."""
        return " ".join(self.name_edit.text().split())

    def _connect(self) -> None:
        self.table.itemSelectionChanged.connect(self._on_selected)
        self.table.itemActivated.connect(lambda _item: self._ask(self.use_requested))
        self.name_edit.textChanged.connect(lambda _text: self._refresh())
        self.use_button.clicked.connect(lambda _checked: self._ask(self.use_requested))
        self.duplicate_button.clicked.connect(lambda _checked: self._ask(self.duplicate_requested))
        self.delete_button.clicked.connect(lambda _checked: self._ask(self.delete_requested))
        self.restore_button.clicked.connect(lambda _checked: self.restore_requested.emit())
        self.save_button.clicked.connect(lambda _checked: self.save_requested.emit(self.name))
        self.rename_button.clicked.connect(self._on_rename)

    def _ask(self, signal: SignalInstance) -> None:
        row = self.table.chosen_row
        if row is not None:
            signal.emit(row)

    def _on_export(self) -> None:
        self._ask(self.export_requested)

    def _on_rename(self, _checked: bool = False) -> None:
        row = self.table.chosen_row
        if row is not None:
            self.rename_requested.emit(row, self.name)

    def _on_selected(self) -> None:
        row = self.table.chosen_row
        if row is not None and row < len(self._rows):
            self.name_edit.setText(self._rows[row].name)
        self._refresh()

    def _refresh(self) -> None:
        row = self.table.chosen_row
        chosen = row is not None and row < len(self._rows)
        for button in (self.use_button, self.duplicate_button, self.delete_button, self.export_button):
            button.setEnabled(chosen)
        is_other = row is not None and chosen and self.name != self._rows[row].name
        self.rename_button.setEnabled(bool(self.name) and is_other)
        self.save_button.setEnabled(bool(self.name) and self._has_model)
        self.import_button.setEnabled(self._has_model)
