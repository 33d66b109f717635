"""Dialog with all settings of the next load, and the values that Layerdeck has chosen for settings on "auto"."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import (
    QDialog,
    QFrame,
    QGridLayout,
    QHBoxLayout,
    QPushButton,
    QScrollArea,
    QVBoxLayout,
    QWidget,
)

from engine.base.language import tr
from engine.base.values import replace
from engine.planning.plan.decisions.decision import Decision
from engine.planning.settings.context_settings import AUTO, ContextSettings, KvType
from engine.planning.settings.table import GROUPS, SETTINGS, Group
from widgets.common.boxes import h_box, v_box
from widgets.common.elided_label import ElidedLabel
from widgets.common.inputs import ComboBox, DoubleSpinBox
from widgets.common.roles import plain_label, plain_tool_tip
from widgets.controls.decided import DecidedRows, decided_text
from widgets.controls.draft_form import DraftForm
from widgets.controls.setting_controls import SettingControl, make_control, show_real
from widgets.controls.values import AdapterName, SideFileNames

WIDTH_PX = 880
HEIGHT_PX = 720
NO_REFUSALS: Mapping[str, Mapping[KvType, str]] = {}

_TITLES: dict[Group, str] = {"Context": tr("Context"), "Batches": tr("Batches"), "Computing": tr("Computing")}


FILE_ROWS: Mapping[str, str] = {"projector": tr("Projector"), "adapters": tr("LoRA adapters"), "draft": tr("Draft")}
"""Labels of the rows for files that are loaded with the model, by the key of their decision."""


class SettingsDialog(QDialog):
    """Dialog with a row for each setting of a load (entry of `SETTINGS`), and rows for the files loaded with the model.

    It is not modal: changes are applied at once, and Undo reverts them.
    """

    context_changed = Signal(ContextSettings)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle(tr("Load Settings"))
        self._settings = ContextSettings()
        self._decided: Mapping[str, Decision] = {}
        self.controls: dict[str, SettingControl] = {setting.key: make_control(setting) for setting in SETTINGS}
        self.side_files = SideFileForm()
        self.loaded_label = plain_label("", "dim", wrap=True)
        self.rows = self._lay_out()
        for control in self.controls.values():
            control.edited.connect(self._on_edited)
        self.set_settings(self._settings)
        self.set_loaded("")

    def _lay_out(self) -> DecidedRows:
        page = QWidget()
        column = v_box(page, spacing=8, margins=(16, 16, 16, 16))
        grid = QGridLayout()
        rows = DecidedRows(grid)
        for group in GROUPS:
            rows.add_title(_TITLES[group])
            # In the order of the table, which options and the settings page have as well.
            for setting in SETTINGS:
                if setting.group == group:
                    rows.add(setting.key, setting.label, *self.controls[setting.key].widgets, hint=setting.help)
        rows.add_title(tr("Files Loaded with the Model"))
        column.addLayout(grid)
        column.addWidget(self.side_files)
        column.addWidget(self.loaded_label)
        column.addStretch(1)
        self._area = area = QScrollArea()
        area.setAccessibleName(tr("All settings"))
        area.setWidgetResizable(True)
        area.setFrameShape(QFrame.Shape.NoFrame)
        # The third column wraps its texts, so every width is enough for the page above `WIDTH_PX`.
        area.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        area.setWidget(page)
        outer = v_box(self)
        outer.addWidget(area)
        self.setMinimumWidth(WIDTH_PX)
        self.resize(WIDTH_PX, HEIGHT_PX)
        return rows

    def set_settings(
        self,
        settings: ContextSettings,
        decisions: tuple[Decision, ...] = (),
        refused: Mapping[str, Mapping[KvType, str]] = NO_REFUSALS,
    ) -> None:
        """Show `settings`.

        `decisions`: the values that Layerdeck has chosen for settings on "auto".
        `refused`: for each setting, the cache types that cannot be used, with the reason.
        """
        self._decided = {each.setting: each for each in decisions}
        self._show(settings)
        for key, control in self.controls.items():
            control.disable_choices({str(word): reason for word, reason in refused.get(key, {}).items()})
        self.rows.show_decisions(self._decided)

    def _show(self, settings: ContextSettings) -> None:
        self._settings = settings
        for key, control in self.controls.items():
            control.show_value(getattr(settings, key), self._decided.get(key))

    def set_side_files(
        self, names: SideFileNames, devices: tuple[str, ...], decisions: tuple[Decision, ...] = ()
    ) -> None:
        """Show the files that are loaded with the model.

        `devices`: ids of the devices that the projector can be on.
        `decisions`: values that Layerdeck has chosen for the next load. Those with the keys "projector", "adapters" and
        "draft" are shown.
        """
        self.side_files.set_names(names, devices, {each.setting: each for each in decisions})

    def show_row(self, key: str) -> None:
        """Scroll to the row of a setting or file, and give its control the keyboard focus.

        `key`: key of a setting, or one of `FILE_ROWS`.
        """
        found = self.controls[key].widgets if key in self.controls else (self.side_files.field(key),)
        widget = next((each for each in found if each.focusPolicy() != Qt.FocusPolicy.NoFocus), found[0])
        self._area.ensureWidgetVisible(widget)
        widget.setFocus(Qt.FocusReason.ShortcutFocusReason)

    def set_loaded(self, text: str) -> None:
        """Show a line with the settings of the loaded model; an empty text hides the line."""
        self.loaded_label.setText(text)
        self.loaded_label.setVisible(bool(text))

    def _on_edited(self) -> None:
        entered: dict[str, Any] = {key: control.value() for key, control in self.controls.items()}
        settings = replace(self._settings, **entered)
        # More parallel requests must not shorten each one's context, so `n_ctx` grows with their number.
        if settings.n_seq_max != self._settings.n_seq_max and settings.n_ctx == self._settings.n_ctx:
            settings = self._settings.with_requests(settings.n_seq_max)
        if settings != self._settings:
            self._show(settings)
            self.context_changed.emit(settings)


MOST_SCALE = 1000.0
SCALE_STEP = 0.1


class AdapterScale(Struct, frozen=True):
    """A new scale for a LoRA adapter. `index`: its index in the list of adapters."""

    index: int
    scale: float


class SideFileForm(QWidget):
    """Form for projector, LoRA adapters and draft.

    It emits requests only; its owner opens the file dialogs and reads the files.
    """

    projector_requested = Signal()
    projector_removed = Signal()
    projector_device_chosen = Signal(str)
    """Emitted with the id of the chosen device; empty for automatic."""
    adapter_requested = Signal()
    adapter_removed = Signal(int)
    adapter_scaled = Signal(AdapterScale)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.draft = DraftForm()
        self._names = SideFileNames()
        self.projector_label = ElidedLabel(tr("none"), "")
        self.choose_button = _button(tr("Choose…"))
        self.remove_button = _button(tr("Remove"))
        self.device_box = ComboBox()
        self.device_box.setAccessibleName(tr("Device of the projector"))
        self.add_button = _button(tr("Add…"))
        self.adapter_rows: list[AdapterRow] = []
        self._adapters = QVBoxLayout()
        self._adapters.setSpacing(4)
        self._none_label = plain_label(tr("none"), "")
        self.projector_line, self.adapters_line = (plain_label("", "dim", wrap=True) for _ in range(2))
        column = v_box(self, spacing=8)
        buttons = (self.device_box, self.remove_button, self.choose_button)
        column.addLayout(_line(FILE_ROWS["projector"], self.projector_label, *buttons))
        column.addWidget(self.projector_line)
        column.addLayout(_line(FILE_ROWS["adapters"], self._none_label, self.add_button))
        column.addLayout(self._adapters)
        column.addWidget(self.adapters_line)
        column.addWidget(self.draft)
        self.choose_button.clicked.connect(self.projector_requested)
        self.remove_button.clicked.connect(self.projector_removed)
        self.add_button.clicked.connect(self.adapter_requested)
        self.device_box.activated.connect(self._on_device_chosen)
        self.set_names(self._names, ())

    def set_names(
        self, names: SideFileNames, devices: tuple[str, ...], decisions: Mapping[str, Decision] | None = None
    ) -> None:
        """Show the files that are loaded with the model.

        `devices`: ids of the devices that the projector can be on.
        `decisions`: the decisions with the keys "projector", "adapters" and "draft".
        """
        self.draft.set_draft(names.draft, names.proposed_drafts, devices, has_mtp=names.has_mtp)
        lines = (("projector", self.projector_line), ("adapters", self.adapters_line), ("draft", self.draft.line))
        for setting, line in lines:
            decided = (decisions or {}).get(setting)
            line.setText("" if decided is None else decided_text(decided))
            line.setVisible(decided is not None)
        self.projector_label.setText(Path(names.projector).name if names.projector else tr("none"))
        self.projector_label.setToolTip(plain_tool_tip(names.projector))
        for widget in (self.device_box, self.remove_button):
            widget.setVisible(bool(names.projector))
        # Clearing and filling emit `currentIndexChanged`, but not `activated`, so nothing is reported.
        self.device_box.clear()
        self.device_box.addItems([AUTO, *devices])
        # A device that has gone away is still the chosen one.
        if names.device and names.device not in devices:
            self.device_box.addItem(names.device)
        self.device_box.setCurrentText(names.device or AUTO)
        self._none_label.setText("" if names.adapters else tr("none"))
        # Rows stay while the files do: a new scale comes from a box that has the keyboard focus, and must keep it.
        if [each.path for each in names.adapters] != [each.path for each in self._names.adapters]:
            self._rebuild(len(names.adapters))
        for row, adapter in zip(self.adapter_rows, names.adapters, strict=True):
            row.set_adapter(adapter)
        self._names = names

    def field(self, key: str) -> QWidget:
        """Return the control that chooses the file of a row. `key`: one of `FILE_ROWS`."""
        return {"projector": self.choose_button, "adapters": self.add_button, "draft": self.draft.kind_box}[key]

    def _rebuild(self, count: int) -> None:
        for row in self.adapter_rows:
            self._adapters.removeWidget(row)
            row.deleteLater()
        self.adapter_rows = [AdapterRow(index, self) for index in range(count)]
        for row in self.adapter_rows:
            row.removed.connect(self.adapter_removed)
            row.scaled.connect(self.adapter_scaled)
            self._adapters.addWidget(row)

    def _on_device_chosen(self) -> None:
        text = self.device_box.currentText()
        # The first entry is "auto", by its index: a device could have that name.
        self.projector_device_chosen.emit("" if self.device_box.currentIndex() == 0 else text)


class AdapterRow(QWidget):
    """The row of one LoRA adapter: name, scale, and a button to remove it."""

    removed = Signal(int)
    scaled = Signal(AdapterScale)

    def __init__(self, index: int, parent: QWidget) -> None:
        super().__init__(parent)
        self._index = index
        self.name_label = ElidedLabel("", "")
        self.scale_box = DoubleSpinBox()
        # llama.cpp takes any float as the scale of an adapter; a negative one subtracts it.
        self.scale_box.setRange(-MOST_SCALE, MOST_SCALE)
        self.scale_box.setSingleStep(SCALE_STEP)
        self.scale_box.setKeyboardTracking(False)
        self.scale_box.setAlignment(Qt.AlignmentFlag.AlignCenter)
        self.remove_button = _button(tr("Remove"))
        row = h_box(self, spacing=8, margins=(16, 0, 0, 0))
        row.addWidget(self.name_label, 1)
        row.addWidget(plain_label(tr("scale"), "dim"))
        row.addWidget(self.scale_box)
        row.addWidget(self.remove_button)
        self.scale_box.valueChanged.connect(lambda scale: self.scaled.emit(AdapterScale(self._index, scale)))
        self.remove_button.clicked.connect(lambda: self.removed.emit(self._index))

    def set_adapter(self, adapter: AdapterName) -> None:
        """Show name and scale of `adapter`."""
        name = Path(adapter.path).name
        self.name_label.setText(name)
        self.name_label.setToolTip(plain_tool_tip(adapter.path))
        self.scale_box.setAccessibleName(tr("Scale of {name}", name=name))
        show_real(self.scale_box, adapter.scale)


def _line(label: str, *widgets: QWidget) -> QHBoxLayout:
    row = QHBoxLayout()
    row.setSpacing(8)
    row.addWidget(plain_label(label, "dim"), 0, Qt.AlignmentFlag.AlignVCenter)
    for number, widget in enumerate(widgets):
        row.addWidget(widget, 1 if number == 0 else 0)
    return row


def _button(text: str) -> QPushButton:
    """Return a button that is not pressed by Enter in a field of the same dialog."""
    button = QPushButton(text)
    button.setAutoDefault(False)
    return button
