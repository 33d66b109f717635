"""What a boundary or a part on another device costs a token: bytes over the links, and the time for them."""

from __future__ import annotations

from dataclasses import dataclass

from engine.devices.device import CPU_ID, Rig
from engine.planning.speed.speeds import Speeds, hop_seconds, link
from engine.planning.speed.work import Work


@dataclass(frozen=True, slots=True)
class HopCosts:
    """`size_bytes`: the hidden state of a token, which crosses. `seconds`: time of a transfer, by device."""

    size_bytes: int
    seconds: tuple[tuple[str, float], ...]

    def between(self, one: str, other: str) -> float:
        """Return the seconds in which a token goes from one device to another one. The CPU has no link of its own."""
        times = dict(self.seconds)
        return sum(times.get(each, 0.0) for each in (one, other) if each != CPU_ID)


def hop_costs(work: Work, rig: Rig, speeds: Speeds) -> HopCosts:
    """Return the cost of a token's transfers on a rig, as the cost model counts them (`CostModel`)."""
    size = work.hop_bytes
    times = []
    for device in rig.devices:
        away = link(device, speeds)
        times.append((device.id, hop_seconds(device) + away.latency_s + size / away.bytes_per_second))
    return HopCosts(int(size), tuple(times))
