"""Looking for devices: what the engine finds, with what drivers and earlier self-tests tell of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.devices.device import Device, Rig
from engine.rigs.discovery import discover
from engine.rigs.self_test import read_verdicts, with_verdicts
from engine.telemetry.cards import read_card_facts, with_display_margins


def find_devices(verdicts: Path, rpc_endpoints: Sequence[str] = ()) -> Rig:
    """Return this machine's devices and those of the endpoints, with default margins.

    `verdicts` is the file of self-tests. Blocks as `discover` does, and raises what it raises.
    """
    rig = discover(tuple(rpc_endpoints))
    rig = with_display_margins(rig, read_card_facts(rig.devices))
    return with_verdicts(rig, read_verdicts(verdicts))


def find_workers(endpoint: str) -> tuple[Device, ...]:
    """Return the devices of the RPC worker at `endpoint` (host:port). Blocks as `discover` does, and raises alike."""
    return tuple(device for device in discover((endpoint,)).devices if device.is_rpc)
