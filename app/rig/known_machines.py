"""Paired machines whose devices are in the list. The devices are stored in a rig file for the next start.

A machine that does not answer is shown as away. As long as a device of a machine is in the list, the machine is asked
every few seconds which devices it lends. So its devices are usable as soon as it answers again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct
from PySide6.QtCore import QObject, QTimer

from app.background import Background, Worker
from app.notices import Notices
from app.paths import machines_path
from app.rig.limit_store import LimitStore
from app.rig.live_rig import LiveRig
from app.rig.peers import Peers
from engine.base.errors import EngineError, RigError
from engine.base.json_file import changing
from engine.base.language import tr
from engine.base.values import replace
from engine.devices.device import Device, Rig, with_free_ids
from engine.devices.endpoint import GreetingStatus, parse_lent_endpoint
from engine.devices.rig_file import read_rig, write_rig
from engine.machines.rigs.remote_machines import LendingMachine, machine_of, with_offer
from engine.machines.tunnel.offers import STRANGER, OfferedDevice, TunnelError
from engine.machines.tunnel.pairings import PairingError

WATCH_MS = 10_000
"""Milliseconds between two requests to a paired machine for the list of devices that it lends."""
_log = logging.getLogger("layerdeck.machines")


class _Seen(Struct, frozen=True):
    """A paired machine's answer about the devices that it lends, and the tunnels to them.

    `offered`: lent devices by name; None if the machine has an older release, which does not list them.
    `vias`: address (host:port) of the local end of the tunnel to a device, by the device's endpoint.
    """

    offered: Mapping[str, OfferedDevice] | None
    vias: Mapping[str, str | None]


class KnownMachines(QObject):
    """Asks paired machines regularly which devices they lend, updates the device list, and stores these devices.

    After `close` no machine is asked any more.
    """

    def __init__(
        self,
        live: LiveRig,
        peers: Peers,
        limits: LimitStore,
        background: Background,
        notices: Notices,
        *,
        path: Path | None = None,
        watch_ms: int = WATCH_MS,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._live, self._peers, self._limits = live, peers, limits
        self._background, self._notices = background, notices
        self._path = path or machines_path()
        self._writer = Worker("machines")
        self._asked: set[LendingMachine] = set()
        self._kept: tuple[Device, ...] | None = None
        """Lent devices that were last written or read; None until they are read, and while a rig file is open."""
        self._is_reading = False
        self._timer = QTimer(self)
        self._timer.setInterval(watch_ms)
        self._timer.timeout.connect(self.look)
        live.devices_changed.connect(self._on_devices_changed)

    def restore(self) -> None:
        """Add the stored devices of the last run to the list. They are marked as away until their machines answer."""

        def show(devices: tuple[Device, ...]) -> None:
            self._is_reading = False
            # A rig file that was opened meanwhile describes all devices.
            if self._live.devices.from_file:
                return
            self._kept = devices
            listed = {device.endpoint for device in self._live.devices.rig.devices}
            away = [
                replace(self._limits.apply(device), away=tr("not reachable"))
                for device in devices
                if device.fingerprint is not None and device.endpoint not in listed
            ]
            if away:
                self._live.set_devices(self._live.devices.with_devices(away))
            self._keep()
            self.look()

        def failed(error: EngineError) -> None:
            _log.warning("the list of machines was not read: %s", error.summary())
            show(())

        self._is_reading = True
        self._background.run("Reading machines", partial(_read, self._path), show, failed, quiet=True)

    def look(self) -> None:
        """Ask paired machines in background threads which devices they lend now.

        Only machines with devices in the device list are asked.
        """
        for machine in dict.fromkeys(map(machine_of, self._live.devices.rig.devices)):
            # One request at a time to each machine: one that is away takes the whole time-out.
            if machine is None or machine in self._asked:
                continue
            self._asked.add(machine)
            self._background.run(
                "Looking at machines",
                partial(self._see, machine, self._devices_of(machine)),
                partial(self._show, machine),
                partial(self._show_away, machine),
                quiet=True,
            )

    def close(self) -> None:
        """Stop asking machines for their devices. A request that is already running is completed."""
        self._timer.stop()

    def _devices_of(self, machine: LendingMachine) -> tuple[Device, ...]:
        return tuple(device for device in self._live.devices.rig.devices if machine_of(device) == machine)

    def _see(self, machine: LendingMachine, devices: tuple[Device, ...]) -> _Seen:
        """Ask the machine which devices it lends, and open tunnels to `devices`. Called in a background thread.

        `devices`: the listed devices of this machine.

        Raises:
            EngineError: if the machine does not answer, or a tunnel does not open.
        """
        offered: Mapping[str, OfferedDevice] | None
        try:
            offer = self._peers.machines.ask(machine)
            offered = {each.name: each for each in offer.devices}
        except TunnelError as error:
            # An older release closes such a question, and its device has no name.
            if error.status is not GreetingStatus.NOT_RPC or any(_name_of(device) for device in devices):
                raise
            offered = None
        reached = self._peers.reach(Rig(devices, self._live.devices.rig.host))
        return _Seen(offered, {device.endpoint or "": device.via for device in reached.devices})

    def _show(self, machine: LendingMachine, seen: _Seen) -> None:
        def now(device: Device) -> Device:
            device = replace(device, via=seen.vias.get(device.endpoint or "", device.via))
            if seen.offered is None:
                return replace(device, away="")
            name = _name_of(device) or next(iter(seen.offered), "")
            # The margin that the user has set here counts more than that of the offer.
            changed = self._limits.apply(with_offer(device, seen.offered.get(name)))
            # The sizes of a rig file are somebody's plan.
            return replace(device, away=changed.away) if self._live.devices.from_file else changed

        self._change(machine, now)

    def _show_away(self, machine: LendingMachine, error: EngineError) -> None:
        _log.info("%s: %s", machine.name, error.summary())
        unknown, doubted = tr("not paired"), tr("not paired, or not lent now")

        def words(device: Device) -> str:
            if isinstance(error, PairingError):
                return unknown
            # A tunnel that does not open on this computer says nothing about the pairing.
            if not isinstance(error, TunnelError) or error.status is not GreetingStatus.UNTRUSTED:
                return tr("not reachable")
            # The other computer also closes the connection like this if its lending ends just then. If it does so at
            # the next request again, it is lending, and does not know this computer.
            return doubted if error.words == STRANGER and device.away not in (doubted, unknown) else unknown

        self._change(machine, lambda device: replace(device, away=words(device)))

    def _change(self, machine: LendingMachine, change: Callable[[Device], Device]) -> None:
        """Replace each listed device of a machine by the result of `change`.

        A notice is shown if the machine can be used again, or cannot be used any more.
        """
        self._asked.discard(machine)
        before = {device.id: device for device in self._devices_of(machine)}
        if not before:
            return
        after = {name: change(device) for name, device in before.items()}
        self._live.set_devices(self._live.devices.with_changed(lambda device: after.get(device.id, device)))
        self._keep()
        was_usable, is_usable = (any(not each.away for each in devices.values()) for devices in (before, after))
        if is_usable and not was_usable:
            self._notices.show(tr("{name} can be used again.", name=machine.name))
        elif was_usable and not is_usable:
            away = next(each.away for each in after.values())
            self._notices.show(tr("{name} cannot be used now: {reason}.", name=machine.name, reason=away), bad=True)

    def _on_devices_changed(self) -> None:
        if any(device.fingerprint is not None for device in self._live.devices.rig.devices):
            self._timer.start()
        else:
            self._timer.stop()
        if self._live.devices.from_file:
            # A rig file is not what this window has used.
            self._kept = None
        elif self._kept is None and not self._is_reading:
            self.restore()
        self._keep()

    def _keep(self) -> None:
        """Write the listed devices of paired machines to the rig file for the next start, if they have changed."""
        devices, before = self._live.devices, self._kept
        lent = tuple(device for device in devices.rig.devices if device.fingerprint is not None)
        if before is None or _stored_fields(lent) == _stored_fields(before):
            return
        self._kept = lent
        self._background.run(
            "Keeping machines",
            partial(_write, self._path, before, Rig(lent, devices.rig.host)),
            _nothing,
            _log_error,
            quiet=True,
            worker=self._writer,
        )


def _read(path: Path) -> tuple[Device, ...]:
    return read_rig(path).devices if path.exists() else ()


def _write(path: Path, before: Sequence[Device], rig: Rig) -> None:
    """Replace the devices `before` in the rig file `path` by those of `rig`.

    Devices that another window has added to the file stay.

    Raises:
        RigError: if the file cannot be written.
    """
    with changing(path, what="rig", fail=RigError):
        try:
            stored = _read(path)
        except RigError:
            stored = ()  # A damaged file begins anew.
        known = {device.endpoint for device in (*before, *rig.devices)}
        others = with_free_ids((device for device in stored if device.endpoint not in known), rig.ids)
        write_rig(path, Rig((*rig.devices, *others), rig.host))


def _stored_fields(devices: Sequence[Device]) -> list[object]:
    """Return the values of `devices` that decide about writing: the file is written if one of them has changed.

    Free memory is left out, because it changes often.
    """
    return [
        (device.id, device.name, device.endpoint, device.fingerprint, device.total_bytes, device.remote)
        for device in devices
    ]


def _log_error(error: EngineError) -> None:
    _log.warning("the list of machines was not written: %s", error.summary())


def _nothing(_result: None) -> None:
    """Callback for a written file, which needs no further action."""


def _name_of(device: Device) -> str:
    return parse_lent_endpoint(device.endpoint or "")[1]
