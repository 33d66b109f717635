"""How long weights take to a remote worker, told before they are sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.devices.device import Rig
from engine.speed.speeds import Speeds


@dataclass(frozen=True, slots=True)
class Sending:
    """Weights that a load sends to an RPC worker, which may keep some from an earlier load; at most these seconds."""

    id: str
    size_bytes: int
    seconds: float


def sendings(weights_bytes: Mapping[str, int], rig: Rig, speeds: Speeds) -> tuple[Sending, ...]:
    """Return what goes to each worker whose link was measured, by the weights of each device."""
    found = []
    for device in rig.devices:
        size_bytes, link = weights_bytes.get(device.id, 0), speeds.links.get(device.id)
        if device.is_rpc and size_bytes and link is not None:
            found.append(Sending(device.id, size_bytes, size_bytes / link.bytes_per_second))
    return tuple(found)
