"""Both ends of a tunnel on this machine, each with its own folder; tests connect them to any worker."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from msgspec import Struct, field

from engine.base.units import MIB
from engine.machines.tunnel.calling import open_session, pair_with
from engine.machines.tunnel.identity import Identity, read_identity
from engine.machines.tunnel.listener import LentDevice, Listener
from engine.machines.tunnel.offers import OfferedDevice
from engine.machines.tunnel.pairing import OpenCode
from engine.machines.tunnel.pairings import Pairing, PairingStore
from engine.machines.tunnel.streams import (
    Purpose,
    Stream,
    calling_context,
    read_preface,
    relay,
    serving_context,
    tls_stream,
)
from tests.support.patience import DEADLINE_S


class Home(Struct, frozen=True):
    """Folder of one machine, with its identity and its pairings."""

    folder: Path

    @property
    def identity(self) -> Identity:
        return read_identity(self.folder / "identity.pem")

    @property
    def book(self) -> PairingStore:
        return PairingStore(self.folder / "pairings.json")


_Result = TypeVar("_Result")
Worker = Callable[[], socket.socket]
"""Opens a connection to a worker."""


class Session:
    """Blocking calls for an asyncio stream, for tests without an event loop."""

    def __init__(
        self, endpoint: str, certificate: bytes, identity: Identity, timeout_s: float = DEADLINE_S, device: str = ""
    ) -> None:
        self._runner = asyncio.Runner()
        try:
            self.stream: Stream = self._wait(open_session(endpoint, certificate, identity, timeout_s, device))
        except BaseException:
            self._runner.close()
            raise

    @property
    def tls(self) -> ssl.SSLObject:
        found: ssl.SSLObject = self.stream.transport.get_extra_info("ssl_object")
        return found

    def send(self, data: bytes) -> None:
        self._wait(self.stream.send(data))

    def send_for(self, data: bytes, seconds: float) -> None:
        """Send bytes.

        Raises:
            TimeoutError: they could not be sent within `seconds`.
        """
        self._wait(asyncio.wait_for(self.stream.send(data), seconds))

    def receive(self, n_bytes: int) -> bytes:
        return self._wait(self.stream.receive(n_bytes))

    def close(self) -> None:
        self._wait(self.stream.close())
        self._runner.close()

    def _wait(self, step: Coroutine[Any, Any, _Result]) -> _Result:
        return self._runner.run(asyncio.wait_for(step, DEADLINE_S))


class Attic(Struct):
    """A machine that lends devices. `paired`, `problems`: pairings and sentences that its listener has reported."""

    home: Home
    code: OpenCode
    listener: Listener
    paired: list[Pairing] = field(default_factory=list)
    problems: SimpleQueue[str] = field(default_factory=SimpleQueue)

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.listener.port}"

    def pair(self, home: Home, name: str = "laptop") -> Pairing:
        """Pair another machine with this one, on both sides."""
        pairing = pair_with(self.endpoint, self.code.renew(), home.identity, name, DEADLINE_S)
        home.book.add(pairing)
        return pairing

    def open(self, home: Home, device: str = "") -> Session:
        """Return a session of a paired machine. `device`: name of the lent device; empty: the first one."""
        pairing = home.book.find("server", self.home.identity.fingerprint)
        assert pairing is not None
        return Session(self.endpoint, pairing.der, home.identity, device=device)


def described(name: str) -> OfferedDevice:
    """Return the offer of a CPU device with 64 MiB."""
    return OfferedDevice(name=name, kind="cpu", total_bytes=64 * MIB, free_bytes=64 * MIB, description="a device")


@contextmanager
def attic(
    folder: Path, workers: Worker | Mapping[str, Worker], names: Sequence[str] = ("CPU",), port: int = 0
) -> Iterator[Attic]:
    """Lend devices until the end of the context; yield the lending machine.

    `workers`: opens a connection to the worker, for each device by name, or for all devices in `names`.
    """
    by_name = workers if isinstance(workers, Mapping) else dict.fromkeys(names, workers)
    home, code, paired, problems = Home(folder), OpenCode(), list[Pairing](), SimpleQueue[str]()
    with Listener(
        "127.0.0.1",
        port,
        identity=home.identity,
        book=home.book,
        code=code,
        name="attic",
        devices=[LentDevice(name, worker, partial(described, name)) for name, worker in by_name.items()],
        on_paired=paired.append,
        on_problem=problems.put,
    ) as listener:
        yield Attic(home, code, listener, paired, problems)


@contextmanager
def echoing() -> Iterator[Callable[[], socket.socket]]:
    """Run a server that returns all bytes it receives; yield a function that connects to it."""
    listening = socket.create_server(("127.0.0.1", 0))
    clients: list[socket.socket] = []

    def talk(client: socket.socket) -> None:
        with suppress(OSError):
            while part := client.recv(1 << 18):
                client.sendall(part)

    def run() -> None:
        with suppress(OSError):
            while True:
                client, _ = listening.accept()
                clients.append(client)
                threads.append(threading.Thread(target=talk, args=(client,), daemon=True))
                threads[-1].start()

    threads = [threading.Thread(target=run, daemon=True)]
    threads[0].start()
    try:
        yield lambda: socket.create_connection(listening.getsockname()[:2])
    finally:
        for each in (listening, *clients):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in threads:
            thread.join(DEADLINE_S)


@contextmanager
def relaying_middle(served: Attic, home: Home) -> Iterator[str]:
    """Run a man in the middle between a caller and `served`, with the identity of `home`; yield its endpoint."""
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setblocking(False)

    async def stand_between() -> None:
        loop = asyncio.get_running_loop()
        caller, _ = await loop.sock_accept(listening)
        assert await read_preface(caller) is Purpose.PAIRING
        inner = await tls_stream(caller, serving_context(home.identity, None), server_side=True)
        called = socket.create_connection(("127.0.0.1", served.listener.port))
        called.sendall(Purpose.PAIRING.value.encode())
        outer = await tls_stream(called, calling_context(home.identity, None))
        await relay(inner, outer)

    thread = threading.Thread(
        target=lambda: asyncio.run(asyncio.wait_for(stand_between(), DEADLINE_S)), name="middle", daemon=True
    )
    thread.start()
    try:
        yield f"127.0.0.1:{listening.getsockname()[1]}"
    finally:
        thread.join(DEADLINE_S)
        listening.close()
