"""Which projector and which LoRA adapters are loaded beside the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QComboBox, QDoubleSpinBox, QHBoxLayout, QPushButton, QVBoxLayout, QWidget

from engine.language import tr
from engine.plan.decisions.decision import Decision
from engine.settings.context_settings import AUTO
from widgets.common.elided_label import ElidedLabel
from widgets.common.roles import plain_label
from widgets.common.tool_tips import plain_tool_tip
from widgets.controls.decided import decided_text
from widgets.controls.states import AdapterName, SideFileNames

MOST_SCALE = 1000.0
SCALE_STEP = 0.1


@dataclass(frozen=True, slots=True)
class AdapterScale:
    """The person wants the adapter at `index` to count by `scale`."""

    index: int
    scale: float


class SideFileForm(QWidget):
    """Shows names and reports what the person asks for; files are chosen and read elsewhere."""

    projector_requested = Signal()
    projector_removed = Signal()
    projector_device_chosen = Signal(str)
    """A device's id, or empty to leave it open."""
    adapter_requested = Signal()
    adapter_removed = Signal(int)
    adapter_scaled = Signal(AdapterScale)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._names = SideFileNames()
        self.projector_label = ElidedLabel(tr("none"), "")
        self.choose_button = _button(tr("Choose…"))
        self.remove_button = _button(tr("Remove"))
        self.device_box = QComboBox()
        self.device_box.setAccessibleName(tr("Device of the projector"))
        self.add_button = _button(tr("Add…"))
        self.adapter_rows: list[AdapterRow] = []
        self._adapters = QVBoxLayout()
        self._adapters.setSpacing(4)
        self._none_label = plain_label(tr("none"), "")
        self.projector_line, self.adapters_line = (plain_label("", "dim", wrap=True) for _ in range(2))
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(8)
        buttons = (self.device_box, self.remove_button, self.choose_button)
        column.addLayout(_line(tr("Projector"), self.projector_label, *buttons))
        column.addWidget(self.projector_line)
        column.addLayout(_line(tr("LoRA adapters"), self._none_label, self.add_button))
        column.addLayout(self._adapters)
        column.addWidget(self.adapters_line)
        self.choose_button.clicked.connect(self.projector_requested)
        self.remove_button.clicked.connect(self.projector_removed)
        self.add_button.clicked.connect(self.adapter_requested)
        self.device_box.activated.connect(self._on_device_chosen)
        self.set_names(self._names, ())

    def set_names(
        self, names: SideFileNames, devices: tuple[str, ...], decisions: Mapping[str, Decision] | None = None
    ) -> None:
        """Show what is loaded beside the model; `devices` are the ids that the projector may go to."""
        for setting, line in (("projector", self.projector_line), ("adapters", self.adapters_line)):
            decided = (decisions or {}).get(setting)
            line.setText("" if decided is None else decided_text(decided))
            line.setVisible(decided is not None)
        self.projector_label.setText(Path(names.projector).name if names.projector else tr("none"))
        self.projector_label.setToolTip(plain_tool_tip(names.projector))
        for widget in (self.device_box, self.remove_button):
            widget.setVisible(bool(names.projector))
        self.device_box.clear()
        self.device_box.addItems([AUTO, *devices])
        self.device_box.setCurrentText(names.device or AUTO)
        self._none_label.setText("" if names.adapters else tr("none"))
        if [each.path for each in names.adapters] != [each.path for each in self._names.adapters]:
            self._rebuild(len(names.adapters))
        for row, adapter in zip(self.adapter_rows, names.adapters, strict=True):
            row.set_adapter(adapter)
        self._names = names

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
        self.projector_device_chosen.emit("" if self.device_box.currentIndex() == 0 else text)


class AdapterRow(QWidget):
    """One adapter: its name, what it counts, and a way to take it off."""

    removed = Signal(int)
    scaled = Signal(AdapterScale)

    def __init__(self, index: int, parent: QWidget) -> None:
        super().__init__(parent)
        self._index = index
        self.name_label = ElidedLabel("", "")
        self.scale_box = QDoubleSpinBox()
        self.scale_box.setRange(-MOST_SCALE, MOST_SCALE)
        self.scale_box.setSingleStep(SCALE_STEP)
        self.scale_box.setKeyboardTracking(False)
        self.scale_box.setAlignment(Qt.AlignmentFlag.AlignCenter)
        self.remove_button = _button(tr("Remove"))
        row = QHBoxLayout(self)
        row.setContentsMargins(16, 0, 0, 0)
        row.setSpacing(8)
        row.addWidget(self.name_label, 1)
        row.addWidget(plain_label("by", "dim"))
        row.addWidget(self.scale_box)
        row.addWidget(self.remove_button)
        self.scale_box.valueChanged.connect(lambda scale: self.scaled.emit(AdapterScale(self._index, scale)))
        self.remove_button.clicked.connect(lambda: self.removed.emit(self._index))

    def set_adapter(self, adapter: AdapterName) -> None:
        """Show an adapter."""
        name = Path(adapter.path).name
        self.name_label.setText(name)
        self.name_label.setToolTip(plain_tool_tip(adapter.path))
        self.scale_box.setAccessibleName(tr("What {name} counts", name=name))
        blocked = self.scale_box.blockSignals(True)
        self.scale_box.setValue(adapter.scale)
        self.scale_box.blockSignals(blocked)


def _line(label: str, *widgets: QWidget) -> QHBoxLayout:
    row = QHBoxLayout()
    row.setSpacing(8)
    row.addWidget(plain_label(label, "dim"), 0, Qt.AlignmentFlag.AlignVCenter)
    for number, widget in enumerate(widgets):
        row.addWidget(widget, 1 if number == 0 else 0)
    return row


def _button(text: str) -> QPushButton:
    """Return a button that Enter in a field of the same dialog does not press."""
    button = QPushButton(text)
    button.setAutoDefault(False)
    return button
