"""The time and bytes that a token costs when its hidden state passes from one device to another."""

from __future__ import annotations

from dataclasses import dataclass

from engine.devices.device import CPU_ID, Rig
from engine.planning.speed.speeds import Speeds, hop_seconds, link
from engine.planning.speed.work import Work


@dataclass(frozen=True, slots=True)
class HopCosts:
    """Cost of passing a token's hidden state between devices.

    `size_bytes`: bytes of the hidden state.
    `seconds`: (device id, seconds) of one transfer to or from each device.
    """

    size_bytes: int
    seconds: tuple[tuple[str, float], ...]

    def between(self, one: str, other: str) -> float:
        """Return the seconds for passing a token's hidden state from device `one` to `other`.

        The CPU's side costs nothing.
        """
        times = dict(self.seconds)
        return sum(times.get(each, 0.0) for each in (one, other) if each != CPU_ID)


def hop_costs(work: Work, rig: Rig, speeds: Speeds) -> HopCosts:
    """Return the cost of passing a token's hidden state between devices of `rig`, computed as in `CostModel`."""
    size = work.hop_bytes
    times = []
    for device in rig.devices:
        away = link(device, speeds)
        times.append((device.id, hop_seconds(device) + away.latency_s + size / away.bytes_per_second))
    return HopCosts(int(size), tuple(times))
