"""Looking for devices: what the engine finds, with what drivers and earlier self-tests tell of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.devices.device import Device, Rig
from engine.rigs.check_book import read_check_book
from engine.rigs.discovery import discover
from engine.rigs.self_test import read_verdicts, with_verdicts
from engine.telemetry.cards import read_card_facts, with_display_margins
from engine.telemetry.drivers import read_drivers


def find_devices(verdicts: Path, rpc_endpoints: Sequence[str] = (), *, checks: Path | None = None) -> Rig:
    """Return this machine's devices and those of the endpoints, with default margins.

    `verdicts` is the file of self-tests, `checks` that of the engine's checks of itself, None: what they say is left
    aside. Blocks as `discover` does, and raises what it raises.
    """
    rig = discover(tuple(rpc_endpoints))
    rig = with_display_margins(rig, read_card_facts(rig.devices))
    rig = with_verdicts(rig, read_verdicts(verdicts))
    return rig if checks is None else read_check_book(checks).apply(rig, read_drivers(rig.devices))


def find_workers(endpoint: str) -> tuple[Device, ...]:
    """Return the devices of the RPC worker at `endpoint` (host:port). Blocks as `discover` does, and raises alike."""
    return tuple(device for device in discover((endpoint,)).devices if device.is_rpc)
