"""Prepares the library's forecasts: chooses the models, and rounds the rig's free memory and speeds.

The module also makes the key under which forecasts are saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path

import msgspec
from msgspec import Struct

from engine.base.units import MIB
from engine.base.values import replace
from engine.devices.device import Device, Rig
from engine.library.entry import Entry
from engine.library.fit import Fit
from engine.planning.fit.strategies.constraints import Constraints
from engine.planning.speed.speeds import Speeds

# Version of forecasts.
# Increase it if the same model on the same rig would get another forecast; saved ones are then ignored.
FIT_VERSION = 4
_STEP_BYTES = 256 * MIB
_STEPS = 64
# Steps of the host, coarser than those of devices.
# Its free memory changes all the time, and forecasts of hundreds of models should outlast that.
_HOST_STEPS = 16
# Speeds that change by less than this factor make no new forecasts: each answer changes them a little.
_SPEED_STEP = 1.2


def settled_rig(rig: Rig, before: Rig | None = None) -> Rig:
    """Return `rig` with free memory rounded down to coarse steps, so that small changes leave forecasts valid.

    `before`: result of the last call, None for the first one. It is returned unchanged if free memory has hardly
    changed since that call.
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
        # The memory in `before` was rounded down by up to one step. It may grow by one more, or shrink by half a step.
        and -_step(now) // 2 <= now.available_bytes - then.available_bytes <= 2 * _step(now)
        for now, then in zip(rig.all_devices, before.all_devices, strict=True)
    )


def settled_speeds(speeds: Speeds, before: Speeds | None) -> Speeds:
    """Return the speeds for forecasts: those of the last call if none has changed by more than 20 %, else `speeds`.

    `before`: result of the last call, None for the first one.
    """
    if before is None:
        return speeds
    now, then = dict(_figures(speeds)), dict(_figures(before))
    # A value that is missing in one of the two counts as 1, which is no correction.
    is_near = all(abs(_steps(now.get(name, 1.0) / then.get(name, 1.0))) <= 1 for name in now.keys() | then.keys())
    return before if is_near else speeds


def _steps(factor: float) -> float:
    return math.log(factor, _SPEED_STEP)


def _figures(speeds: Speeds) -> Iterator[tuple[str, float]]:
    """Yield name and value of each number in `speeds`: measured speeds and correction factors. All are above 0."""
    for kind in ("bandwidths", "op_seconds", "factors", "ratios"):
        yield from ((f"{kind} {name}", value) for name, value in getattr(speeds, kind).items())
    for device_id, types in speeds.by_type.items():
        yield from ((f"{device_id} {name}", value) for name, value in types.items())
    for device_id, link in speeds.links.items():
        yield f"{device_id} latency", link.latency_s
        yield f"{device_id} rate", link.bytes_per_second


def rig_key(rig: Rig, constraints: Constraints, strategy: str, *, text_only: bool = False) -> str:
    """Return the key under which forecasts are saved: a hash of the rig, the strategy, its constraints, and the speeds.

    `text_only`: whether the forecasts count no projectors. Forecasts with and without projectors have different keys,
    so that both stay saved.
    """
    speeds = constraints.speeds
    document: Mapping[str, object] = {
        "version": FIT_VERSION,
        "strategy": strategy,
        "text_only": text_only,
        "order": constraints.order,
        "off": sorted(constraints.off),
        "kv_types": constraints.kv_types,
        "split": constraints.split,
        "one_backend": constraints.one_backend,
        "devices": [
            (
                device.id, device.name, device.backend, device.kind, device.total_bytes, device.available_bytes,
                device.margin_bytes, device.endpoint or "", device.overhead_bytes or 0,
            )
            for device in rig.all_devices
        ],
        "speeds": sorted((name, step) for name, value in _figures(speeds) if (step := round(_steps(value)))),
    }  # fmt: skip
    return blake2b(msgspec.json.encode(document), digest_size=12).hexdigest()


class Job(Struct, frozen=True):
    """A model file for which a forecast of memory and speed is to be computed.

    `mark`: fingerprint of the file.
    `path`: path of the first part.
    `projector`: path of the projector whose memory is counted, None if none is.
    """

    mark: str
    path: Path
    projector: Path | None = None


def jobs(entries: Iterable[Entry], known: Mapping[str, Fit], *, text_only: bool = False) -> tuple[Job, ...]:
    """Return the models to forecast: the proposed quantisation of each entry first, then the other quantisations.

    A quantisation is left out if `known` has a forecast of it with the same projector.

    `known`: saved forecasts by fingerprint.
    `text_only`: whether to count no projectors; else the projector that suits a quantisation best is counted.
    """
    first: dict[str, Job] = {}
    later: dict[str, Job] = {}
    for entry in entries:
        for each in entry.quantisations:
            if each.facts is None or each.fault or not each.facts.fingerprint:
                continue
            side = None if text_only else entry.side_file("projector", each)
            projector = None if side is None else side.file.path
            fit = known.get(each.facts.fingerprint)
            if fit is not None and fit.projector == ("" if projector is None else projector.name):
                continue
            job = Job(each.facts.fingerprint, each.copy.path, projector)
            (first if each is entry.proposed else later).setdefault(job.mark, job)
    return (*first.values(), *(job for job in later.values() if job.mark not in first))
