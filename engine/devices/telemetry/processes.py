"""Functions that measure the memory of processes, and the `Reader` classes of the host and of local RPC workers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil
from msgspec import Struct

from engine.base.language import tr
from engine.devices.device import Device
from engine.devices.host_memory import HostMemory, read_host_memory
from engine.devices.telemetry.sample import Sample, gap

_ANONYMOUS_FIELDS = ("RssAnon", "RssShmem")


def resident_bytes(pid: int) -> int | None:
    """Return the resident memory of a process in bytes, without mapped files if the system reports them separately.

    None: there is no such process, or it may not be read.
    """
    fields = _status_fields(pid)
    # Since Linux 4.5. Mapped model files are in RssFile: the system can drop them, so they are no demand.
    if "RssAnon" in fields:
        return sum(fields.get(name, 0) for name in _ANONYMOUS_FIELDS)
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except (psutil.Error, OSError):
        return None


def data_bytes(pid: int) -> int | None:
    """Return VmData of a process in bytes, which RLIMIT_DATA limits; None if the system does not report it."""
    return _status_fields(pid).get("VmData")


def descendants(pid: int) -> tuple[int, ...]:
    """Return the ids of the children of a process, of their children, and so on; empty if the process has ended."""
    if not _lists_children():
        try:
            return tuple(child.pid for child in psutil.Process(pid).children(recursive=True))
        except (psutil.Error, OSError):
            return ()
    # psutil reads all processes of the machine, which took most of the time of a sample.
    found, left = [], [pid]
    while left:
        children = _children(left.pop())
        found += children
        left += children
    return tuple(found)


def _children(pid: int) -> list[int]:
    """Return the process ids of a process's children. Linux lists children by thread, so all threads are read."""
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208  # each second, and pathlib is slow
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:  # noqa: PTH123
                found += map(int, file.read().split())
    return found


@cache
def _lists_children() -> bool:
    """Return whether this kernel lists the children of threads (Linux with CONFIG_PROC_CHILDREN)."""
    return Path("/proc/thread-self/children").exists()


def swapped_bytes(pid: int) -> int | None:
    """Return the bytes of a process that are swapped out; None if the system does not report them."""
    return _status_fields(pid).get("VmSwap")


def major_faults(pid: int) -> int | None:
    """Return the number of major page faults of a process since its start; None if the system does not report it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            text = file.read()
        # The name, in parentheses, may hold anything. The field after it is number 3 in proc(5), so majflt (12) has
        # index 9.
        return int(text.rpartition(b")")[2].split()[9])
    except (OSError, ValueError, IndexError):
        return None


def total_of(pids: Iterable[int], measure: Callable[[int], int | None]) -> int | None:
    """Return the sum of `measure` over the processes that still exist; None if no process can be read."""
    readings = [measure(pid) for pid in pids]
    known = [value for value in readings if value is not None]
    return sum(known) if known or not readings else None


def listening_pid(port: int) -> int | None:
    """Return the id of the process that listens on a local TCP port; None if it is unknown or not visible to us."""
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections(kind="tcp"):
            # The process id is missing for processes of other users.
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return int(connection.pid)
    return None


def _status_fields(pid: int) -> dict[str, int]:
    try:
        with open(f"/proc/{pid}/status", "rb") as file:  # noqa: PTH123  # each second, and pathlib is slow
            text = file.read()
    except OSError:
        return {}
    # The kernel writes kB for units of 1024 bytes. Of its 60 lines only those that are used are divided.
    return {name.decode(): int(kib) * 1024 for name, kib in _FIELD.findall(text)}


_FIELD = re.compile(rb"^(VmData|VmSwap|RssAnon|RssShmem):\s*(\d+) kB$", re.MULTILINE)


class HostReader:
    """Reads the memory and the processor utilisation of the host.

    The sample's `own_bytes` is the memory of all child processes of this program, such as those with loaded models and
    local RPC workers.
    """

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
        # Without an interval psutil compares with the call before and does not block.
        percent = float(psutil.cpu_percent(interval=None))
        # The first call has nothing to compare with and answers 0.
        first, self._primed = not self._primed, True
        return None if first else percent


LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost"})
LOOK_AGAIN_S = 5.0
"""Least seconds between two searches for the process that listens on a port: each reads the whole process table."""


class WorkerProcess(Struct, frozen=True):
    """The process of an RPC worker that we started. `baseline_bytes`: its VmData before any allocation."""

    pid: int
    baseline_bytes: int


def is_local(endpoint: str) -> bool:
    """Return whether the endpoint `host:port` is on this machine."""
    return endpoint.rpartition(":")[0] in LOOPBACK_HOSTS


class LocalWorkerReader:
    """Reads the memory of an RPC worker on this machine.

    If this program started the worker, used memory is its VmData less `baseline_bytes`, because the cap (RLIMIT_DATA)
    limits VmData. For any other worker, the process is found by the port on which it listens, and used memory is its
    resident memory.
    """

    def __init__(self, device: Device, process: WorkerProcess | None = None) -> None:
        self._device = device
        self._process = process
        self._found_pid: int | None = None
        self._looked_s: float | None = None

    def read(self, time_s: float) -> Sample:
        used_bytes = self._used_bytes(time_s)
        if used_bytes is None:
            return gap(self._device.id, time_s, tr("worker stopped") if self._process else tr("worker not found"))
        total_bytes = self._device.total_bytes
        if self._device.cap_bytes is not None:
            total_bytes = min(total_bytes, self._device.cap_bytes)
        return Sample(self._device.id, time_s, used_bytes=used_bytes, total_bytes=total_bytes, own_bytes=used_bytes)

    def _used_bytes(self, time_s: float) -> int | None:
        # VmData counts what was requested, touched or not, as RLIMIT_DATA does when it refuses an allocation.
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
