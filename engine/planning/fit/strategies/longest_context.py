"""Strategy "context": the longest context that fits, with one of the allowed KV cache types."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from msgspec import Struct

from engine.base.language import tr
from engine.base.values import replace
from engine.devices.device import CPU_ID, Rig
from engine.planning.fit.needs import largest_number
from engine.planning.fit.strategies.choosing import choose, fits_plainly
from engine.planning.fit.strategies.constraints import NO_CONSTRAINTS, AutoLayout, Constraints
from engine.planning.fit.strategies.fewest import fewest, fewest_candidates
from engine.planning.fit.strategies.filling import fill
from engine.planning.fit.strategies.workbench import Workbench
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.settings.context_settings import ContextSettings, KvType
from engine.planning.settings.table import CONTEXT_STEP


class _Found(Struct, frozen=True):
    n_ctx: int
    settings: ContextSettings


def longest_context(
    memory: ModelMemory, rig: Rig, context: ContextSettings, constraints: Constraints = NO_CONSTRAINTS
) -> AutoLayout:
    """Return a layout on the fewest devices with the longest context that fits, at most the trained length.

    Each parallel request has a context of this length. Of several allowed cache types, the first one that reaches the
    upper limit (`max_ctx`, at most the trained length) is used; if none does, the one with the longest context.
    """
    limit = _limit(memory, context, constraints)
    bases = [_with_types(context, cache_type) for cache_type in constraints.kv_types] or [context]
    best: _Found | None = None
    for base in bases:
        n_ctx = _longest(limit, partial(_fits, memory, rig, base, constraints))
        if n_ctx and (best is None or n_ctx > best.n_ctx):
            best = _Found(n_ctx, base)
        # Further types are less preferred, and none can exceed the limit.
        if best is not None and best.n_ctx == limit:
            break
    if best is None:
        least = bases[-1].with_each(min(CONTEXT_STEP, limit))
        refused = fewest(memory, rig, least, constraints)
        return replace(
            refused,
            explanation=tr("Not even the shortest context fits. {explanation}", explanation=refused.explanation),
        )
    found = fewest(memory, rig, best.settings.with_each(best.n_ctx), constraints)
    return replace(found, explanation=_explain(memory, rig, constraints, found, limit))


def _explain(memory: ModelMemory, rig: Rig, constraints: Constraints, found: AutoLayout, limit: int) -> str:
    context = found.context
    cache = (
        context.type_k
        if context.type_k == context.type_v
        else tr("{type_k} and {type_v}", type_k=context.type_k, type_v=context.type_v)
    )
    why = tr("the requested length") if constraints.max_ctx == limit else tr("the trained length")
    reach = (
        why
        if context.n_ctx_each == limit
        else tr("the longest context that fits; {limit} tokens would not fit", limit=limit)
    )
    text = tr(
        "Context of {n_ctx_each} tokens with cache type {cache}: {reach}. {explanation}",
        n_ctx_each=context.n_ctx_each,
        reach=reach,
        cache=cache,
        explanation=found.explanation,
    )
    if CPU_ID not in found.layout.devices:
        return text

    def without_cpu(n_ctx: int) -> bool:
        bench = Workbench(memory, rig, context.with_each(n_ctx), constraints)
        layout = fill(bench, bench.in_layer_order(bench.devices))
        return CPU_ID not in layout.devices and bench.report(layout).fits

    n_ctx = _longest(context.n_ctx_each, without_cpu)
    return (
        tr("{text} With a context of up to {n_ctx} tokens, no layer would be on the CPU.", text=text, n_ctx=n_ctx)
        if n_ctx
        else text
    )


def _fits(memory: ModelMemory, rig: Rig, base: ContextSettings, constraints: Constraints, n_ctx: int) -> bool:
    bench = Workbench(memory, rig, base.with_each(n_ctx), constraints)
    return fits_plainly(bench) or choose(bench, fewest_candidates(bench)).fits


def _longest(limit: int, holds: Callable[[int], bool]) -> int:
    """Return the longest context up to `limit` for which `holds` is true, in multiples of `CONTEXT_STEP`; 0 if none."""
    # If the full length fits, no search is needed. Each step of a search computes several layouts.
    if holds(limit):
        return limit
    steps = (limit - 1) // CONTEXT_STEP
    return CONTEXT_STEP * largest_number(steps, lambda count: holds(count * CONTEXT_STEP), (steps + 1) // 2)


def _limit(memory: ModelMemory, context: ContextSettings, constraints: Constraints) -> int:
    known = memory.model.n_ctx_train or context.n_ctx_each
    return known if constraints.max_ctx is None else max(1, min(known, constraints.max_ctx))


def _with_types(context: ContextSettings, cache_type: KvType) -> ContextSettings:
    return replace(context, type_k=cache_type, type_v=cache_type)
