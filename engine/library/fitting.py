"""The library's forecasts: search for a layout of a model on a rig, and prediction of its speed."""

from __future__ import annotations

from collections import Counter

from engine.base.errors import EngineError
from engine.base.units import format_bytes
from engine.base.values import replace
from engine.devices.device import CPU_ID, Rig
from engine.library.fit import Fit, layout_key
from engine.model.gguf.model_file import ModelFile
from engine.planning.fit.strategies.catalogue import search
from engine.planning.fit.strategies.constraints import AutoLayout, Constraints
from engine.planning.layout.layout import Layout
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.decisions.context_length import default_context
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.plan.report import FitReport
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.speed.prediction import CostModel, SpeedForecast, SpeedRange
from engine.planning.speed.speeds import Speeds
from engine.planning.speed.work import TokenWork

# Tokens. With less context a model does not count as fitting.
SHORTEST_CONTEXT = 2048


def find_fit(model: ModelFile, rig: Rig, strategy: str, constraints: Constraints) -> Fit:
    """Return the forecast of `model` on `rig`: the layout that `strategy` finds with the default context settings.

    The memory of a projector in `constraints.side_files` is counted. If no layout fits, the context length is halved,
    down to `SHORTEST_CONTEXT`.

    Raises:
        ArgumentError: if `strategy` is unknown.
        CancelledError: if `constraints.watch` is cancelled.
    """
    memory = ModelMemory(model)
    if memory.probe_only is not None:
        return Fit("unknown", strategy, reason=f"{memory.probe_only}.")
    asked = default_context(model)
    found, n_ctx = search(strategy, memory, rig, asked, constraints), asked.n_ctx
    while not found.fits and n_ctx // 2 >= SHORTEST_CONTEXT:
        n_ctx //= 2
        found = search(strategy, memory, rig, replace(asked, n_ctx=n_ctx), constraints)
    return _fit(memory, rig, strategy, found, constraints)


def predict_speed(
    memory: ModelMemory, rig: Rig, layout: Layout, context: ContextSettings, speeds: Speeds
) -> tuple[SpeedForecast, SpeedRange]:
    """Return the predicted speed of an answer of usual length, as in the layout editor, and the range of speeds."""
    model = CostModel(TokenWork(memory.model), rig, context, memory.for_context(context), speeds)
    return model.answer(layout), model.range(layout)


def _fit(memory: ModelMemory, rig: Rig, strategy: str, found: AutoLayout, constraints: Constraints) -> Fit:
    plan = Plan(memory, rig, Edit(found.layout, found.context, constraints.side_files))
    if not found.fits:
        return Fit("no", strategy, found.context.n_ctx, reason=_shortfall(plan.report))
    counts = Counter[str]()
    for run in found.layout.runs:
        counts[run.device] += run.length
    from_disk_bytes = _read_from_disk(plan.report, rig)
    speed, bounds = predict_speed(memory, rig, found.layout, found.context, constraints.speeds)
    moved_to_host = any(override.device == CPU_ID for override in found.layout.overrides)
    result = Fit(
        "devices" if not counts[CPU_ID] and not moved_to_host else "cpu" if set(counts) == {CPU_ID} else "split",
        strategy,
        found.context.n_ctx,
        tuple((device, count) for device, count in counts.items() if count),
        # Bounds are seconds per token. The minimum prevents a division by zero.
        1 / max(bounds.worst_s, 1e-9),
        1 / max(bounds.best_s, 1e-9),
        layout=layout_key(found.layout),
        expected=speed.tokens_per_second,
        source=speed.source,
        uncertainty=speed.uncertainty or 0.0,
    )
    if from_disk_bytes <= 0:
        return result
    reason = f"{format_bytes(from_disk_bytes)} more than the computer's memory would be read from disk for each token."
    # Predictions assume the bandwidth of memory, so they do not hold for a disk.
    return replace(result, kind="disk", slowest=0.0, fastest=0.0, expected=0.0, reason=reason)


def _read_from_disk(report: FitReport, rig: Rig) -> int:
    """Return the bytes by which mapped weights exceed the host's free memory; 0 or less if they fit.

    A model whose weights exceed the free memory can be loaded, but weights are read from the disk for each token.
    """
    host = report.rows[-1]
    return host.mapped_bytes + host.shortfall_bytes


def _shortfall(report: FitReport) -> str:
    short = [row for row in report.rows if row.is_short]
    if not short:
        return " ".join(violation.message for violation in report.violations) or "No layout was found."
    worst = max(short, key=lambda row: row.shortfall_bytes)
    return f"{format_bytes(worst.shortfall_bytes)} missing on {worst.id}."


def unknown_fit(error: EngineError) -> Fit:
    """Return the forecast "unknown" for a model whose memory cannot be estimated. The reason is the text of `error`."""
    return Fit("unknown", reason=error.summary())
