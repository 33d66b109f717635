"""Changes of memory caps and margins by the user: applied to the device in the list, and stored."""

from __future__ import annotations

from PySide6.QtCore import QObject

from app.rig.lab import Lab
from app.rig.limit_store import LimitStore
from app.rig.live_rig import LiveRig
from widgets.devices.limits import DeviceLimits


class LimitSetter(QObject):
    """Sets the cap and margin of a device.

    The limits are stored for later runs, except those of lab workers and of devices of a rig file.
    """

    def __init__(self, live: LiveRig, lab: Lab, book: LimitStore, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._live = live
        self._lab = lab
        self._book = book

    def set(self, limits: DeviceLimits) -> None:
        """Set the memory cap and margin of a device in the list, and store them."""
        self._live.set_devices(self._live.devices.with_limits(limits.device, limits.cap_bytes, limits.margin_bytes))
        devices = self._live.devices
        device = devices.rig.device(limits.device)
        if device is not None and not devices.from_file and device.endpoint not in self._lab.endpoints:
            self._book.keep(device)
