"""Changes after which a load that ran out of memory should fit, what gives up least first. All of it is arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from engine.fit.proposal import ALL_KINDS, Proposal, ProposalKind, by_what_they_keep, kinds_by_what_they_keep
from engine.fit.proposal_search import ProposalSearch
from engine.fit.strategies.constraints import NO_CONSTRAINTS, Constraints
from engine.plan.plan import Plan

MAX_PROPOSALS = 8


def propose(
    plan: Plan,
    missing: Mapping[str, int],
    kinds: Collection[ProposalKind] = ALL_KINDS,
    constraints: Constraints = NO_CONSTRAINTS,
) -> tuple[Proposal, ...]:
    """Return at most `MAX_PROPOSALS` changes of what `plan` asks for that are forecast to fit, without duplicates.

    The layout that an automatic search finds with everything else as it was asked for is the first, where there is
    one; then one of each kind, see `by_what_they_keep`.

    `missing` is how many bytes too few each device had in the load that failed: every proposal takes at least these
    off the device, whatever was forecast. Nothing is proposed for a model whose forecast is not whole, nor for
    a layout that breaks a rule. Pinned layers stay, and devices that are off get nothing. The automatic search ends
    when `constraints.watch` says so; without it there is one proposal less.
    """
    search = ProposalSearch(plan, missing, constraints)
    if not missing or search.before.violations or search.before.probe_only is not None:
        return ()
    searches: dict[ProposalKind, Callable[[], Proposal | None]] = {
        "layout": search.found_layout,
        "layers": search.moved_layers,
        "shares": search.shares,
        "experts": search.moved_experts,
        "pipeline": search.no_pipeline,
        "ubatch": search.ubatch,
        "unload": search.unloaded_model,
        "cache": search.smaller_cache,
        "context": search.shorter_context,
    }
    found = [found for kind, look in searches.items() if kind in kinds and (found := look()) is not None]
    if not found and "cache_and_context" in kinds:
        found = [proposal for proposal in [search.smaller_cache_and_context()] if proposal is not None]
    return by_what_they_keep(found)[:MAX_PROPOSALS]


def propose_by_forecast(
    plan: Plan, constraints: Constraints = NO_CONSTRAINTS, kinds: Collection[ProposalKind] = ALL_KINDS
) -> tuple[Proposal, ...]:
    """Return changes after which a plan that is forecast not to fit does, before anybody has tried to load it."""
    short = {row.id: row.shortfall_bytes for row in plan.forecast if row.need_bytes and row.shortfall_bytes > 0}
    return propose(plan, short, kinds, constraints)


def best_by_forecast(
    plan: Plan, constraints: Constraints = NO_CONSTRAINTS, kinds: Collection[ProposalKind] = ALL_KINDS
) -> Proposal | None:
    """Return the first of these changes; what gives up more is not looked for.

    Raises:
        CancelledError: `constraints.watch` says that nobody waits any more.
    """
    for together in kinds_by_what_they_keep():
        if constraints.watch is not None:
            constraints.watch.step()
        found = propose_by_forecast(plan, constraints, [kind for kind in together if kind in kinds])
        if found:
            return found[0]
    return None
