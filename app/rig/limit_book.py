"""Caps and margins that people gave devices, kept between runs by what a device is known by."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from app.settings import Settings
from engine.devices.device import Device
from engine.planning.fit.calibration import device_key

MAX_DEVICES = 64


class KeptLimits(msgspec.Struct, frozen=True):
    """Cap (None: none) and margin in bytes by device."""

    devices: dict[str, tuple[int | None, int]] = {}


class LimitBook:
    """Without settings it lasts for one run."""

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings
        self._kept = (None if settings is None else settings.kept("device_limits", KeptLimits)) or KeptLimits()

    def apply(self, device: Device) -> Device:
        """Return `device` with the limits that it was given once, itself where it never was."""
        limits = self._kept.devices.get(device_key(device))
        return device if limits is None else replace(device, cap_bytes=limits[0], margin_bytes=limits[1])

    def keep(self, device: Device) -> None:
        """Remember the limits of `device`."""
        kept = {key: limits for key, limits in self._kept.devices.items() if key != device_key(device)}
        kept[device_key(device)] = (device.cap_bytes, device.margin_bytes)
        self._kept = KeptLimits(dict(list(kept.items())[-MAX_DEVICES:]))
        if self._settings is not None:
            self._settings.keep("device_limits", self._kept)
