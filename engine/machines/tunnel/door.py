"""This machine's side of both tunnels' ends: the one port from which a worker takes connections, and who calls us."""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from pathlib import Path

_TABLE = Path("/proc/net/tcp")
_RESET_ON_CLOSE = struct.pack("hh" if os.name == "nt" else "ii", 1, 0)
_HOST = "127.0.0.1"
_TRIES = 20
_PAUSE_S = 0.05
_CONNECT_S = 2.0


class Key:
    """A port of this machine that nobody of another user can have as long as we hold it.

    `engine/runtime/child/serve.py` drops what does not come from it.
    """

    def __init__(self) -> None:
        self._holding = _socket()
        self._holding.bind((_HOST, 0))
        self.port = int(self._holding.getsockname()[1])

    def __enter__(self) -> Key:
        return self

    def __exit__(self, *_: object) -> None:
        self._holding.close()

    def connect(self, port: int) -> socket.socket:
        """Return a connection to a worker of this machine, from the held port.

        Raises:
            OSError: where there is none.
        """
        for left in reversed(range(_TRIES)):
            connection = _socket()
            try:
                # Its end is a reset: the same two ports are to be connected again at once, and a server must not
                # answer a client that is gone.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                connection.settimeout(_CONNECT_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if hasattr(socket, "SO_REUSEPORT"):
                    connection.bind((_HOST, self.port))
                connection.connect((_HOST, port))
            except OSError as error:
                connection.close()
                if left == 0 or isinstance(error, ConnectionRefusedError | TimeoutError):
                    raise
                time.sleep(_PAUSE_S)  # What is left of the connection before is still known to the system.
            else:
                return connection
        raise AssertionError("the last try raises")


def _socket() -> socket.socket:
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    if hasattr(socket, "SO_REUSEPORT"):
        # Of one user only: others cannot share the port.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return connection


def is_our_user(caller: socket.socket) -> bool:
    """Return whether a connection from this machine is of a process of our user; True where no system tells that."""
    if not sys.platform.startswith("linux") or not _TABLE.exists():
        return True
    (_, their_port), (_, our_port) = caller.getpeername(), caller.getsockname()
    for line in _TABLE.read_text(encoding="ascii").splitlines()[1:]:
        row = line.split()
        ports = tuple(int(each.rpartition(":")[2], 16) for each in row[1:3])
        if ports == (their_port, our_port):
            return int(row[7]) == os.getuid()
    return False
