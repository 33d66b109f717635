"""One live reading of a device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """A reading at `time_s` (monotonic clock). None is a gap, zero a measurement.

    `own_bytes` is what our own children hold of `used_bytes`. `spilled_bytes` is what the system keeps in slower memory
    instead: of a card in the computer's memory (all programs), of the host in swap (our children). `major_faults`
    counts pages that our children had to read from disk.
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
