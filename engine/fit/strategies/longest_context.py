"""Strategy context: the longest context that fits, with the cache types that are allowed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from engine.devices.device import CPU_ID, Rig
from engine.fit.strategies.constraints import NO_CONSTRAINTS, AutoLayout, Constraints
from engine.fit.strategies.fewest import fewest
from engine.layout.context_settings import ContextSettings, KvType
from engine.memory.model_memory import ModelMemory

CONTEXT_STEP = 256
"""The engine rounds contexts up to whole steps of this many tokens."""


@dataclass(frozen=True, slots=True)
class _Found:
    n_ctx: int
    found: AutoLayout


def longest_context(
    memory: ModelMemory, rig: Rig, context: ContextSettings, constraints: Constraints = NO_CONSTRAINTS
) -> AutoLayout:
    """Return the longest context up to what the model was trained for, and the layout on the fewest devices for it.

    Of several allowed cache types the first that reaches that length is taken, else the one that gets furthest.
    """
    limit = _limit(memory, context, constraints)
    types: tuple[KvType | None, ...] = constraints.kv_types or (None,)
    best: _Found | None = None
    for cache_type in types:
        base = context if cache_type is None else _with_types(context, cache_type)

        def at(n_ctx: int, base: ContextSettings = base) -> AutoLayout:
            return fewest(memory, rig, msgspec.structs.replace(base, n_ctx=n_ctx), constraints)

        found = _longest(at, limit, lambda layout: layout.fits)
        if found is not None and (best is None or found.n_ctx > best.n_ctx):
            best = found
        if best is not None and best.n_ctx == limit:
            break
    if best is None:
        least = msgspec.structs.replace(context, n_ctx=min(CONTEXT_STEP, limit))
        refused = fewest(memory, rig, least, constraints)
        return replace(refused, explanation=f"Not even the shortest context fits. {refused.explanation}")
    return replace(best.found, explanation=_explain(memory, rig, constraints, best, limit))


def _explain(memory: ModelMemory, rig: Rig, constraints: Constraints, best: _Found, limit: int) -> str:
    context = best.found.context
    cache = context.type_k if context.type_k == context.type_v else f"{context.type_k} and {context.type_v}"
    why = "as long as is wanted" if constraints.max_ctx == limit else "what the model was trained for"
    reach = why if best.n_ctx == limit else f"the longest that fits; {limit} would not"
    text = f"{best.n_ctx} tokens are {reach}, with cache type {cache}. {best.found.explanation}"
    if CPU_ID not in best.found.layout.devices:
        return text

    def at(n_ctx: int) -> AutoLayout:
        return fewest(memory, rig, msgspec.structs.replace(context, n_ctx=n_ctx), constraints)

    free = _longest(at, best.n_ctx, lambda found: found.fits and CPU_ID not in found.layout.devices)
    return text if free is None else f"{text} Up to {free.n_ctx} tokens the CPU would hold no layers."


def _longest(at: Callable[[int], AutoLayout], limit: int, holds: Callable[[AutoLayout], bool]) -> _Found | None:
    """Return the longest context up to `limit` for which `holds`; None if there is none of a whole step."""
    whole = at(limit)
    if holds(whole):
        return _Found(limit, whole)
    best: _Found | None = None
    low, high = 0, (limit - 1) // CONTEXT_STEP
    while low < high:
        middle = (low + high + 1) // 2
        tried = at(middle * CONTEXT_STEP)
        if holds(tried):
            best, low = _Found(middle * CONTEXT_STEP, tried), middle
        else:
            high = middle - 1
    return best


def _limit(memory: ModelMemory, context: ContextSettings, constraints: Constraints) -> int:
    trained = memory.model.hyper_parameter("context_length")
    known = trained if isinstance(trained, int) and 0 < trained < 1 << 31 else context.n_ctx
    return known if constraints.max_ctx is None else max(1, min(known, constraints.max_ctx))


def _with_types(context: ContextSettings, cache_type: KvType) -> ContextSettings:
    return msgspec.structs.replace(context, type_k=cache_type, type_v=cache_type)
