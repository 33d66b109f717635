"""What all readers of one device have in common."""

from __future__ import annotations

from typing import Protocol

from engine.telemetry.sample import Sample


class Reader(Protocol):
    """Reads one device. Used by one thread at a time."""

    def read(self, time_s: float) -> Sample:
        """Return a reading, with None for what cannot be read; never raises for a device that went away."""


def gap(device: str, time_s: float, note: str) -> Sample:
    """Return a sample that says why there is nothing."""
    return Sample(device, time_s, used_bytes=None, total_bytes=None, note=note)


class NoReader:
    """A device that cannot be read here, and why."""

    def __init__(self, device: str, note: str) -> None:
        self._device = device
        self._note = note

    def read(self, time_s: float) -> Sample:
        return gap(self._device, time_s, self._note)
