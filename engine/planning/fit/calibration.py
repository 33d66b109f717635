"""Memory that loads took on each device beyond llama.cpp's buffers ("overhead"), saved for later forecasts.

`Calibration` is immutable; `read_calibration` and `write_calibration` access its file. A device is identified by its
backend and its bus address or endpoint, because its id may change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median_high

from msgspec import Struct

from engine.base.errors import DocumentError
from engine.base.json_file import change_struct, read_struct, write_struct
from engine.base.units import GIB
from engine.base.values import replace
from engine.devices.device import CPU_ID, ComputingNeed, Device, Rig, device_key
from engine.planning.plan.plan import Plan
from engine.planning.plan.report import DeviceRow

VERSION = 1
MAX_LOADS = 5
"""Number of latest loads whose overhead is saved for each device.

Their median is used, so one odd load has no effect.
"""
MAX_STORED_DEVICES = 64
MAX_FILE_BYTES = 1 << 16
MAX_OVERHEAD_BYTES = 2 * GIB
"""Largest overhead that is saved. A process takes some hundred MiB; a larger difference is an error of the forecast."""
MAX_COMPUTING_BYTES = 8 * GIB
"""Largest need (bytes beyond llama.cpp's buffers while a model computes) that is saved.

If a measured need is larger, another program has probably allocated memory.
"""


class Calibration(Struct, frozen=True):
    """Memory that earlier loads needed on each device beyond llama.cpp's buffers (overhead).

    `overheads`: overhead in bytes of the last loads, by device key; the device of the latest load is the last key.
    `computing`: memory that models take while they compute (`ComputingNeed`), recorded when a model ran out of memory;
    latest last.
    """

    overheads: Mapping[str, tuple[int, ...]]
    computing: tuple[ComputingNeed, ...] = ()

    def overhead_bytes(self, device: Device) -> int | None:
        """Return the median overhead in bytes (memory beyond llama.cpp's buffers) of the last loads on `device`.

        None if there were no loads.
        """
        measured = self.overheads.get(device_key(device))
        # The higher of two middle values: too much overhead costs some room, too little a failed load.
        return median_high(measured) if measured else None

    def apply(self, rig: Rig) -> Rig:
        """Return `rig` with each device's `overhead_bytes` and `computing` set to the saved values."""

        def corrected(device: Device) -> Device:
            overhead_bytes, key = self.overhead_bytes(device), device_key(device)
            computing = tuple(need for need in self.computing if need.device == key)
            if device.overhead_bytes == overhead_bytes and device.computing == computing:
                return device
            return replace(device, overhead_bytes=overhead_bytes, computing=computing)

        return Rig(tuple(map(corrected, rig.devices)), corrected(rig.host))

    def with_load(
        self, rig: Rig, forecast: Sequence[DeviceRow], measured: Sequence[DeviceRow], grown_bytes: Mapping[str, int]
    ) -> Calibration:
        """Return the calibration with the overhead of one more load.

        The overhead of a device is the memory that the load took, less the forecast of llama.cpp's buffers, at least 0.
        The memory that the load took is the value in `grown_bytes`. If an RPC worker or the host has no value there,
        the size in `measured` is used.

        These devices are skipped:
        - other local devices without a value in `grown_bytes`, because llama.cpp does not report their overhead;
        - devices whose used memory never grows, because the driver reports a constant (Vulkan without
          VK_EXT_memory_budget);
        - devices with an overhead above `MAX_OVERHEAD_BYTES`, which is an error of the forecast.

        `forecast`: memory of each device as forecast before the load.
        `measured`: memory of each device as llama.cpp reported it after the load.
        `grown_bytes`: growth of used memory during the load as reported by the driver, by device id.
        """
        # The warm-up takes what comes while it answers, but for what comes as the context fills.
        # A forecast without a probe has no compute buffer of the projector, so that the measured one counts.
        expected = {
            row.id: row.need_bytes - row.overhead_bytes - row.late_bytes - row.projector_bytes for row in forecast
        }
        overheads = dict(self.overheads)
        for row in measured:
            device = rig.device(row.id)
            if device is None or not row.need_bytes or not expected.get(row.id):
                continue
            taken_bytes = grown_bytes.get(row.id, row.need_bytes if device.is_rpc or device.id == CPU_ID else 0)
            if not taken_bytes:
                continue
            difference_bytes = max(0, taken_bytes - expected[row.id] - row.projector_bytes)
            if difference_bytes > MAX_OVERHEAD_BYTES:
                continue
            key = device_key(device)
            # Taken out and put in again, so that the device loaded last is at the end and the oldest one is dropped.
            overheads[key] = (*overheads.pop(key, ()), difference_bytes)[-MAX_LOADS:]
        return replace(self, overheads=dict(list(overheads.items())[-MAX_STORED_DEVICES:]))

    def with_need(self, need: ComputingNeed) -> Calibration:
        """Return the calibration with `need` added: the extra memory of a model that ran out of memory while computing.

        It replaces an earlier one with the same device, model and settings. The calibration is unchanged if the bytes
        of `need` are not plausible.
        """
        if not 0 < need.overhead_bytes <= MAX_COMPUTING_BYTES:
            return self
        others = (each for each in self.computing if not (need.covers(each) and each.covers(need)))
        return replace(self, computing=(*others, need)[-MAX_STORED_DEVICES:])


NO_CALIBRATION = Calibration({})


def computing_need(plan: Plan, device_id: str) -> ComputingNeed | None:
    """Return a lower bound of the overhead of `plan` on a device that ran out of memory while the model computed.

    Overhead is memory beyond llama.cpp's buffers. The memory that the forecast left free for it was not enough, so the
    bound is one byte more than that memory. None if the free memory of the device is unknown.
    """
    device = plan.rig.device(device_id)
    row = next((row for row in plan.forecast if row.id == device_id), None)
    if device is None or row is None or device.free_bytes is None or not row.need_bytes:
        return None
    left_bytes = device.available_bytes - (row.need_bytes - row.overhead_bytes)
    return replace(plan.computing(device), overhead_bytes=max(row.overhead_bytes, left_bytes) + 1)


class _Document(Struct, frozen=True, omit_defaults=True):
    version: int
    overhead_bytes: dict[str, tuple[int, ...]]
    computing: tuple[ComputingNeed, ...] = ()


def read_calibration(path: Path) -> Calibration:
    """Return the calibration of `path`; empty if the file is missing, damaged, too large or of another version."""
    document = read_struct(path, _Document, MAX_FILE_BYTES, version=VERSION)
    if document is None:
        return NO_CALIBRATION
    return Calibration(
        {
            # The same limits as for measured values, because people may have edited the file.
            key: tuple(size for size in sizes if 0 <= size <= MAX_OVERHEAD_BYTES)[-MAX_LOADS:]
            for key, sizes in list(document.overhead_bytes.items())[-MAX_STORED_DEVICES:]
        },
        tuple(need for need in document.computing if 0 < need.overhead_bytes <= MAX_COMPUTING_BYTES)[
            -MAX_STORED_DEVICES:
        ],
    )


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write `calibration` to `path`. The write is atomic: a reader finds the old file or the new one.

    Raises:
        DocumentError: the file cannot be written.
    """
    document = _Document(VERSION, dict(calibration.overheads), calibration.computing)
    write_struct(path, document, what="calibration", fail=DocumentError)


def change_calibration(path: Path, change: Callable[[Calibration], Calibration]) -> None:
    """Pass the calibration in the file `path` to `change`, and write the result back. The file is locked meanwhile.

    Raises:
        DocumentError: the file cannot be written.
    """
    change_struct(path, read_calibration, change, write_calibration, what="calibration", fail=DocumentError)
