"""Checks on local connections of the tunnel.

A worker accepts connections from one source port only (`Key`). A tunnel accepts connections only from processes of
this user.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

from engine.base.errors import EngineError
from engine.devices.endpoint import RESET_ON_CLOSE

_TABLE = Path("/proc/net/tcp")
_ESTABLISHED = "01"
"""State of an open connection in `_TABLE`. The table shows ended connections as those of root."""
_HOST = "127.0.0.1"
_TRIES = 20
_PAUSE_S = 0.05
_CONNECT_S = 2.0


class Key:
    """The only source port from which a worker accepts connections (checked in `engine/runtime/child/rpc_server.py`).

    This object keeps the port bound until its context ends, so that processes of other users cannot use it.
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
        """Connect to the worker of this machine that listens on `port`, and return the socket.

        The source port of the connection is `self.port`, because the worker accepts no other.

        Raises:
            OSError: if the connection cannot be made.
        """
        for left in reversed(range(_TRIES)):
            connection = _socket()
            try:
                # Its end is a reset: the same two ports are to be connected again at once, and a server must not
                # answer a client that is gone.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
                connection.settimeout(_CONNECT_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                # Windows has no SO_REUSEPORT, so the held port cannot be shared there; the connection comes from any
                # port.
                if hasattr(socket, "SO_REUSEPORT"):
                    connection.bind((_HOST, self.port))
                connection.connect((_HOST, port))
            except OSError as error:
                connection.close()
                # A worker that refuses or stays silent will not change within a second. An address in use will.
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


TRUST_VARIABLE = "LAYERDECK_TRUST_LOCAL_USERS"
"""Environment variable; 1 allows tunnels on systems that do not report which user made a local connection."""


def require_guard() -> None:
    """Raise an error if this system cannot keep other users of the machine from using a tunnel.

    Raises:
        EngineError: the system does not report which user made a local connection, and `TRUST_VARIABLE` is not 1.
    """
    if (sys.platform.startswith("linux") and _TABLE.exists()) or os.environ.get(TRUST_VARIABLE) == "1":
        return
    raise EngineError(
        "This system does not report which user opens a local connection, so any user of this computer could use the "
        f"tunnel to paired computers; if nobody else uses this computer, set {TRUST_VARIABLE}=1."
    )


def is_our_user(caller: socket.socket) -> bool:
    """Return whether a local connection comes from a process of this user; True if the system does not report it."""
    if not sys.platform.startswith("linux") or not _TABLE.exists():
        return True
    # The caller's end of the connection. The table has our end, too, with the addresses in the other order.
    sought = [_table_address(*caller.getpeername()), _table_address(*caller.getsockname()), _ESTABLISHED]
    for line in _TABLE.read_text(encoding="ascii").splitlines()[1:]:
        row = line.split()
        # Columns of /proc/net/tcp (proc(5)): 1 is the local address, 2 the remote one, 3 the state; 7 is the user id.
        if row[1:4] == sought:
            return int(row[7]) == os.getuid()
    return False


def _table_address(host: str, port: int) -> str:
    """Return an IPv4 address and port as in /proc/net/tcp, where the address is one number in the byte order of the
    processor.
    """
    return f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}"
