"""The split mode as segments; a mode that cannot be had is listed and says why."""

from __future__ import annotations

from collections.abc import Mapping

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QButtonGroup, QHBoxLayout, QToolButton, QWidget

from engine.language import tr
from engine.layout.layout import SplitMode
from widgets.common.tool_tips import plain_tool_tip
from widgets.controls.metrics import CONTROL_HEIGHT_PX
from widgets.controls.states import SplitModeChoice

LABELS: Mapping[SplitMode, tuple[str, str]] = {
    "layer": (tr("Layer"), tr("Whole layers go to devices, one after the other")),
    "tensor": (tr("Tensor"), tr("Every layer is spread over the devices")),
    "row": (tr("Row"), tr("The rows of matrices are spread over the devices")),
    "none": (tr("One device"), tr("The whole model on one device")),
}


class SplitModeChooser(QWidget):
    """Reports what the person picks; shows what it is told."""

    mode_chosen = Signal(SplitModeChoice)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._buttons: dict[SplitMode, QToolButton] = {}
        group = QButtonGroup(self)
        group.setExclusive(True)
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(2)
        for mode, (text, _) in LABELS.items():
            button = QToolButton()
            button.setText(text)
            button.setCheckable(True)
            button.setProperty("role", "segment")
            button.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonTextOnly)
            button.setFixedHeight(CONTROL_HEIGHT_PX)
            group.addButton(button)
            button.clicked.connect(lambda _checked=False, chosen=mode: self.mode_chosen.emit(SplitModeChoice(chosen)))
            row.addWidget(button)
            self._buttons[mode] = button
        self.set_mode("layer", {})

    def set_mode(self, mode: SplitMode, disabled: Mapping[SplitMode, str]) -> None:
        """Show `mode` as chosen and the modes in `disabled` with their reason."""
        for candidate, button in self._buttons.items():
            button.setChecked(candidate == mode)
            button.setEnabled(candidate not in disabled)
            button.setToolTip(plain_tool_tip(disabled.get(candidate, LABELS[candidate][1])))

    @property
    def tensor_button(self) -> QToolButton:
        return self._buttons["tensor"]

    def button(self, mode: SplitMode) -> QToolButton:
        """Return the segment of `mode`."""
        return self._buttons[mode]
