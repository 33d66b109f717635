"""The dialog for a device's cap and margin."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QDialog, QDialogButtonBox, QFormLayout, QLineEdit, QVBoxLayout, QWidget

from engine.devices.device import Device, margin_words
from engine.language import tr
from engine.units import GIB, KIB, MIB, format_bytes
from widgets.common.roles import plain_label
from widgets.devices.limits import DeviceLimits, parse_limits
from widgets.devices.readings import overhead_text


class LimitsDialog(QDialog):
    """Asks for sizes such as "512MiB" and stays open, with a sentence, until they can be used."""

    limits_accepted = Signal(DeviceLimits)

    def __init__(self, device: Device, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._device = device
        self.setWindowTitle(tr("Limits of {id}", id=device.id))
        self.cap_edit = QLineEdit("" if device.cap_bytes is None else editable_size(device.cap_bytes))
        self.cap_edit.setPlaceholderText(tr("none: up to {total}", total=format_bytes(device.total_bytes)))
        self.margin_edit = QLineEdit(editable_size(device.margin_bytes))
        self.error_label = plain_label("", "error", wrap=True)
        buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Ok | QDialogButtonBox.StandardButton.Cancel)
        buttons.accepted.connect(self.accept)
        buttons.rejected.connect(self.reject)
        form = QFormLayout()
        form.addRow(tr("Never plan more than"), self.cap_edit)
        form.addRow(tr("Leave free"), self.margin_edit)
        layout = QVBoxLayout(self)
        layout.addWidget(plain_label(tr("Sizes are written like 512MiB or 1.5GiB."), "dim"))
        layout.addLayout(form)
        layout.addWidget(plain_label(overhead_text(device), "dim", wrap=True))
        layout.addWidget(plain_label(margin_words(device), "dim", wrap=True))
        layout.addWidget(self.error_label)
        layout.addWidget(buttons)
        self.setMinimumWidth(360)

    def accept(self) -> None:
        """Close and report the limits, or say what is wrong with them."""
        try:
            limits = parse_limits(
                self._device.id, self.cap_edit.text(), self.margin_edit.text(), self._device.total_bytes
            )
        except ValueError as error:
            self.error_label.setText(str(error))
            return
        super().accept()
        self.limits_accepted.emit(limits)


def editable_size(size_bytes: int) -> str:
    """Return `size_bytes` so that reading it back gives the same number."""
    for factor, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size_bytes and size_bytes % factor == 0:
            return f"{size_bytes // factor}{unit}"
    return str(size_bytes)
