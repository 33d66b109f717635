"""What loads took on each device besides what was forecast, kept between runs: it corrects the overhead next time.

Pure values and one small file. A device is known by its backend and by where it is, not by its id, which may change.
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
"""Differences kept for a device; the middle one counts, so that one odd load does not."""
KEPT_DEVICES = 64
MAX_FILE_BYTES = 1 << 16
MAX_OVERHEAD_BYTES = 2 * GIB
"""A process on a device takes some hundred MiB; what is beyond this was not forecast for another reason."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Overhead bytes that the last loads had on each device, the device that was loaded on last at the end."""

    overheads: Mapping[str, tuple[int, ...]]

    def overhead_bytes(self, device: Device) -> int | None:
        """Return what is to be added on `device`, None where nothing was loaded yet."""
        measured = self.overheads.get(device_key(device))
        return median_high(measured) if measured else None

    def apply(self, rig: Rig) -> Rig:
        """Return `rig` with the overhead that is known of its devices."""

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

        `grown_bytes` is how much more of a device is in use than before the load, for devices whose driver tells (all
        of it is ours then); of workers and of the host the engine's own numbers count. A card whose driver tells
        nothing, or always the same (Vulkan without VK_EXT_memory_budget), teaches nothing: what the engine tells of its
        buffers cannot contain an overhead. What is less than forecast counts as none: a forecast that is too high is no
        negative overhead. What is far more is no overhead either, but a wrong forecast.
        """
        expected = {row.id: row.need_bytes - row.overhead_bytes for row in forecast}
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
            overheads[key] = (*overheads.pop(key, ()), difference_bytes)[-KEPT_LOADS:]
        return Calibration(dict(list(overheads.items())[-KEPT_DEVICES:]))


NO_CALIBRATION = Calibration({})


class _Document(msgspec.Struct, frozen=True):
    version: int
    overhead_bytes: dict[str, tuple[int, ...]]


def device_key(device: Device) -> str:
    """Return what a device is known by from run to run."""
    place = device.pci_bus_id or (f"{device.endpoint}/{device.endpoint_device}" if device.endpoint else device.id)
    return f"{device.backend} {place.lower()}"


def read_calibration(path: Path) -> Calibration:
    """Return what was kept in `path`; a file that is missing, damaged, too large or of another version is none."""
    document = read_kept(path, _Document, MAX_FILE_BYTES)
    if document is None or document.version != VERSION:
        return NO_CALIBRATION
    return Calibration(
        {
            key: tuple(size for size in sizes if 0 <= size <= MAX_OVERHEAD_BYTES)[-KEPT_LOADS:]
            for key, sizes in list(document.overhead_bytes.items())[-KEPT_DEVICES:]
        }
    )


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Keep `calibration` in `path`; a reader finds the old file or the new one, whole.

    Raises:
        PlacedError: where it cannot be written.
    """
    document = _Document(version=VERSION, overhead_bytes=dict(calibration.overheads))
    write_kept(path, document, what="calibration", fail=PlacedError)
