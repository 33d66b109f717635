"""A proxy in front of a real RPC worker that replaces answers to chosen commands."""

from __future__ import annotations

import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count

from tests.support.rpc_peers import receive

ANSWERED = frozenset({0, 1, 2, 3, 7, 8, 9, 11, 13, 14, 15})
"""Commands of RPC protocol 7 that have an answer."""
HEADER = struct.Struct("<BQ")
Lie = Callable[[socket.socket, bytes], None]
"""Called with the client's socket and the true answer without its length; sends the false answer."""
Choose = Callable[[int, int], Lie | None]


class Turning:
    """The running proxy.

    `lie_to` is called for each answer, with the numbers of the connection and of the command. It returns the function
    that sends a false answer; None: the true one is sent.
    """

    def __init__(self, worker: str, lie_to: Choose) -> None:
        host, port = worker.rsplit(":", 1)
        self._worker = (host, int(port))
        self._lie_to = lie_to
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, name="rpc-proxy", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        for each in (self._listener, *self._sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            for number in count():
                client, _ = self._listener.accept()
                self._sockets.append(client)
                worker = socket.create_connection(self._worker)
                self._sockets.append(worker)
                asked: queue.SimpleQueue[int] = queue.SimpleQueue()
                for talk in (self._carry_questions, partial(self._carry_answers, number)):
                    threading.Thread(target=talk, args=(client, worker, asked), daemon=True).start()

    def _carry_questions(self, client: socket.socket, worker: socket.socket, asked: queue.SimpleQueue[int]) -> None:
        with suppress(OSError, struct.error):
            while header := receive(client, HEADER.size):
                command, size = HEADER.unpack(header)
                if command in ANSWERED:
                    asked.put(command)
                worker.sendall(header)
                while size:
                    part = client.recv(min(size, 1 << 16))
                    worker.sendall(part)
                    size = size - len(part) if part else 0
        with suppress(OSError):
            worker.shutdown(socket.SHUT_RDWR)  # wakes the other thread, which closing does not

    def _carry_answers(
        self, number: int, client: socket.socket, worker: socket.socket, asked: queue.SimpleQueue[int]
    ) -> None:
        with suppress(OSError, struct.error):
            while length := receive(worker, 8):
                answer = receive(worker, struct.unpack("<Q", length)[0])
                lie = self._lie_to(number, asked.get())
                if lie is None:
                    client.sendall(length + answer)
                else:
                    lie(client, answer)
        with suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)


@contextmanager
def turning(worker: str, lie_to: Choose) -> Iterator[str]:
    """Run a proxy in front of the worker at this endpoint; yield the proxy's endpoint."""
    proxy = Turning(worker, lie_to)
    try:
        yield proxy.endpoint
    finally:
        proxy.close()
