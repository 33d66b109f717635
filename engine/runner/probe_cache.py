"""What probes told, kept for as long as the program runs: the same file, parameters and devices give the same bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable

import msgspec

from engine.fit.report import DeviceRow, make_row
from engine.runner.job import LoadJob

CAPACITY = 128


class ProbeCache:
    """The latest probes, the least used going first. Thread-safe."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._rows: OrderedDict[Hashable, tuple[DeviceRow, ...]] = OrderedDict()

    def find(self, job: LoadJob) -> tuple[DeviceRow, ...] | None:
        """Return rows as of the devices' memory now, None where this was not probed or the file has changed since."""
        key = _key(job)
        with self._lock:
            rows = self._rows.get(key) if key is not None else None
            if rows is None:
                return None
            self._rows.move_to_end(key)
        devices = {device.id: device for device in job.rig.all_devices}
        return tuple(make_row(devices[row.id], row.memory, row.grade) for row in rows)

    def keep(self, job: LoadJob, rows: tuple[DeviceRow, ...]) -> None:
        """Remember the rows of a probe."""
        key = _key(job)
        if key is None:
            return
        with self._lock:
            self._rows[key] = rows
            self._rows.move_to_end(key)
            while len(self._rows) > self._capacity:
                self._rows.popitem(last=False)


def _key(job: LoadJob) -> Hashable | None:
    """Return what the engine's plan depends on (not on threads and free memory); None for a file that is gone.

    Raises:
        RuleViolationError, LayoutError: for a layout that cannot be loaded.
    """
    try:
        states = [(str(path), path.stat()) for path in job.model.paths]
    except OSError:
        return None
    files = tuple((path, state.st_size, state.st_mtime_ns) for path, state in states)
    context = msgspec.structs.replace(job.context, threads=None, threads_batch=None)
    devices = tuple(
        (device.id, device.backend, device.endpoint, device.endpoint_device, device.pci_bus_id, device.overhead_bytes)
        for device in job.rig.all_devices
    )
    return (files, job.parameters(), context, devices, job.side_files)
