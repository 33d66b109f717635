"""Waiting for a device's memory to come back after an unload: drivers give it back some time after the process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.devices.device import Rig

RECOVERED_SHARE = 0.75
LIMIT_S = 5.0
"""Nobody waits longer than this: another program may have taken what came back."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """What was free on each device before the unload, and what the model held there. `began_s` is monotonic."""

    began_s: float
    free_before_bytes: Mapping[str, int]
    held_bytes: Mapping[str, int]

    def is_over(self, free_bytes: Mapping[str, int], now_s: float) -> bool:
        """Return whether more than three quarters are free again on every device, or the limit has passed."""
        if now_s - self.began_s >= LIMIT_S:
            return True
        return all(
            free_bytes.get(device, 0) - before > RECOVERED_SHARE * self.held_bytes[device]
            for device, before in self.free_before_bytes.items()
        )

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that are waited for."""
        return tuple(self.free_before_bytes)


def begin_recovery(
    rig: Rig, free_bytes: Mapping[str, int], held_bytes: Mapping[str, int], now_s: float
) -> Recovery | None:
    """Return what to wait for once a model that holds `held_bytes` goes; None: nothing.

    `free_bytes` are live readings. The CPU, integrated devices and Metal share the host's memory, which is free as
    soon as the process has ended; a device without a reading cannot be waited for.
    """
    before = {
        device.id: free_bytes[device.id]
        for device in rig.devices
        if device.kind == "gpu" and device.backend != "Metal" and device.id in free_bytes and held_bytes.get(device.id)
    }
    return Recovery(now_s, before, dict(held_bytes)) if before else None
