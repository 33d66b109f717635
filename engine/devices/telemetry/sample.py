"""One live reading of a device, and the interface of its readers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Sample:
    """A reading at `time_s` (monotonic clock). None is a gap, zero a measurement.

    `own_bytes`: part of `used_bytes` that our children hold.
    `spilled_bytes`: memory moved to slower memory: of a card to host memory (all programs), of the host to swap (our
    children).
    `major_faults`: pages that our children had to read from disk, since their start.
    `clock_mhz`: clock of the card's processors. `throttled`: why it is lowered, empty if it is not or that is unknown.
    """

    device: str
    time_s: float
    used_bytes: int | None
    total_bytes: int | None
    own_bytes: int | None = None
    utilization_percent: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    note: str = ""
    spilled_bytes: int | None = None
    major_faults: int | None = None
    clock_mhz: float | None = None
    throttled: str = ""


class Reader(Protocol):
    """Reads one device. Used by one thread at a time."""

    def read(self, time_s: float) -> Sample:
        """Return a reading, with None for values that cannot be read. Never raises, also if the device is gone."""


def gap(device: str, time_s: float, note: str) -> Sample:
    """Return a sample without values; `note` says why."""
    return Sample(device, time_s, used_bytes=None, total_bytes=None, note=note)


class NoReader:
    """Reader for a device that cannot be read here. `note` says why."""

    def __init__(self, device: str, note: str) -> None:
        self._device = device
        self._note = note

    def read(self, time_s: float) -> Sample:
        return gap(self._device, time_s, self._note)
