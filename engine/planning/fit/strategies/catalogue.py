"""The table of strategies (searches for an automatic layout) by name, and the functions that run one of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from engine.base.errors import ArgumentError
from engine.base.language import tr
from engine.base.values import replace
from engine.devices.device import Rig
from engine.model.gguf.model_file import ModelFile
from engine.planning.fit.strategies.balanced import balanced_candidates
from engine.planning.fit.strategies.choosing import strategy_of
from engine.planning.fit.strategies.constraints import NO_CONSTRAINTS, AutoLayout, Constraints, Strategy
from engine.planning.fit.strategies.draft_room import with_room_for_draft
from engine.planning.fit.strategies.experts import experts_candidates
from engine.planning.fit.strategies.fastest import fastest
from engine.planning.fit.strategies.fewest import fewest
from engine.planning.fit.strategies.longest_context import longest_context
from engine.planning.fit.strategies.one_backend import best_backend
from engine.planning.fit.strategies.priority import priority_candidates
from engine.planning.fit.strategies.proportional import proportional_candidates
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.memory.work_limit import limited
from engine.planning.plan.decisions.context_length import context_lengths
from engine.planning.settings.context_settings import AUTO_CONTEXT, ContextSettings

STRATEGIES: Mapping[str, Strategy] = {
    "fewest": fewest,
    "priority": strategy_of(priority_candidates),
    "balanced": strategy_of(balanced_candidates),
    "proportional": strategy_of(proportional_candidates),
    "experts": strategy_of(experts_candidates),
    "context": longest_context,
    "fastest": fastest,
}


SEARCH_SECONDS = 60.0
"""Limit of processor seconds for the forecasts of one search.

After this time, forecasts have no compute buffers, which a probe must then measure. No known model takes a tenth of the
limit.
"""


def find_strategy(name: str) -> Strategy:
    """Return the strategy called `name`.

    Raises:
        ArgumentError: there is no such strategy; the message lists the names.
    """
    strategy = STRATEGIES.get(name)
    if strategy is None:
        raise ArgumentError(
            tr(
                'There is no strategy "{name}" for automatic layouts; use one of {names}.',
                name=name,
                names=", ".join(STRATEGIES),
            )
        )
    return strategy


def search(
    name: str, memory: ModelMemory, rig: Rig, context: ContextSettings, constraints: Constraints = NO_CONSTRAINTS
) -> AutoLayout:
    """Return the layout that the strategy called `name` finds for exactly these settings.

    Raises:
        ArgumentError: there is no strategy of this name.
        CancelledError: the search was cancelled by `constraints.watch`.
    """
    strategy = find_strategy(name)
    found = _search(strategy, memory, rig, context, constraints)
    again = partial(_search, strategy, memory, rig, context)
    return with_room_for_draft(found, memory, rig, constraints, again)


def _search(
    strategy: Strategy, memory: ModelMemory, rig: Rig, context: ContextSettings, constraints: Constraints
) -> AutoLayout:
    if not constraints.one_backend:
        return strategy(memory, rig, context, constraints)
    return best_backend(lambda devices: strategy(memory, devices, context, constraints), memory, rig, constraints)


def auto_layout(
    name: str,
    model: ModelFile | ModelMemory,
    rig: Rig,
    context: ContextSettings,
    constraints: Constraints = NO_CONSTRAINTS,
) -> AutoLayout:
    """Return the layout that the strategy called `name` finds.

    If the context length is "auto", several lengths are tried, the longest first, until a layout fits. Strategy
    "context" searches for the length itself.

    Raises:
        ArgumentError: there is no strategy of this name.
        CancelledError: the search was cancelled by `constraints.watch`.
    """
    find_strategy(name)
    watch = constraints.watch
    memory = model if isinstance(model, ModelMemory) else ModelMemory(model)
    found = None
    with limited(SEARCH_SECONDS, lambda: watch is not None and watch.is_over):
        for n_ctx in context_lengths(memory.model, rig, context):
            found = search(name, memory, rig, replace(context, n_ctx=n_ctx), constraints)
            if found.fits or name == "context":
                break
    assert found is not None  # There is at least one length.
    if context.n_ctx == AUTO_CONTEXT and name != "context":
        # The length stays open in the result, so a load decides it again by the memory that is free then.
        found = replace(found, context=context)
    return found
