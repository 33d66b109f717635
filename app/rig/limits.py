"""Caps and margins as people set them: on the device shown, and kept for later runs."""

from __future__ import annotations

from PySide6.QtCore import QObject

from app.rig.lab import Lab
from app.rig.limit_book import LimitBook
from app.rig.live_rig import LiveRig
from widgets.devices.limits import DeviceLimits


class LimitSetter(QObject):
    """Keeps no limits of devices that another run does not have: those of a rig file and the lab's."""

    def __init__(self, live: LiveRig, lab: Lab, book: LimitBook, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._live = live
        self._lab = lab
        self._book = book

    def set(self, limits: DeviceLimits) -> None:
        """Set how much of a device may be planned."""
        self._live.set_devices(self._live.devices.with_limits(limits.device, limits.cap_bytes, limits.margin_bytes))
        devices = self._live.devices
        device = devices.rig.device(limits.device)
        if device is not None and not devices.from_file and device.endpoint not in self._lab.endpoints:
            self._book.keep(device)
