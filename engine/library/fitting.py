"""Finds what a model would do on this rig with the strategy that people like best."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b

import msgspec

from engine.devices.device import CPU_ID, Device, Rig
from engine.errors import EngineError
from engine.fit.strategies.catalogue import find_strategy
from engine.fit.strategies.constraints import AutoLayout, Constraints
from engine.fit.strategies.fastest import predict_layout
from engine.gguf.model_file import ModelFile
from engine.library.fit import Fit
from engine.memory.model_memory import ModelMemory
from engine.plan.decisions.defaults import default_context
from engine.plan.edit import Edit
from engine.plan.plan import Plan
from engine.plan.report import FitReport
from engine.units import MIB, format_bytes

FIT_VERSION = 1
"""Goes up where a forecast of the same model on the same rig would be another one: kept results are then not used."""
SHORTEST_CONTEXT = 2048
"""Tokens below which a model is of little use: it does not fit then."""
_STEP_BYTES = 256 * MIB
_STEPS = 64


def find_fit(model: ModelFile, rig: Rig, strategy: str, constraints: Constraints) -> Fit:
    """Return what `strategy` makes of `model` on `rig` with the settings that a model is opened with.

    Where those need too much, less context is tried.

    Raises:
        ArgumentError: for a strategy that is none.
        CancelledError: `constraints.watch` says that nobody waits any more.
    """
    memory = ModelMemory(model)
    if memory.probe_only is not None:
        return Fit("unknown", strategy, reason=f"{memory.probe_only}.")
    find, asked = find_strategy(strategy), default_context(model)
    found, n_ctx = find(memory, rig, asked, constraints), asked.n_ctx
    while not found.fits and n_ctx // 2 >= SHORTEST_CONTEXT:
        n_ctx //= 2
        found = find(memory, rig, msgspec.structs.replace(asked, n_ctx=n_ctx), constraints)
    return _fit(memory, rig, strategy, found, constraints)


def _fit(memory: ModelMemory, rig: Rig, strategy: str, found: AutoLayout, constraints: Constraints) -> Fit:
    plan = Plan(memory, rig, Edit(found.layout, found.context, constraints.side_files))
    if not found.fits:
        return Fit("no", strategy, found.context.n_ctx, reason=_shortfall(plan.report))
    counts = Counter[str]()
    for run in found.layout.runs:
        counts[run.device] += run.length
    from_disk_bytes = _read_from_disk(plan.report, rig)
    speed = predict_layout(memory, rig, found.layout, found.context, constraints.speeds)
    moved_to_host = any(override.device == CPU_ID for override in found.layout.overrides)
    result = Fit(
        "devices" if not counts[CPU_ID] and not moved_to_host else "cpu" if set(counts) == {CPU_ID} else "split",
        strategy,
        found.context.n_ctx,
        tuple((device, count) for device, count in counts.items() if count),
        1 / max(speed.worst_s, 1e-9),
        1 / max(speed.best_s, 1e-9),
        bool(found.layout.overrides),
    )
    if from_disk_bytes <= 0:
        return result
    reason = f"{format_bytes(from_disk_bytes)} more than the computer's memory would be read from disk for each token."
    return msgspec.structs.replace(result, kind="disk", slowest=0.0, fastest=0.0, reason=reason)


def _read_from_disk(report: FitReport, rig: Rig) -> int:
    """Return how much of what is mapped has no room in the host's memory: a load works, and every token waits."""
    host = report.rows[-1]
    return host.need_bytes + host.mapped_bytes + host.margin_bytes - rig.host.available_bytes


def _shortfall(report: FitReport) -> str:
    short = [row for row in report.rows if row.shortfall_bytes > 0 and row.need_bytes]
    if not short:
        return " ".join(violation.message for violation in report.violations) or "No layout was found."
    worst = max(short, key=lambda row: row.shortfall_bytes)
    return f"{format_bytes(worst.shortfall_bytes)} too little on {worst.id}."


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
    return max(_STEP_BYTES, device.total_bytes // _STEPS)


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


def unknown_fit(error: EngineError) -> Fit:
    """Return what is kept of a model that cannot be planned."""
    return Fit("unknown", reason=error.summary())
