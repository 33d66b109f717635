"""A machine in this process that lends its devices through the tunnel, and a machine that borrows them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from engine.base.cancellation import CancelToken
from engine.base.errors import EngineError
from engine.base.units import MIB
from engine.devices.device import Rig
from engine.machines.rigs.discovery import host_device
from engine.machines.rigs.remote_machines import LendingMachine, RemoteMachines
from engine.machines.rigs.secure_serving import Lending, Lent, SecureAddress, serve_secure
from engine.machines.tunnel.calling import pair_with
from engine.machines.tunnel.listener import Use
from engine.machines.tunnel.pairing import OpenCode
from engine.machines.tunnel.pairings import Pairing
from engine.machines.tunnel.tunnels import Tunnels
from tests.support.patience import DEADLINE_S
from tests.support.tunnels import Home

CAP_BYTES = 64 * MIB


class Served:
    """A machine that lends devices from the start of its context until `stop` or the end of the context.

    `lendings`: the lent devices; None: its CPU.
    `problem`: why the lending ended by itself; empty if it did not.
    """

    def __init__(self, folder: Path, lendings: Sequence[Lending] | None = None) -> None:
        self.home, self.code, self.paired = Home(folder), OpenCode(), list[Pairing]()
        self.problem = ""
        self._until = CancelToken()
        self._told: queue.SimpleQueue[Lent] = queue.SimpleQueue()
        self.uses: tuple[Use, ...] = ()
        self._lendings = lendings
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Served:
        self._thread.start()
        self.serving = self._told.get(timeout=DEADLINE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.serving.port}"

    def stop(self) -> None:
        """End workers and listener, and wait until they have ended."""
        self._until.cancel()
        self._thread.join(DEADLINE_S)

    def wait_for_end(self) -> None:
        """Wait until the lending has ended by itself."""
        self._thread.join(DEADLINE_S)

    def _take_uses(self, uses: tuple[Use, ...]) -> None:
        self.uses = uses

    def _serve(self) -> None:
        try:
            serve_secure(
                SecureAddress("127.0.0.1", 0, "attic", self.home.identity, self.home.book, self.code),
                self._lendings or (Lending(host_device(), CAP_BYTES),),
                kept=None,
                until=self._until,
                on_serving=self._told.put,
                on_paired=self.paired.append,
                on_use=self._take_uses,
            )
        except EngineError as error:
            self.problem = error.summary()


@contextmanager
def reached(served: Served, folder: Path, endpoint: str = "") -> Iterator[Rig]:
    """Yield the rig of a borrowing machine with the lent devices, which it reaches through a tunnel.

    `endpoint`: address (host:port) of a relay in front of the lending machine; empty: the machine itself.
    """
    laptop = Home(folder)
    pairing = pair_with(endpoint or served.endpoint, served.code.renew(), laptop.identity, "laptop", DEADLINE_S)
    laptop.book.add(pairing)
    with Tunnels(laptop.folder / "identity.pem", laptop.book) as tunnels:
        machines = RemoteMachines(laptop.folder / "identity.pem", laptop.book, tunnels, folder / "checks.json")
        found = machines.find(LendingMachine(pairing.endpoint, pairing.fingerprint, pairing.name))
        yield Rig(found, host_device())
