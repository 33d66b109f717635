"""Changes after which a load that ran out of memory should fit, least harmful first. All of it is arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import msgspec

from engine.devices.device import CPU_ID, Device, Rig
from engine.fit.layer_moves import Move, layer_words
from engine.fit.relief import Relief, excess
from engine.fit.shares import share_words
from engine.fit.smaller_caches import cache_words, smaller_caches
from engine.fit.strategies.constraints import NO_CONSTRAINTS, Constraints
from engine.layout.layout import Layout
from engine.memory.estimate import Grade
from engine.plan.edit import Edit
from engine.plan.plan import Plan
from engine.plan.report import DeviceRow, FitReport
from engine.settings.context_settings import ContextSettings
from engine.units import format_bytes

ProposalKind = Literal["layers", "shares", "context", "cache", "experts", "ubatch", "unload", "cache_and_context"]
ALL_KINDS: tuple[ProposalKind, ...] = get_args(ProposalKind)
"""In the order in which they are proposed; the last only where there is no other."""
MAX_PROPOSALS = 6
CONTEXT_STEP = 256
"""The engine rounds contexts up to multiples of this."""
MIN_UBATCH = 32


@dataclass(frozen=True, slots=True)
class Proposal:
    """A change in one sentence, the edit after it, and what it does to each device that it changes.

    `rows` are what it takes, of the grade that says how we know; `unload` names a loaded model that has to go first.
    """

    text: str
    edit: Edit
    detail: str
    kind: ProposalKind = "layers"
    rows: tuple[DeviceRow, ...] = ()
    grade: Grade = Grade.ESTIMATED
    unload: str = ""


def propose(
    plan: Plan,
    missing: Mapping[str, int],
    kinds: Collection[ProposalKind] = ALL_KINDS,
    constraints: Constraints = NO_CONSTRAINTS,
) -> tuple[Proposal, ...]:
    """Return at most `MAX_PROPOSALS` changes of what `plan` asks for that are forecast to fit, without duplicates.

    `missing` is how many bytes too few each device had in the load that failed: every proposal takes at least these
    off the device, whatever was forecast. Nothing is proposed for a model whose forecast is not whole, nor for
    a layout that breaks a rule. Pinned layers stay, and devices that are off get nothing.
    """
    search = _Search(plan, missing, constraints)
    if not missing or search.before.violations or search.before.probe_only is not None:
        return ()
    searches: dict[ProposalKind, Callable[[], Proposal | None]] = {
        "layers": search.moved_layers,
        "shares": search.shares,
        "context": search.shorter_context,
        "cache": search.smaller_cache,
        "experts": search.moved_experts,
        "ubatch": search.ubatch,
        "unload": search.unloaded_model,
    }
    found = [found for kind, look in searches.items() if kind in kinds and (found := look()) is not None]
    if not found and "cache_and_context" in kinds:
        found = [proposal for proposal in [search.smaller_cache_and_context()] if proposal is not None]
    return tuple(found[:MAX_PROPOSALS])


class _Search:
    """One failed load; every method is one kind of change and returns the smallest that helps."""

    def __init__(self, plan: Plan, missing: Mapping[str, int], constraints: Constraints) -> None:
        self._plan, self._missing = plan, missing
        self._layout, self._context = plan.edit.layout, plan.edit.context
        self._relief = Relief(plan, constraints)
        self.before = self._report(self._layout, self._context)
        self._limits = {row.id: row.need_bytes - row.shortfall_bytes for row in self.before.rows}
        for row in self.before.rows:
            if row.id in missing:
                self._limits[row.id] = min(self._limits[row.id], row.need_bytes - missing[row.id])

    # ------------------------------------------------------------------ kinds of change

    def moved_layers(self) -> Proposal | None:
        """Return the fewest layers moved off a device to the one with most room, to a neighbour before others."""
        if self._layout.split_mode not in ("layer", "none"):
            return None
        found = self._relief.moved_layers(self._layout, self._missing, self._limits)
        if found is None:
            return self._left_device()
        move, count = found
        return self._proposal("layers", self._move_words(move, count), move.after(self._layout, count))

    def _move_words(self, move: Move, count: int) -> str:
        first, last = move.layers(count)
        output = last == self._layout.n_layers - 1 and self._layout.output_device == move.run.device
        what = f"{layer_words(first, last)} and the output layer" if output else layer_words(first, last)
        return f"Move {what} from {move.run.device} to {move.target}"

    def _left_device(self) -> Proposal | None:
        """Return all of a device moved to another one, for when no single run has enough on it."""
        for device in self._missing:
            found = self._relief.without(self._layout, device, self._limits, self._missing)
            if found is not None:
                target, layout = found
                return self._proposal("layers", f"Move everything from {device} to {target}", layout)
        return None

    def shares(self) -> Proposal | None:
        """Return other shares of mode tensor, with more layers on the CPU where the members have no room."""
        if self._layout.split_mode != "tensor":
            return None
        found = self._relief.changed_shares(self._layout, self._limits)
        return None if found is None else self._proposal("shares", f"Change the shares to {share_words(found)}", found)

    def shorter_context(self) -> Proposal | None:
        """Return the longest context that fits, in steps of the engine."""
        context = self._longest_context(self._context)
        if context is None:
            return None
        return self._proposal("context", f"Shorten the context to {context.n_ctx}", context=context)

    def smaller_cache(self) -> Proposal | None:
        """Return the largest of the small KV types that helps."""
        return next((found for each in smaller_caches(self._context) if (found := self._cache_proposal(each))), None)

    def smaller_cache_and_context(self) -> Proposal | None:
        """Return the smallest KV type with the longest context that fits then: for loads that miss by far."""
        for cache in reversed(tuple(smaller_caches(self._context))):
            context = self._longest_context(cache)
            if context is not None:
                change = cache_words(self._context, cache)
                text = f"Shorten the context to {context.n_ctx} and set the {change}"
                return self._proposal("cache_and_context", text, context=context)
        return None

    def moved_experts(self) -> Proposal | None:
        """Return the fewest layers whose experts go to the CPU; attention and KV cache stay."""
        found = self._relief.moved_experts(self._layout, self._missing, self._limits)
        if found is None:
            return None
        move, count = found
        text = f"Move the experts of {layer_words(*move.layers(count))} from {move.run.device} to {CPU_ID}"
        return self._proposal("experts", text, move.after(self._layout, count))

    def ubatch(self) -> Proposal | None:
        """Return the largest smaller ubatch that helps."""
        n_ubatch = self._context.n_ubatch // 2
        while n_ubatch >= MIN_UBATCH:
            context = msgspec.structs.replace(self._context, n_ubatch=n_ubatch)
            found = self._proposal("ubatch", f"Lower the ubatch to {n_ubatch}", context=context)
            if found is not None:
                return found
            n_ubatch //= 2
        return None

    def unloaded_model(self) -> Proposal | None:
        """Return one of our other models that holds enough of every device that was short: the smallest such."""
        held = {
            device: {each.model: each.size_bytes for each in found.holdings}
            for device in self._missing
            if (found := self._plan.rig.device(device)) is not None
        }
        enough = [
            name
            for name in {name for sizes in held.values() for name in sizes}
            if all(held[device].get(name, 0) >= missing_bytes for device, missing_bytes in self._missing.items())
        ]
        for name in sorted(enough, key=lambda name: (sum(sizes[name] for sizes in held.values()), name)):
            report = self._plan.on(rig_without(self._plan.rig, name)).report
            if report.fits:
                freed = ", ".join(f"{device} {format_bytes(sizes[name])} less" for device, sizes in held.items())
                return Proposal(f"Unload {name}", self._plan.edit, freed, "unload", report.rows, unload=name)
        return None

    def _cache_proposal(self, context: ContextSettings) -> Proposal | None:
        return self._proposal("cache", f"Set the {cache_words(self._context, context)}", context=context)

    @property
    def _n_ctx(self) -> int:
        """The context in tokens, also where its length was left open."""
        return (self.before.context or self._context).n_ctx

    def _longest_context(self, context: ContextSettings) -> ContextSettings | None:
        """Return `context` with the longest context that helps, found by halving."""
        low, high, best = 1, (self._n_ctx - 1) // CONTEXT_STEP, None
        while low <= high:
            # The shortest goes first: where that does not help, nothing does.
            middle = 1 if best is None else (low + high + 1) // 2
            shorter = msgspec.structs.replace(context, n_ctx=middle * CONTEXT_STEP)
            if self._helps(self._report(self._layout, shorter)):
                best, low = shorter, middle + 1
            elif best is None:
                return None
            else:
                high = middle - 1
        return best

    # ------------------------------------------------------------------ checks

    def _report(self, layout: Layout, context: ContextSettings) -> FitReport:
        if context is self._context:
            return self._relief.plan(layout).report
        return self._plan.with_edit(self._edit(layout, context)).report

    def _edit(self, layout: Layout, context: ContextSettings) -> Edit:
        return replace(self._plan.edit, layout=layout, context=context)

    def _helps(self, report: FitReport) -> bool:
        """Return whether it fits, with as much less on every device that was short as was missing."""
        needs = {row.id: row.need_bytes for row in report.rows}
        return not report.violations and not excess(needs, self._limits)

    def _proposal(
        self, kind: ProposalKind, text: str, layout: Layout | None = None, context: ContextSettings | None = None
    ) -> Proposal | None:
        layout, context = layout or self._layout, context or self._context
        report = self._report(layout, context)
        if not self._helps(report):
            return None
        words = changes_in_words(self.before.rows, report.rows)
        return Proposal(text, self._edit(layout, context), words, kind, report.rows)


def rig_without(rig: Rig, model: str) -> Rig:
    """Return `rig` as it will be when our other model of this name has been unloaded."""

    def freed(device: Device) -> Device:
        held_bytes = sum(each.size_bytes for each in device.holdings if each.model == model)
        holdings = tuple(each for each in device.holdings if each.model != model)
        if holdings == device.holdings:
            return device
        free_bytes = None if device.free_bytes is None else min(device.free_bytes + held_bytes, device.total_bytes)
        return replace(device, free_bytes=free_bytes, holdings=holdings)

    return Rig(tuple(map(freed, rig.devices)), freed(rig.host))


def changes_in_words(before: Sequence[DeviceRow], after: Sequence[DeviceRow]) -> str:
    """Return "RPC0 310 MiB less, CPU 312 MiB more" for devices that change, what gets free first."""
    changes = [(new.id, new.need_bytes - old.need_bytes) for old, new in zip(before, after, strict=True)]
    changes = sorted((change for change in changes if change[1]), key=lambda change: change[1])
    return ", ".join(f"{name} {format_bytes(abs(size))} {'less' if size < 0 else 'more'}" for name, size in changes)
