"""One live reading of a device, and the interface of its readers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class CardState:
    """Further readings of a card, for its details. None where the driver gives none.

    `power_limit_w`: power at which the driver lowers the clocks.
    `core_clock_mhz`, `memory_clock_mhz`: clocks of this moment.
    `pcie_generation`, `pcie_lanes`: link to the host at this moment; an idle card lowers its generation.
    `throttled_by`: why the clocks are lower than they could be, in words; empty if nothing lowers them.
    """

    power_limit_w: float | None = None
    core_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    pcie_generation: int | None = None
    pcie_lanes: int | None = None
    throttled_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """A reading at `time_s` (monotonic clock). None is a gap, zero a measurement.

    `own_bytes`: part of `used_bytes` that our children hold.
    `spilled_bytes`: memory moved to slower memory: of a card to host memory (all programs), of the host to swap (our
    children).
    `major_faults`: pages that our children had to read from disk, since their start.
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
    card: CardState | None = None


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
