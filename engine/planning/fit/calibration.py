"""Overhead of loads on each device: measured bytes beyond the forecast, saved between runs for the next forecast.

Pure values and one small file. A device is identified by its backend and its bus address or endpoint, because its id
may change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median_high

import msgspec

from engine.base.errors import PlacedError
from engine.base.json_file import read_kept, write_kept
from engine.base.units import GIB
from engine.devices.device import CPU_ID, Device, Rig
from engine.planning.plan.report import DeviceRow

VERSION = 1
KEPT_LOADS = 5
"""Differences that are saved for a device. Their median counts, so that a single odd load does not matter."""
KEPT_DEVICES = 64
MAX_FILE_BYTES = 1 << 16
MAX_OVERHEAD_BYTES = 2 * GIB
"""Largest accepted overhead. A process takes some hundred MiB; a larger difference is an error of the forecast."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Overhead in bytes of the last loads on each device. The device of the latest load is the last one."""

    overheads: Mapping[str, tuple[int, ...]]

    def overhead_bytes(self, device: Device) -> int | None:
        """Return the overhead of a load on `device` in bytes, None if it is not known yet."""
        measured = self.overheads.get(device_key(device))
        # The higher of two middle values: too much overhead costs some room, too little a failed load.
        return median_high(measured) if measured else None

    def apply(self, rig: Rig) -> Rig:
        """Return `rig` with the known overhead of its devices."""

        def corrected(device: Device) -> Device:
            overhead_bytes = self.overhead_bytes(device)
            if device.overhead_bytes == overhead_bytes:
                return device
            return replace(device, overhead_bytes=overhead_bytes)

        return Rig(tuple(map(corrected, rig.devices)), corrected(rig.host))

    def with_load(
        self, rig: Rig, forecast: Sequence[DeviceRow], measured: Sequence[DeviceRow], grown_bytes: Mapping[str, int]
    ) -> Calibration:
        """Return the calibration after a load.

        For workers and the host, the engine's own numbers count. A card without a driver reading, or with a constant
        one (Vulkan without VK_EXT_memory_budget), is left out: the engine reports its buffers, which contain no
        overhead. If less is used than forecast, the overhead is 0. A difference above `MAX_OVERHEAD_BYTES` is an error
        of the forecast and is left out.

        `grown_bytes`: growth of the memory in use during the load, by device, for devices whose driver reports it.
        """
        # The warm-up takes what comes while it answers, but for what comes as the context fills.
        expected = {row.id: row.need_bytes - row.overhead_bytes - row.late_bytes for row in forecast}
        overheads = dict(self.overheads)
        for row in measured:
            device = rig.device(row.id)
            if device is None or not row.need_bytes or not expected.get(row.id):
                continue
            taken_bytes = grown_bytes.get(row.id, row.need_bytes if device.is_rpc or device.id == CPU_ID else 0)
            if not taken_bytes:
                continue
            difference_bytes = max(0, taken_bytes - expected[row.id])
            if difference_bytes > MAX_OVERHEAD_BYTES:
                continue
            key = device_key(device)
            # Taken out and put in again, so that the device loaded last is at the end and the oldest one is dropped.
            overheads[key] = (*overheads.pop(key, ()), difference_bytes)[-KEPT_LOADS:]
        return Calibration(dict(list(overheads.items())[-KEPT_DEVICES:]))


NO_CALIBRATION = Calibration({})


class _Document(msgspec.Struct, frozen=True):
    version: int
    overhead_bytes: dict[str, tuple[int, ...]]


def device_key(device: Device) -> str:
    """Return the key of a device, which stays the same from run to run."""
    place = device.pci_bus_id or (f"{device.endpoint}/{device.endpoint_device}" if device.endpoint else device.id)
    return f"{device.backend} {place.lower()}"


def read_calibration(path: Path) -> Calibration:
    """Return the calibration of `path`; empty if the file is missing, damaged, too large or of another version."""
    document = read_kept(path, _Document, MAX_FILE_BYTES)
    if document is None or document.version != VERSION:
        return NO_CALIBRATION
    return Calibration(
        {
            # The same limits as for measured values, because people may have edited the file.
            key: tuple(size for size in sizes if 0 <= size <= MAX_OVERHEAD_BYTES)[-KEPT_LOADS:]
            for key, sizes in list(document.overhead_bytes.items())[-KEPT_DEVICES:]
        }
    )


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write `calibration` to `path`. The write is atomic: a reader finds the old file or the new one.

    Raises:
        PlacedError: the file cannot be written.
    """
    document = _Document(version=VERSION, overhead_bytes=dict(calibration.overheads))
    write_kept(path, document, what="calibration", fail=PlacedError)
