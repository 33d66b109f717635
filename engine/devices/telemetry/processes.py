"""Memory of processes: of any process, of the host with all our children, and of RPC workers on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from engine.base.language import tr
from engine.devices.device import Device
from engine.devices.host_memory import HostMemory, read_host_memory
from engine.devices.telemetry.sample import Sample, gap

_ANONYMOUS_FIELDS = ("RssAnon", "RssShmem")


def resident_bytes(pid: int) -> int | None:
    """Return the memory that belongs to the process alone, without mapped files where the system tells them apart.

    None when there is no such process, or when it may not be read.
    """
    fields = _status_fields(pid)
    if "RssAnon" in fields:
        return sum(fields.get(name, 0) for name in _ANONYMOUS_FIELDS)
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except (psutil.Error, OSError):
        return None


def data_bytes(pid: int) -> int | None:
    """Return VmData, what a limit on data segments counts; None where the system does not tell."""
    return _status_fields(pid).get("VmData")


def descendants(pid: int) -> tuple[int, ...]:
    """Return the children of a process and their children; empty when it is gone."""
    try:
        return tuple(child.pid for child in psutil.Process(pid).children(recursive=True))
    except (psutil.Error, OSError):
        return ()


def swapped_bytes(pid: int) -> int | None:
    """Return what the system has moved to swap; None where it does not tell."""
    return _status_fields(pid).get("VmSwap")


def major_faults(pid: int) -> int | None:
    """Return how many pages the process has had to read from disk; None where the system does not tell."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        # the name, in parentheses, may hold anything
        return int(text.rpartition(")")[2].split()[9])
    except (OSError, ValueError, IndexError):
        return None


def total_of(pids: Iterable[int], measure: Callable[[int], int | None]) -> int | None:
    """Return the sum over the processes that are still there; None where there are some and none of them tells."""
    told = [measure(pid) for pid in pids]
    known = [value for value in told if value is not None]
    return sum(known) if known or not told else None


def listening_pid(port: int) -> int | None:
    """Return the process that listens on a TCP port of this machine; None when unknown or not ours to see."""
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return int(connection.pid)
    return None


def _status_fields(pid: int) -> dict[str, int]:
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    fields = (line.partition(":") for line in text.splitlines())
    return {name: int(value.split()[0]) * 1024 for name, _, value in fields if value.strip().endswith(" kB")}


class HostReader:
    """`own_bytes` counts all children of this process: those of loaded models, lab workers, probes."""

    def __init__(self, device: str, read_memory: Callable[[], HostMemory] = read_host_memory) -> None:
        self._device = device
        self._read_memory = read_memory
        self._primed = False

    def read(self, time_s: float) -> Sample:
        memory = self._read_memory()
        children = descendants(os.getpid())
        return Sample(
            self._device,
            time_s,
            used_bytes=memory.used_bytes,
            total_bytes=memory.total_bytes,
            own_bytes=total_of(children, resident_bytes) or 0,
            spilled_bytes=total_of(children, swapped_bytes),
            major_faults=total_of(children, major_faults),
            utilization_percent=self._utilization(),
        )

    def _utilization(self) -> float | None:
        percent = float(psutil.cpu_percent(interval=None))
        # The first call has nothing to compare with and answers 0.
        first, self._primed = not self._primed, True
        return None if first else percent


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
