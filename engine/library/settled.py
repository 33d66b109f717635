"""The rig that a whole library is planned for: as it is at rest, and what its forecasts are kept under."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b

import msgspec

from engine.devices.device import Device, Rig
from engine.fit.strategies.constraints import Constraints
from engine.units import MIB

FIT_VERSION = 2
"""Goes up where a forecast of the same model on the same rig would be another one: kept results are then not used."""
_STEP_BYTES = 256 * MIB
_STEPS = 64
_HOST_STEPS = 16
"""The computer's own memory goes up and down by the hour: forecasts of hundreds of models are to outlast that."""


def settled_rig(rig: Rig, before: Rig | None = None) -> Rig:
    """Return `rig` with free memory in coarse steps, so that forecasts outlast the ups and downs of a second.

    Where nothing differs from `before` by more than a step, it is `before`.
    """
    first, *others = (
        replace(device, free_bytes=device.available_bytes // _step(device) * _step(device), holdings=())
        for device in (rig.host, *rig.devices)
    )
    settled = Rig(tuple(others), first)
    return before if before is not None and _is_near(rig, before) else settled


def _step(device: Device) -> int:
    return max(_STEP_BYTES, device.total_bytes // (_HOST_STEPS if device.is_host else _STEPS))


def _is_near(rig: Rig, before: Rig) -> bool:
    if rig.ids != before.ids:
        return False
    return all(
        replace(now, free_bytes=0, holdings=()) == replace(then, free_bytes=0, holdings=())
        # What is planned with is rounded down: up to a step less is there, and one more may come and go.
        and -_step(now) // 2 <= now.available_bytes - then.available_bytes <= 2 * _step(now)
        for now, then in zip(rig.all_devices, before.all_devices, strict=True)
    )


def rig_key(rig: Rig, constraints: Constraints, strategy: str) -> str:
    """Return what forecasts of a rig are kept under: another rig, other wishes or other speeds have another key."""
    speeds = constraints.speeds
    said: Mapping[str, object] = {
        "version": FIT_VERSION,
        "strategy": strategy,
        "order": constraints.order,
        "off": sorted(constraints.off),
        "kv_types": constraints.kv_types,
        "split": constraints.split,
        "devices": [
            (
                device.id, device.name, device.backend, device.kind, device.total_bytes, device.available_bytes,
                device.margin_bytes, device.endpoint or "", device.overhead_bytes or 0,
                round(speeds.bandwidths.get(device.id, 0) / 1e9),
            )
            for device in rig.all_devices
        ],
    }  # fmt: skip
    return blake2b(msgspec.json.encode(said), digest_size=12).hexdigest()
