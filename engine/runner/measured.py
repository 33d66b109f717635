"""Folding the engine's own numbers, given per buffer type, into one row per device."""

from __future__ import annotations

from collections.abc import Iterable

from engine.devices.device import CPU_ID, Rig
from engine.fit.report import DeviceRow, make_row
from engine.memory.estimate import DeviceMemory, Grade
from engine.runner.protocol import Part


def rows_from_parts(parts: Iterable[Part], rig: Rig, grade: Grade) -> tuple[DeviceRow, ...]:
    """Return a row for every device of `rig`, the host last.

    Parts of devices that the rig does not have are left out. Overhead is 0: the engine does not tell it.
    """
    sums: dict[str, list[int]] = {device_id: [0] * 6 for device_id in rig.ids}
    for part in parts:
        row = sums.get(part.device)
        if row is None:
            continue
        # A file span mapped for the host is page cache and no need; one that a device works on is not reclaimable.
        row[1 if part.mapped and part.device == CPU_ID else 0] += part.weights_bytes
        row[2] += part.kv_cache_bytes
        row[3] += part.recurrent_bytes
        row[4] += part.compute_bytes
        row[5] += part.output_bytes
    return tuple(make_row(device, DeviceMemory(*sums[device.id]), grade) for device in rig.all_devices)
