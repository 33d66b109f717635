"""One live reading of a device (`Sample`), the interface of readers, and the processes that hold a device's memory."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from engine.base.language import tr
from engine.base.units import format_bytes


class CardState(Struct, frozen=True):
    """Further readings of a card. A value is None if the driver does not report it.

    `power_limit_w`: power at which the driver lowers the clocks.
    `core_clock_mhz`, `memory_clock_mhz`: present clocks.
    `pcie_generation`, `pcie_lanes`: present link to the host; an idle card lowers its generation.
    `throttled_by`: why the clocks are lowered, in words; empty: nothing lowers them.
    """

    power_limit_w: float | None = None
    core_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    pcie_generation: int | None = None
    pcie_lanes: int | None = None
    throttled_by: tuple[str, ...] = ()


class Sample(Struct, frozen=True):
    """A reading of a device at `time_s` (monotonic clock). A value is None if it could not be read; 0 is a measured
    value.

    `own_bytes`: the part of `used_bytes` that our child processes hold.
    `note`: why there is no reading; empty if there is one.
    `spilled_bytes`: bytes that were moved to slower memory: from a card to host memory (of all programs), or from the
    host's memory to swap space (of our child processes).
    `major_faults`: number of pages that our child processes had to read from disk since their start.
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
    """Reads the samples of one device. Only one thread may use it at a time."""

    def read(self, time_s: float) -> Sample:
        """Return a sample, with None for values that cannot be read. Never raises, even if the device is gone.

        `time_s`: present time of the monotonic clock, for the sample.
        """


def gap(device: str, time_s: float, note: str) -> Sample:
    """Return a sample of the device with the id `device` that has no values.

    `time_s`: time of the monotonic clock.
    `note`: why there are no values.
    """
    return Sample(device, time_s, used_bytes=None, total_bytes=None, note=note)


class NoReader:
    """Reader of a device that cannot be read; its samples have no values. `note`: the reason."""

    def __init__(self, device: str, note: str) -> None:
        self._device = device
        self._note = note

    def read(self, time_s: float) -> Sample:
        return gap(self._device, time_s, self._note)


class MemoryHolder(Struct, frozen=True, kw_only=True):
    """A process that holds memory of a device.

    `held_bytes`: bytes that the process holds; None: the driver does not report them.
    `ours`: whether it is this process or one of its children.
    """

    pid: int
    name: str
    held_bytes: int | None = None
    ours: bool = False


def holder_text(holder: MemoryHolder) -> str:
    """Return a process as text, such as "firefox (1234) 1.20 GiB", with a remark if the process is ours."""
    size = tr("an unknown amount") if holder.held_bytes is None else format_bytes(holder.held_bytes)
    return f"{holder.name} ({holder.pid}) {size}{tr(', this program') if holder.ours else ''}"
