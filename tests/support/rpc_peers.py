"""Small socket servers that are, or are not, what an RPC endpoint should be."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

ANSWER = struct.pack("<QBBBB", 28, 7, 0, 0, 0) + bytes(24)
"""What a server of protocol 7.0.0 answers to a hello."""
HELLO_BYTES = 1 + 8 + 24


@contextmanager
def serve_peer(talk: Callable[[socket.socket], None], *, connections: int | None = None) -> Iterator[str]:
    """Serve `talk` to one connection after another, yield the endpoint; after `connections` stop listening."""
    listener = socket.create_server(("127.0.0.1", 0))
    open_sockets: list[socket.socket] = []

    def run() -> None:
        count = 0
        with suppress(OSError):
            while connections is None or count < connections:
                client, _ = listener.accept()
                open_sockets.append(client)
                count += 1
                if count == connections:
                    listener.close()
                with suppress(OSError):
                    talk(client)
                client.close()

    thread = threading.Thread(target=run, name="rpc-peer", daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        for each in (listener, *open_sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closing does not
            each.close()
        thread.join(10)


def rpc_server(*, answers: int | None = None, answer: bytes = ANSWER) -> AbstractContextManager[str]:
    """Answer hellos, one client at a time, until it hangs up; after `answers` of them refuse."""

    def talk(client: socket.socket) -> None:
        receive(client, HELLO_BYTES)
        client.sendall(answer)
        client.recv(1)

    return serve_peer(talk, connections=answers)


def receive(client: socket.socket, size: int) -> bytes:
    """Read exactly `size` bytes, or less when the peer hangs up."""
    data = b""
    while len(data) < size and (part := client.recv(size - len(data))):
        data += part
    return data
