"""Finds what a model would do on this rig with the strategy that people like best."""

from __future__ import annotations

from collections import Counter

import msgspec

from engine.base.errors import EngineError
from engine.base.units import format_bytes
from engine.devices.device import CPU_ID, Rig
from engine.library.fit import Fit
from engine.model.gguf.model_file import ModelFile
from engine.planning.fit.strategies.catalogue import find_strategy
from engine.planning.fit.strategies.constraints import AutoLayout, Constraints
from engine.planning.fit.strategies.fastest import predict_layout
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.decisions.context_length import default_context
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.plan.report import FitReport

SHORTEST_CONTEXT = 2048
"""Tokens below which a model is of little use: it does not fit then."""


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
    short = [row for row in report.rows if row.is_short]
    if not short:
        return " ".join(violation.message for violation in report.violations) or "No layout was found."
    worst = max(short, key=lambda row: row.shortfall_bytes)
    return f"{format_bytes(worst.shortfall_bytes)} too little on {worst.id}."


def unknown_fit(error: EngineError) -> Fit:
    """Return what is kept of a model that cannot be planned."""
    return Fit("unknown", reason=error.summary())
