"""Heartbeat of a child while native code runs that reports nothing. It is based on counters of resource use.

llama.cpp reports nothing while it allocates or computes a long batch. The parent regards a child as stalled after 60 s
of silence. So a child sends a heartbeat as long as its processor time, memory, disk or network use shows that it works.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from engine.runtime.protocol.own_sockets import ACKED_OFFSET, duplicate_socket, own_sockets

MIN_STALL_LIMIT_S, MAX_STALL_LIMIT_S = 5, 86_400
"""Bounds of the stall limit that a user may choose, in seconds. A busy machine delays heartbeats by some seconds."""
TICK_SECONDS = 1.0

# Least growth in a tick that counts as work. Reading the counters themselves takes less than each of these.
CPU_SECONDS = 0.02
MEMORY_BYTES = 1 << 20
READ_BYTES = 1 << 16
NETWORK_BYTES = 1 << 10

_TCP_INFO_BYTES = 192
_ACKED_AND_RECEIVED = struct.Struct("=QQ")


class ResourceUse(Struct, frozen=True):
    """Resource use of this process.

    `cpu_seconds`: processor time since its start.
    `resident_bytes`: resident memory now.
    `read_bytes`: bytes read from files since its start, including those of mapped pages.
    `network_bytes`: bytes sent and received over the TCP connections that are open now.
    """

    cpu_seconds: float
    resident_bytes: int
    read_bytes: int
    network_bytes: int

    def shows_work_since(self, earlier: ResourceUse) -> bool:
        """Return whether the process has worked since `earlier`. The work of reading the counters does not count."""
        # Memory shrinks when buffers are freed, and the network count when a connection closes: both are work as well.
        return (
            self.cpu_seconds - earlier.cpu_seconds >= CPU_SECONDS
            or abs(self.resident_bytes - earlier.resident_bytes) >= MEMORY_BYTES
            or self.read_bytes - earlier.read_bytes >= READ_BYTES
            or abs(self.network_bytes - earlier.network_bytes) >= NETWORK_BYTES
        )


def current_use(*, with_network: bool = True) -> ResourceUse:
    """Return the resource use of this process. On a system without /proc all fields but the processor time are 0.

    `with_network`: whether to count the bytes of TCP connections too, which reads every open descriptor. If false,
    `network_bytes` is 0.
    """
    network_bytes = _network_bytes() if with_network else 0
    return ResourceUse(time.process_time(), resident_bytes(), _read_bytes(), network_bytes)


class WorkHeartbeat:
    """Calls `on_tick` in its own thread after each `tick_seconds` in which the process has worked.

    The process has worked if the counters of its resource use have changed. They do not change while the process waits
    for a disk or a server that does not answer. Then `on_tick` is not called, and the parent's stall limit expires. The
    thread ends when the `with` block is left.

    `may_wait`: returns whether the process may be waiting for RPC workers now. Then `on_tick` is called even if the
    counters show no work.
    """

    def __init__(
        self,
        on_tick: Callable[[], None],
        *,
        tick_seconds: float = TICK_SECONDS,
        may_wait: Callable[[], bool] = lambda: False,
    ) -> None:
        self._on_tick = on_tick
        self._may_wait = may_wait
        self._tick_seconds = tick_seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ticks", daemon=True)

    def __enter__(self) -> WorkHeartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        use = current_use(with_network=False)
        sent_bytes: int | None = None
        while not self._ended.wait(self._tick_seconds):
            now = current_use(with_network=False)
            if works := now.shows_work_since(use):
                # Connections are only looked at in ticks that show no other work: generation uses the processor, and
                # each look costs three calls of the system for each descriptor.
                sent_bytes = None
            else:
                before_bytes, sent_bytes = sent_bytes, _network_bytes()
                works = before_bytes is not None and abs(sent_bytes - before_bytes) >= NETWORK_BYTES
            if works or self._may_wait():
                self._on_tick()
            # Compared tick by tick: counters that creep do not add up to work.
            use = now


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes; 0 if the system does not report it."""
    # Field 1 of statm is the number of resident pages (proc(5)).
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _read_bytes() -> int:
    try:
        # rchar counts read() also from the page cache; read_bytes counts pages of mapped files from the disk.
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar:", "read_bytes:")))
    except (OSError, ValueError, IndexError):
        return 0


def _network_bytes() -> int:
    """Return the bytes that the peers of our TCP connections acknowledged or sent; 0 on systems other than Linux."""
    # Weights go to an RPC worker for minutes over a slow network. The process itself then only waits in send().
    if not sys.platform.startswith("linux"):
        return 0
    total = 0
    try:
        for _, descriptor in own_sockets():
            with suppress(OSError, struct.error):  # closed by now, or no TCP connection
                with duplicate_socket(descriptor) as connection:
                    known = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                total += sum(_ACKED_AND_RECEIVED.unpack_from(known, ACKED_OFFSET))
    except OSError:
        return 0  # no /proc, or no descriptor left to read it with
    return total
