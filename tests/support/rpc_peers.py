"""Small socket servers in place of RPC workers, correct ones and faulty ones."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress

ANSWER = struct.pack("<QBBBB", 28, 7, 0, 0, 0) + bytes(24)
"""Answer of a server with RPC protocol 7.0.0 to a hello."""
HELLO_BYTES = 1 + 8 + 24


@contextmanager
def serve_peer(talk: Callable[[socket.socket], None], *, connections: int | None = None) -> Iterator[str]:
    """Call `talk` with one connection after another; yield the endpoint. After `connections` no more are accepted."""
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


FACTS = {
    1: struct.pack("<Q", 32),
    2: struct.pack("<Q", (1 << 64) - 1),
    11: struct.pack("<QQ", 1 << 30, 1 << 31),
    15: struct.pack("<I", 1),
}
"""Answers of a server with one device, by command: alignment, largest buffer, free and total memory, device count."""


def rpc_server(
    *, answers: int | None = None, answer: bytes = ANSWER, facts: Mapping[int, bytes] = FACTS
) -> AbstractContextManager[str]:
    """Return a server that answers hellos and the commands in `facts`, one client at a time; others get no answer.

    `answers`: number of clients after which connections are refused; None: never.
    """

    def talk(client: socket.socket) -> None:
        receive(client, HELLO_BYTES)
        client.sendall(answer)
        answer_questions(client, facts)

    return serve_peer(talk, connections=answers)


def answer_questions(client: socket.socket, facts: Mapping[int, bytes] = FACTS) -> None:
    """Answer commands after the hello until the client closes the connection."""
    while header := receive(client, 9):
        command, size = struct.unpack("<BQ", header)
        receive(client, size)
        if command in facts:
            client.sendall(struct.pack("<Q", len(facts[command])) + facts[command])


def receive(client: socket.socket, size: int) -> bytes:
    """Return `size` bytes, or fewer if the peer closes the connection."""
    data = b""
    while len(data) < size and (part := client.recv(size - len(data))):
        data += part
    return data
