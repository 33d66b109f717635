"""The sockets of this process, listed by Linux in /proc, and a duplicate of one to read its counters."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

ACKED_OFFSET = 120
"""Offset of tcpi_bytes_acked in `struct tcp_info` (linux/tcp.h). tcpi_bytes_received follows it."""


def own_sockets() -> Iterator[tuple[str, int]]:
    """Yield (inode, descriptor) of each socket of this process.

    Raises:
        OSError: there is no /proc, or no descriptor is left to read it with.
    """
    for entry in Path("/proc/self/fd").iterdir():
        try:
            link = str(entry.readlink())
        except OSError:
            continue  # Closed by now.
        if link.startswith("socket:["):
            yield link.removeprefix("socket:[").removesuffix("]"), int(entry.name)


def duplicate_socket(descriptor: int) -> socket.socket:
    """Return a duplicate of a socket of native code. The caller closes the duplicate; the connection stays open.

    Raises:
        OSError: `descriptor` is no socket any more.
    """
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        # Another thread has closed the socket, and the number is that of a file by now.
        os.close(copy)
        raise
