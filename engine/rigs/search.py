"""Looking for devices: what the engine finds, with what drivers and earlier self-tests tell of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine.devices.device import Device, Rig
from engine.rigs.check_book import read_check_book
from engine.rigs.discovery import discover
from engine.rigs.self_test import read_verdicts, with_verdicts
from engine.telemetry.cards import read_card_facts, read_drivers, with_display_margins


@dataclass(frozen=True, slots=True)
class Peer:
    """A machine that was paired with: who it is, and where on this machine the tunnel to it begins (host:port)."""

    endpoint: str
    fingerprint: str
    name: str
    via: str


def find_devices(
    verdicts: Path, rpc_endpoints: Sequence[str] = (), *, checks: Path | None = None, peers: Sequence[Peer] = ()
) -> Rig:
    """Return this machine's devices, those of the endpoints and those of paired machines, with default margins.

    `verdicts` is the file of self-tests, `checks` that of the engine's checks of itself, None: what they say is left
    aside. Blocks as `discover` does, and raises what it raises.
    """
    rig = _discover(tuple(rpc_endpoints), peers)
    rig = with_display_margins(rig, read_card_facts(rig.devices))
    rig = with_verdicts(rig, read_verdicts(verdicts))
    return rig if checks is None else read_check_book(checks).apply(rig, read_drivers(rig.devices))


def find_workers(endpoint: str, checks: Path) -> tuple[Device, ...]:
    """Return the devices of the RPC worker at `endpoint` (host:port), judged by the file of checks `checks`.

    Blocks as `discover` does, and raises alike.
    """
    return _workers(discover((endpoint,)), checks)


def find_peer(peer: Peer, checks: Path) -> tuple[Device, ...]:
    """Return the devices of a paired machine, judged by the file `checks`. Blocks as `discover`, and raises alike."""
    return _workers(_discover((), (peer,)), checks)


def _workers(rig: Rig, checks: Path) -> tuple[Device, ...]:
    book = read_check_book(checks)
    return tuple(book.judged(device) for device in rig.devices if device.is_rpc)


def _discover(rpc_endpoints: tuple[str, ...], peers: Sequence[Peer]) -> Rig:
    if not peers:
        return discover(rpc_endpoints)
    known = {peer.endpoint: peer for peer in peers}
    rig = discover((*rpc_endpoints, *known), routes={peer.endpoint: peer.via for peer in peers})
    return Rig(tuple(_secured(device, known.get(device.endpoint or "")) for device in rig.devices), rig.host)


def _secured(device: Device, peer: Peer | None) -> Device:
    if peer is None:
        return device
    name = peer.name if device.endpoint_device == 0 else f"{peer.name} device {device.endpoint_device}"
    return replace(device, name=name, fingerprint=peer.fingerprint, via=peer.via)
