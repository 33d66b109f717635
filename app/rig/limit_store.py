"""Memory caps and margins of devices that the user has set, stored in the settings for later runs."""

from __future__ import annotations

from msgspec import Struct

from app.settings import Settings
from engine.base.values import replace
from engine.devices.device import Device, device_key

MAX_DEVICES = 64


class StoredLimits(Struct, frozen=True):
    """Stored limits of devices.

    `devices`: (memory cap, margin) in bytes by device key. A cap of None means no cap.
    """

    devices: dict[str, tuple[int | None, int]] = {}


class LimitStore:
    """The stored memory caps and margins of devices.

    `settings`: where they are stored; None: they are kept in memory, and lost when the window closes.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings
        self._stored = StoredLimits()
        self._read()

    def apply(self, device: Device) -> Device:
        """Return `device` with its stored cap and margin; unchanged if none are stored."""
        limits = self._stored.devices.get(device_key(device))
        return device if limits is None else replace(device, cap_bytes=limits[0], margin_bytes=limits[1])

    def keep(self, device: Device) -> None:
        """Store the cap and margin of `device`; the oldest entries above `MAX_DEVICES` are dropped."""
        self._read()
        stored = {key: limits for key, limits in self._stored.devices.items() if key != device_key(device)}
        stored[device_key(device)] = (device.cap_bytes, device.margin_bytes)
        # The newest is at the end; the oldest are dropped, so that ports of past workers do not pile up.
        self._stored = StoredLimits(dict(list(stored.items())[-MAX_DEVICES:]))
        if self._settings is not None:
            self._settings.keep("device_limits", self._stored)

    def _read(self) -> None:
        """Read the stored limits, which another window may have changed."""
        if self._settings is not None:
            self._settings.sync()
            self._stored = self._settings.kept("device_limits", StoredLimits) or StoredLimits()
