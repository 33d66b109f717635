"""The relay for tests forwards the end of a connection."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

from tests.support.faulty_relay import Relay
from tests.support.patience import DEADLINE_S


def test_a_reset_of_one_side_ends_the_other() -> None:
    """A process that is killed before it has read everything resets its connection."""
    with socket.create_server(("127.0.0.1", 0)) as server, Relay(server.getsockname()[1]) as relay:
        caller = socket.create_connection(("127.0.0.1", relay.port))
        served, _ = server.accept()
        with served:
            served.settimeout(DEADLINE_S)
            caller.sendall(b"a")
            assert served.recv(1) == b"a"
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            caller.close()
            with suppress(ConnectionResetError):
                assert served.recv(1) == b""
