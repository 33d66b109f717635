"""Live readings of RPC workers on this machine, by their process."""

from __future__ import annotations

from dataclasses import dataclass

from engine.devices.device import Device
from engine.language import tr
from engine.telemetry.process_memory import data_bytes, listening_pid, resident_bytes
from engine.telemetry.reader import gap
from engine.telemetry.sample import Sample

LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost"})
LOOK_AGAIN_S = 5.0
"""Finding the process of a port reads the whole process table."""


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """A worker that we started: its process and its VmData before any allocation, in bytes."""

    pid: int
    baseline_bytes: int


def is_local(endpoint: str) -> bool:
    """Return whether the endpoint `host:port` is on this machine."""
    return endpoint.rpartition(":")[0] in LOOPBACK_HOSTS


class LocalWorkerReader:
    """Reads a worker whose process is known, or is looked up by its port.

    With a baseline the reading is what RLIMIT_DATA counts beyond it, the number that a cap is about; without one
    it is resident memory.
    """

    def __init__(self, device: Device, process: WorkerProcess | None = None) -> None:
        self._device = device
        self._process = process
        self._found_pid: int | None = None
        self._looked_s: float | None = None

    def read(self, time_s: float) -> Sample:
        used_bytes = self._used_bytes(time_s)
        if used_bytes is None:
            return gap(self._device.id, time_s, tr("worker is gone") if self._process else tr("worker not found"))
        total_bytes = self._device.total_bytes
        if self._device.cap_bytes is not None:
            total_bytes = min(total_bytes, self._device.cap_bytes)
        return Sample(self._device.id, time_s, used_bytes=used_bytes, total_bytes=total_bytes, own_bytes=used_bytes)

    def _used_bytes(self, time_s: float) -> int | None:
        if self._process is not None:
            committed_bytes = data_bytes(self._process.pid)
            if committed_bytes is not None:
                return max(committed_bytes - self._process.baseline_bytes, 0)
            return resident_bytes(self._process.pid)
        used_bytes = None if self._found_pid is None else resident_bytes(self._found_pid)
        if used_bytes is None:
            self._look_up(time_s)
            used_bytes = None if self._found_pid is None else resident_bytes(self._found_pid)
        return used_bytes

    def _look_up(self, time_s: float) -> None:
        if self._looked_s is not None and time_s - self._looked_s < LOOK_AGAIN_S:
            return
        self._looked_s = time_s
        port = (self._device.endpoint or "").rpartition(":")[2]
        self._found_pid = listening_pid(int(port)) if port.isdecimal() else None
