"""Limits of a device: the cap and the margin that a person may set, and the dialog for them."""

from __future__ import annotations

from msgspec import Struct
from PySide6.QtWidgets import QFormLayout, QLineEdit, QWidget

from engine.base.language import tr
from engine.base.units import GIB, KIB, MIB, format_bytes, parse_size
from engine.devices.device import Device, margin_text
from widgets.common.dialog import EntryDialog
from widgets.common.roles import plain_label
from widgets.devices.readings import overhead_text


class DeviceLimits(Struct, frozen=True):
    """Limits on the memory of `device` that layouts use.

    `cap_bytes`: the most memory that layouts use; None for no cap.
    `margin_bytes`: memory that stays free.
    """

    device: str
    cap_bytes: int | None
    margin_bytes: int


def parse_limits(device: str, cap: str, margin: str, total_bytes: int) -> DeviceLimits:
    """Return the limits that a person typed for a device. An empty cap means no cap, an empty margin means 0.

    `device`: id of the device.
    `cap`, `margin`: the typed texts.
    `total_bytes`: memory of the device, which must be larger than the margin; 0 if unknown.

    Raises:
        ValueError: with a sentence that names the field and the accepted form.
    """
    cap_bytes = _size(tr("Cap"), cap) if cap.strip() else None
    margin_bytes = _size(tr("Margin"), margin) if margin.strip() else 0
    if cap_bytes == 0:
        raise ValueError(tr("A cap of 0 leaves no memory. For no cap, leave the field empty"))
    # A total of 0 is unknown: then any margin is accepted.
    room_bytes = total_bytes if cap_bytes is None else min(cap_bytes, total_bytes)
    if room_bytes and margin_bytes >= room_bytes:
        raise ValueError(
            tr("The margin must be smaller than {size}, the memory that may be used", size=format_bytes(room_bytes))
        )
    return DeviceLimits(device, cap_bytes, margin_bytes)


def _size(field: str, text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from error


class LimitsDialog(EntryDialog):
    """Dialog for cap and margin of a device, entered as sizes such as "512MiB"."""

    def __init__(self, device: Device, parent: QWidget | None = None) -> None:
        super().__init__(tr("Limits of {id}", id=device.id), parent, once=True)
        self._device = device
        self.cap_edit = QLineEdit("" if device.cap_bytes is None else editable_size(device.cap_bytes))
        self.cap_edit.setPlaceholderText(tr("no cap: all {total}", total=format_bytes(device.total_bytes)))
        self.margin_edit = QLineEdit(editable_size(device.margin_bytes))
        form = QFormLayout()
        form.addRow(tr("Maximum memory to use"), self.cap_edit)
        form.addRow(tr("Memory to leave free"), self.margin_edit)
        self.lay_out(
            plain_label(tr("Write sizes such as 512MiB, 120M or 1.5GB."), "dim"),
            form,
            plain_label(overhead_text(device), "dim", wrap=True),
            plain_label(margin_text(device), "dim", wrap=True),
        )
        self.setMinimumWidth(360)

    def entry(self) -> DeviceLimits:
        """Return the entered limits.

        Raises:
            ValueError: if the entered limits cannot be used. The message is a sentence for the user.
        """
        return parse_limits(self._device.id, self.cap_edit.text(), self.margin_edit.text(), self._device.total_bytes)


def editable_size(size_bytes: int) -> str:
    """Return `size_bytes` as text that `parse_size` reads back exactly."""
    # Only a unit that divides the size: a rounded text would change the limit when OK is pressed without an edit.
    for factor, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size_bytes and size_bytes % factor == 0:
            return f"{size_bytes // factor}{unit}"
    return str(size_bytes)
