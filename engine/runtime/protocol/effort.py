"""Whether this process visibly works: what it has used, for times in which the engine says nothing."""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

TICK_SECONDS = 1.0

CPU_SECONDS = 0.02
MEMORY_BYTES = 1 << 20
READ_BYTES = 1 << 16
NETWORK_BYTES = 1 << 10

_TCP_INFO_BYTES = 192
_ACKED_AND_RECEIVED = struct.Struct("=QQ")
_ACKED_OFFSET = 120
"""Of tcpi_bytes_acked in struct tcp_info (linux/tcp.h); tcpi_bytes_received follows."""


@dataclass(frozen=True, slots=True)
class Effort:
    """What the process has used so far. Growth beyond what the ticking itself takes is a sign of work."""

    cpu_seconds: float
    resident_bytes: int
    read_bytes: int
    network_bytes: int

    def beyond(self, earlier: Effort) -> bool:
        return (
            self.cpu_seconds - earlier.cpu_seconds >= CPU_SECONDS
            or abs(self.resident_bytes - earlier.resident_bytes) >= MEMORY_BYTES
            or self.read_bytes - earlier.read_bytes >= READ_BYTES
            or abs(self.network_bytes - earlier.network_bytes) >= NETWORK_BYTES
        )


def current_effort() -> Effort:
    """Read this process's counters; on systems without /proc only the processor time is known."""
    return Effort(time.process_time(), resident_bytes(), _read_bytes(), _network_bytes())


class WorkTicks:
    """Calls `tell` every `tick_seconds` in which the process visibly worked, in a thread of its own.

    A disk or a server that does not answer leaves no trace in the counters, so the ticks end and the parent's
    stall timeout runs. Use as a context manager: the thread ends with it.
    """

    def __init__(self, tell: Callable[[], None], *, tick_seconds: float = TICK_SECONDS) -> None:
        self._tell = tell
        self._tick_seconds = tick_seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ticks", daemon=True)

    def __enter__(self) -> WorkTicks:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        effort = current_effort()
        while not self._ended.wait(self._tick_seconds):
            now = current_effort()
            if now.beyond(effort):
                self._tell()
            effort = now


def resident_bytes() -> int:
    """Return what of this process is in memory; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _read_bytes() -> int:
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar:", "read_bytes:")))
    except (OSError, ValueError, IndexError):
        return 0


def _network_bytes() -> int:
    """Return what the servers at the other end of our connections took and sent: a slow network is not a stall."""
    if not sys.platform.startswith("linux"):
        return 0
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                known = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            total += sum(_ACKED_AND_RECEIVED.unpack_from(known, _ACKED_OFFSET))
        except (OSError, struct.error):
            continue  # Closed by now, or no TCP connection.
    return total
