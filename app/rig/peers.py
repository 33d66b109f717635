"""Paired machines: search on the local network, pairing, adding their devices, and deleting pairings."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct
from PySide6.QtCore import QObject, Qt, Signal

from app.background import Background
from app.notices import Notices
from app.paths import engine_checks_path, identity_path, pairings_path
from app.rig.limit_store import LimitStore
from app.rig.live_rig import LiveRig
from engine.base.errors import ArgumentError, EngineError, RigError
from engine.base.language import tr
from engine.base.values import replace
from engine.devices.device import Device, Rig, names_of
from engine.devices.endpoint import parse_endpoint
from engine.machines.rigs.remote_machines import LendingMachine, RemoteMachines
from engine.machines.tunnel.pairings import Pairing, PairingStore
from engine.machines.tunnel.tunnels import NearbySearch, Tunnels
from engine.runtime.protocol.network import NearbyMachine

INTERFACES_VARIABLE = "LAYERDECK_INTERFACES"
"""Environment variable: addresses of this computer's network interfaces on which machines are searched.

Separated by commas; if it is unset, all interfaces are used.
"""


class Found(Struct, frozen=True):
    """A machine in the list of Find Computers Nearby. It is announced on the local network, paired, or both.

    `endpoint`: address of the machine (host:port).
    `fingerprint`: fingerprint of the machine's certificate, as announced. If the machine is not announced, it is the
    fingerprint that was stored when the machines were paired.
    `device`, `total_bytes`: ids of the devices that it announces, in one text, and their total memory.
    `is_changed`: whether the machine at this address was paired with another certificate than it announces now.
    `answers`: whether a paired machine that is not announced has answered at its address.
    """

    name: str
    endpoint: str
    fingerprint: str
    device: str = ""
    total_bytes: int = 0
    is_announced: bool = False
    is_paired: bool = False
    is_changed: bool = False
    answers: bool = False


class Peers(QObject):
    """Finds and pairs machines. Owns the tunnels to machines whose devices the window uses; `close` ends them."""

    found = Signal(tuple)
    """Carries the nearby and paired machines, as a tuple of `Found`; emitted at changes while the search runs."""
    status_changed = Signal(str, bool)
    """Carries a sentence about the result of the last action, such as pairing or the search, and True if it failed."""
    paired = Signal(Pairing)

    _announced = Signal(tuple)
    _search_ended = Signal(str)

    def __init__(
        self,
        live: LiveRig,
        limits: LimitStore,
        background: Background,
        notices: Notices,
        *,
        folder: Path | None = None,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._live, self._limits = live, limits
        self._background, self._notices = background, notices
        # Nothing is read or made here: most windows never pair, and the key is made when it is first needed.
        self._identity = identity_path() if folder is None else folder / "identity.pem"
        self._book = PairingStore(pairings_path() if folder is None else folder / "pairings.json")
        self._tunnels = Tunnels(self._identity, self._book)
        self.machines = RemoteMachines(self._identity, self._book, self._tunnels, engine_checks_path())
        self._search: NearbySearch | None = None
        self._machines: tuple[NearbyMachine, ...] = ()
        self._pairings: tuple[Pairing, ...] = ()
        self._answers: dict[LendingMachine, bool] = {}
        """Whether a paired machine has answered at its address. Only machines that are not announced are contacted."""
        # From threads of the search's child.
        self._announced.connect(self._on_announced, Qt.ConnectionType.QueuedConnection)
        self._search_ended.connect(self._on_search_ended, Qt.ConnectionType.QueuedConnection)

    def reach(self, rig: Rig) -> Rig:
        """Return `rig` with local tunnel addresses for its paired machines. Thread-safe.

        The call opens tunnels, which takes time, so it must not run in the GUI thread.

        Raises:
            EngineError: if a tunnel does not open.
        """
        return self._tunnels.reach(rig)

    # ------------------------------------------------------------------ looking for machines

    def start_looking(self) -> None:
        """Search the local network for machines until `stop_looking` is called. `found` is emitted with them."""
        if self._search is None:
            interfaces = tuple(filter(None, os.environ.get(INTERFACES_VARIABLE, "").split(",")))
            self._search = NearbySearch(self._announced.emit, self._search_ended.emit, interfaces=interfaces)
            self._background.run("Looking for machines", self._search.start, _nothing, self._show_error, quiet=True)
        self._look_up()

    def stop_looking(self) -> None:
        """Stop the search for machines on the local network."""
        search, self._search, self._machines = self._search, None, ()
        self._answers = {}
        if search is not None:
            self._background.run("Ending the search for machines", search.close, _nothing, self._show_error, quiet=True)

    def _on_announced(self, machines: tuple[NearbyMachine, ...]) -> None:
        # Reports that were queued before the search was stopped are dropped.
        if self._search is not None:
            self._machines = machines
            self._emit_found()

    def _on_search_ended(self, sentence: str) -> None:
        if self._search is not None:
            self.status_changed.emit(sentence, True)

    def _look_up(self) -> None:
        def show(pairings: tuple[Pairing, ...]) -> None:
            self._pairings = pairings
            self._emit_found()

        self._background.run("Reading pairings", partial(self._book.all, "server"), show, self._show_error, quiet=True)

    def _emit_found(self) -> None:
        rows = list_machines(self._machines, self._pairings)
        silent = {
            LendingMachine(row.endpoint, row.fingerprint, row.name): row
            for row in rows
            if row.is_paired and not row.is_announced and row.endpoint
        }
        # One that was announced meanwhile is asked again when it is silent.
        self._answers = {machine: answer for machine, answer in self._answers.items() if machine in silent}
        for machine in silent.keys() - self._answers.keys():
            self._ask(machine)
        answering = {row for machine, row in silent.items() if self._answers.get(machine)}
        self.found.emit(tuple(replace(row, answers=row in answering) for row in rows))

    def _ask(self, machine: LendingMachine) -> None:
        """Connect to a paired machine that does not announce itself on the local network; store whether it answers."""
        self._answers[machine] = False

        def show(_offer: object) -> None:
            if machine in self._answers:
                self._answers[machine] = True
                self._emit_found()

        def failed(_error: EngineError) -> None:
            """Do nothing: the machine is shown as not found until it answers."""

        self._background.run("Looking at machines", partial(self.machines.ask, machine), show, failed, quiet=True)

    # ------------------------------------------------------------------ one of them

    def pair(self, endpoint: str, code: str) -> None:
        """Pair with the machine at `endpoint`, whose screen shows `code`.

        `status_changed` and `paired` are emitted with the result.
        """

        def exchange() -> Pairing:
            # Takes a while to import, and most windows never pair.
            from engine.machines.tunnel.calling import pair_with
            from engine.machines.tunnel.identity import read_identity

            try:
                pairing = pair_with(endpoint, code, read_identity(self._identity), platform.node() or "unnamed")
            except ValueError as error:
                raise ArgumentError(str(error)) from None
            self._book.add(pairing)
            return pairing

        def show(pairing: Pairing) -> None:
            self.status_changed.emit(tr("Paired with {words}.", words=pairing.words), False)
            self.paired.emit(pairing)
            self._look_up()

        self._background.run(tr("Pairing with {endpoint}", endpoint=endpoint), exchange, show, self._show_error)

    def add(self, machine: Found) -> None:
        """Connect to a paired machine, and add the devices that it lends to the device list.

        If the machine has another certificate than before, its devices replace the listed ones.
        """
        asked = LendingMachine(machine.endpoint, machine.fingerprint, machine.name)

        def show(found: tuple[Device, ...]) -> None:
            known = {device.endpoint: device.fingerprint for device in self._live.devices.rig.devices}
            new = [device for device in found if device.endpoint not in known]
            now = {
                device.endpoint: self._limits.apply(device)
                for device in found
                if known.get(device.endpoint) not in (None, device.fingerprint)
            }
            if now:
                # With the ids of before: layouts name them.
                self._live.set_devices(
                    self._live.devices.with_changed(lambda old: replace(now.get(old.endpoint, old), id=old.id))
                )
                self._notices.show(tr("{name} can be used again.", name=machine.name))
                self.status_changed.emit(_added_text(machine.name, tuple(now.values())), False)
                if not new:
                    return
            if not new:
                sentence = tr(
                    "{name} at {endpoint} is already among the devices.", name=machine.name, endpoint=machine.endpoint
                )
                self._show_error(RigError(sentence))
                return
            self._live.set_devices(self._live.devices.with_devices(tuple(map(self._limits.apply, new))))
            self._notices.show(tr("Added {name}", name=machine.name))
            self.status_changed.emit(_added_text(machine.name, new), False)

        self._background.run(
            tr("Connecting to {name}", name=machine.name),
            partial(self.machines.find, asked),
            show,
            self._show_error,
        )

    def forget(self, machine: Found) -> None:
        """Delete the pairing with `machine` on this computer; on the other computer the pairing stays."""

        def show(_removed: object) -> None:
            self.status_changed.emit(
                tr(
                    "The pairing with {name} was deleted on this computer. To delete it on {name} too, choose Forget "
                    "there.",
                    name=machine.name,
                ),
                False,
            )
            self._look_up()

        self._background.run(
            tr("Deleting the pairing with a computer"),
            partial(self._book.forget, machine.fingerprint),
            show,
            self._show_error,
        )

    def close(self) -> None:
        """Stop the search and the tunnels, and wait a bounded time for them."""
        if self._search is not None:
            self._search.close()
            self._search = None
        self._tunnels.close()

    def _show_error(self, error: EngineError) -> None:
        self.status_changed.emit(error.summary(), True)


def _added_text(name: str, devices: Sequence[Device]) -> str:
    if len(devices) == 1 and not devices[0].away:
        return tr("{name} was added to the devices.", name=name)
    words = tr("{name} was added to the devices: {ids}.", name=name, ids=names_of(devices))
    away = [
        tr("{id} cannot be used yet ({reason}).", id=device.id, reason=device.away) for device in devices if device.away
    ]
    return " ".join((words, *away))


def list_machines(machines: Sequence[NearbyMachine], pairings: Sequence[Pairing]) -> tuple[Found, ...]:
    """Return the rows of the list of machines: first all paired machines, then announced ones that are not paired.

    A machine that announces several ports has a row for each of them.
    `machines`: machines that announce themselves now. `pairings`: all pairings with machines that lend devices.
    """
    by_fingerprint = {each.fingerprint: each for each in pairings}
    of_endpoint = {each.endpoint: each.fingerprint for each in pairings if each.endpoint}
    announced: list[Found] = []
    strangers: list[Found] = []
    for each in machines:
        known = by_fingerprint.get(each.fingerprint)
        row = Found(
            name=each.name if known is None else known.name,
            endpoint=each.endpoint,
            fingerprint=each.fingerprint,
            device=each.device,
            total_bytes=each.total_bytes,
            is_announced=True,
            is_paired=known is not None,
            is_changed=known is None and each.endpoint in of_endpoint,
        )
        (strangers if known is None else announced).append(row)
    found = {row.fingerprint for row in announced}
    silent = [
        Found(each.name, each.endpoint, each.fingerprint, is_paired=True)
        for each in pairings
        if each.fingerprint not in found
    ]
    # In the order of the pairings, so that rows keep their places when machines come and go.
    order = {fingerprint: index for index, fingerprint in enumerate(by_fingerprint)}
    paired = sorted((*announced, *silent), key=lambda row: (order[row.fingerprint], row.endpoint))
    return (*paired, *strangers)


def is_address(text: str) -> bool:
    """Return whether `text` is an endpoint (host:port)."""
    try:
        parse_endpoint(text)
    except ValueError:
        return False
    return True


def _nothing(_result: None) -> None:
    """Do nothing: the callback for when a search has started or ended."""
