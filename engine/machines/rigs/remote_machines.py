"""Finds the devices that paired machines lend, and keeps their free memory and state up to date.

Each machine is asked through the encrypted tunnel. Its offered devices become devices of the rig.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from engine.base.errors import EngineError
from engine.base.language import tr
from engine.base.values import replace
from engine.devices.device import (
    LENT_NAME_SEPARATOR,
    BufferFacts,
    Device,
    RemoteFacts,
    Rig,
    machine_name,
    remote_margin_bytes,
    routes_of,
)
from engine.devices.endpoint import GreetingStatus, parse_lent_endpoint
from engine.machines.rigs.check_results import read_check_results
from engine.machines.rigs.discovery import Peer, discover, find_peer
from engine.machines.tunnel.identity import read_identity
from engine.machines.tunnel.offers import CALL_TIMEOUT_S, Offer, OfferedDevice, TunnelError
from engine.machines.tunnel.pairings import PairingError, PairingStore
from engine.machines.tunnel.tunnels import Tunnels

_NOT_FOR_IDS = re.compile(r"[^A-Za-z0-9_.]+", re.ASCII)
_MAX_ID = 64


class LendingMachine(Struct, frozen=True):
    """A paired machine that lends devices to this computer.

    `endpoint`: address (host:port) of its listener.
    `fingerprint`: fingerprint of its certificate.
    `name`: name of the machine in this computer's pairings.
    """

    endpoint: str
    fingerprint: str
    name: str


class RemoteMachines:
    """Finds the devices of paired machines.

    Its methods wait for the network, so they must not run in the GUI thread.
    """

    def __init__(self, identity: Path, book: PairingStore, tunnels: Tunnels, checks: Path) -> None:
        self._identity, self._book, self._tunnels, self._checks = identity, book, tunnels, checks

    def find(self, machine: LendingMachine) -> tuple[Device, ...]:
        """Return the devices that `machine` lends. `Device.away` says why a device cannot be used now.

        The engine reads memory and capabilities from the worker of each free device. A worker serves one client at a
        time, so a device in use has the values of the machine's offer, even if this computer is the client.

        Raises:
            EngineError: if the machine or a worker of a free device does not answer, or if the machine lends nothing.
        """
        try:
            offer = self.ask(machine)
        except TunnelError as error:
            if error.status is not GreetingStatus.NOT_RPC:
                raise
            # A machine of an older release closes at the preface. It has one device without a name, or none at all.
            via = self._tunnels.route(machine.endpoint, machine.fingerprint)
            return find_peer(Peer(machine.endpoint, machine.fingerprint, machine.name, via), self._checks)
        if not offer.devices:
            raise EngineError(
                tr(
                    "{name} lends no devices now. On that computer choose Devices > Lend This Computer, or start "
                    "`layerdeck-cli rig serve` again.",
                    name=machine.name,
                )
            )
        devices = [device_of(each, machine) for each in offer.devices]
        reached = self._tunnels.reach(Rig(tuple(devices), devices[0]))
        both = zip(reached.devices, offer.devices, strict=True)
        free = [device for device, offered in both if not device.away and not offered.is_yours]
        seen = self._see(free)
        checks = read_check_results(self._checks)
        return tuple(checks.judged(seen.get(device.endpoint or "", device)) for device in reached.devices)

    def ask(self, machine: LendingMachine, timeout_s: float = CALL_TIMEOUT_S) -> Offer:
        """Return the offer of `machine` (the devices that it lends). Raises `TunnelError`."""
        # Imported here: the window opens without asyncio.
        from engine.machines.tunnel.calling import ask_offer

        pairing = self._book.find("server", machine.fingerprint)
        if pairing is None:
            raise PairingError(
                tr("{name} is not paired with this computer; pair the two computers again.", name=machine.name)
            )
        return ask_offer(machine.endpoint, pairing.der, read_identity(self._identity), timeout_s)

    def _see(self, devices: Sequence[Device]) -> dict[str, Device]:
        """Return the devices with the memory and capabilities that the engine reports for them, by endpoint.

        Raises:
            EngineError: if the worker of one device does not answer.
        """
        if not devices:
            return {}
        endpoints = [device.endpoint for device in devices if device.endpoint is not None]
        found = {each.endpoint: each for each in discover(endpoints, routes=routes_of(devices)).devices if each.is_rpc}
        return {
            endpoint: _seen(device, found.get(endpoint)) for endpoint, device in zip(endpoints, devices, strict=True)
        }


def machine_of(device: Device) -> LendingMachine | None:
    """Return the paired machine that lends `device`; None if the device is not lent."""
    if device.endpoint is None or device.fingerprint is None:
        return None
    address, _ = parse_lent_endpoint(device.endpoint)
    return LendingMachine(address, device.fingerprint, machine_name(device))


def device_of(offered: OfferedDevice, machine: LendingMachine) -> Device:
    """Return the `Device` of the rig for a device that `machine` offers. `via`, the tunnel's address, is not set."""
    device = Device(
        id=_device_id(machine.name, offered.name),
        name=LENT_NAME_SEPARATOR.join(filter(None, (machine.name, offered.description or offered.name))),
        backend="RPC",
        # As ggml reports RPC devices of every kind.
        kind="gpu",
        total_bytes=offered.total_bytes,
        free_bytes=offered.free_bytes,
        endpoint=f"{machine.endpoint}/{offered.name}",
        fingerprint=machine.fingerprint,
        remote=_facts(offered),
        buffers=_buffers(offered),
        away=away_words(offered),
    )
    return replace(device, margin_bytes=_margin_bytes(device, offered))


def away_words(offered: OfferedDevice) -> str:
    """Return why a lent device cannot be used now, in a few words such as "used by Ann"; empty if it can be used."""
    if offered.refused_s:
        return tr(
            "refused for {minutes} min: models from this computer crashed the device",
            minutes=math.ceil(offered.refused_s / 60),
        )
    return tr("used by {user}", user=offered.user) if offered.user and not offered.is_yours else ""


def with_offer(device: Device, offered: OfferedDevice | None) -> Device:
    """Return `device` with the values of its machine's current offer: why it cannot be used, memory, margin.

    While a client uses the device, its memory values stay as they were before.

    `offered`: the device in the offer; None if it is not offered any more.
    """
    if offered is None:
        return replace(device, away=tr("not lent now"))
    away = away_words(offered)
    if offered.is_yours or away:
        # A loaded model uses part of the memory now, so the free memory from before its load is kept.
        return replace(device, away=away)
    # The lender may not know the free memory. Then that of the last search is the newest one.
    known_bytes = device.free_bytes if offered.free_bytes is None else offered.free_bytes
    now = replace(
        device,
        away="",
        total_bytes=offered.total_bytes,
        free_bytes=None if known_bytes is None else min(known_bytes, offered.total_bytes),
        remote=_facts(offered),
        buffers=_buffers(offered),
    )
    return replace(now, margin_bytes=_margin_bytes(now, offered))


def _margin_bytes(device: Device, offered: OfferedDevice) -> int:
    return max(offered.margin_bytes, remote_margin_bytes(device))


def _buffers(offered: OfferedDevice) -> BufferFacts:
    return BufferFacts(
        alignment_bytes=offered.alignment_bytes,
        largest_tensor_bytes=offered.largest_tensor_bytes,
        largest_buffer_bytes=offered.largest_buffer_bytes,
        mixes_streams=offered.mixes_streams,
    )


def _facts(offered: OfferedDevice) -> RemoteFacts:
    facts = RemoteFacts(offered.backend, offered.overhead_bytes)
    speed = offered.speed
    if speed is None:
        return facts
    return replace(
        facts,
        read_bytes_per_second=speed.read_bytes_per_second,
        by_type=tuple(speed.by_type.items()),
        op_s=speed.op_s,
        products=tuple(speed.products.items()),
    )


def _seen(device: Device, found: Device | None) -> Device:
    if found is None:
        return device
    total_bytes = min(device.total_bytes, found.total_bytes or device.total_bytes)
    free = [each for each in (device.free_bytes, found.free_bytes) if each is not None]
    return replace(
        device,
        total_bytes=total_bytes,
        free_bytes=min(*free, total_bytes) if free else None,
        buffers=replace(
            device.buffers, alignment_bytes=found.buffers.alignment_bytes or device.buffers.alignment_bytes
        ),
        capabilities=found.capabilities,
    )


def _device_id(machine: str, name: str) -> str:
    label = _NOT_FOR_IDS.sub("-", machine).strip("-.")[: _MAX_ID - len(name) - 1].strip("-.")
    return f"{label or 'machine'}-{name}"[:_MAX_ID]
