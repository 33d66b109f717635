"""The time of passing a token's hidden state from one device to another, and its size in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from engine.devices.device import CPU_ID, Rig
from engine.planning.speed.speeds import Speeds, hop_seconds, link
from engine.planning.speed.work import Work


@dataclass(frozen=True, slots=True)
class HopCosts:
    """Cost of passing a token's hidden state between devices.

    `size_bytes`: bytes of the hidden state.
    `seconds`: for each device, its id and the seconds of one transfer between it and the host.
    """

    size_bytes: int
    seconds: tuple[tuple[str, float], ...]

    def between(self, one: str, other: str) -> float:
        """Return the seconds for passing a token's hidden state from device `one` to device `other`.

        The state is assumed to go through the host's memory, so the times of both devices are added. The CPU adds
        nothing.
        """
        times = dict(self.seconds)
        return sum(times.get(each, 0.0) for each in (one, other) if each != CPU_ID)


def hop_costs(work: Work, rig: Rig, speeds: Speeds) -> HopCosts:
    """Return the cost of passing a token's hidden state between devices of `rig`, with the formula of `CostModel`."""
    size = work.hop_bytes
    times = []
    for device in rig.devices:
        away = link(device, speeds)
        times.append((device.id, hop_seconds(device) + away.latency_s + size / away.bytes_per_second))
    return HopCosts(int(size), tuple(times))
