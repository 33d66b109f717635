"""Both ends of a tunnel on this machine, each with a home of its own, before any worker there is."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from engine.tunnel.answering import Listener
from engine.tunnel.calling import open_session, pair_with
from engine.tunnel.channel import Channel, Purpose, calling_context, read_preface, serving_context, shut
from engine.tunnel.codes import OpenCode
from engine.tunnel.identity import Identity, read_identity
from engine.tunnel.pairings import Pairing, PairingBook
from engine.tunnel.relay import relay
from tests.support.patience import DEADLINE_S


@dataclass(frozen=True, slots=True)
class Home:
    """What one machine keeps."""

    folder: Path

    @property
    def identity(self) -> Identity:
        return read_identity(self.folder / "identity.pem")

    @property
    def book(self) -> PairingBook:
        return PairingBook(self.folder / "pairings.json")


@dataclass(slots=True)
class Attic:
    """A machine that serves what `worker` is; `paired` are those that were told of."""

    home: Home
    code: OpenCode
    listener: Listener
    paired: list[Pairing] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.listener.port}"

    def pair(self, home: Home, name: str = "laptop") -> Pairing:
        """Pair a machine with this one on both sides."""
        pairing = pair_with(self.endpoint, self.code.renew(), home.identity, name, DEADLINE_S)
        home.book.add(pairing)
        return pairing

    def open(self, home: Home) -> Channel:
        """Return a session of a paired machine."""
        pairing = home.book.find("server", self.home.identity.fingerprint)
        assert pairing is not None
        tls = open_session(self.endpoint, pairing.der, home.identity, DEADLINE_S)
        tls.settimeout(DEADLINE_S)
        return Channel(tls, time.monotonic() + DEADLINE_S)


@contextmanager
def attic(folder: Path, reach_worker: Callable[[], socket.socket]) -> Iterator[Attic]:
    """Serve on this machine until the end of the context."""
    home, code, paired = Home(folder), OpenCode(), list[Pairing]()
    with Listener(
        "127.0.0.1",
        0,
        identity=home.identity,
        book=home.book,
        code=code,
        name="attic",
        reach_worker=reach_worker,
        on_paired=paired.append,
    ) as listener:
        yield Attic(home, code, listener, paired)


@contextmanager
def echoing() -> Iterator[Callable[[], socket.socket]]:
    """Yield what connects to a server that says everything again, to any number of clients."""
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
    """Yield the endpoint of somebody between a caller and `served` who passes all words on, under his own name."""
    listening = socket.create_server(("127.0.0.1", 0))
    ends: list[socket.socket] = []

    def run() -> None:
        with suppress(OSError):
            caller, _ = listening.accept()
            assert read_preface(caller, time.monotonic() + DEADLINE_S) is Purpose.PAIRING
            caller.settimeout(DEADLINE_S)
            inner = serving_context(home.identity, None).wrap_socket(caller, server_side=True)
            outer = socket.create_connection(("127.0.0.1", served.listener.port))
            outer.sendall(Purpose.PAIRING.value.encode())
            tls = calling_context(home.identity, None).wrap_socket(outer)
            ends.extend((inner, tls, *socket.socketpair()))
            other = threading.Thread(target=relay, args=(tls, ends[3]), daemon=True)
            other.start()
            relay(inner, ends[2])
            for each in ends:
                shut(each)
            other.join(DEADLINE_S)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{listening.getsockname()[1]}"
    finally:
        shut(listening)
        thread.join(DEADLINE_S)
        for each in (listening, *ends):
            each.close()
