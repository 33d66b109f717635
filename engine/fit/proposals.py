"""Changes after which a load that ran out of memory should fit, least harmful first. All of it is arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

import msgspec

from engine.devices.device import CPU_ID, Device, Rig
from engine.fit.layer_moves import Move, layer_words, moves_off
from engine.fit.shares import share_words, shares_within
from engine.fit.smaller_caches import cache_words, smaller_caches
from engine.layout.layout import Layout, Override, Run
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
MAX_ESTIMATES = 32
"""Layouts estimated in the search for layers to move, and for experts: a person waits for the report."""


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
    plan: Plan, missing: Mapping[str, int], kinds: Collection[ProposalKind] = ALL_KINDS
) -> tuple[Proposal, ...]:
    """Return at most `MAX_PROPOSALS` changes of what `plan` asks for that are forecast to fit, without duplicates.

    `missing` is how many bytes too few each device had in the load that failed: every proposal takes at least these
    off the device, whatever was forecast. Nothing is proposed for a model whose forecast is not whole, nor for
    a layout that breaks a rule.
    """
    search = _Search(plan, missing)
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

    def __init__(self, plan: Plan, missing: Mapping[str, int]) -> None:
        self._plan, self._missing = plan, missing
        self._layout, self._context = plan.edit.layout, plan.edit.context
        self._left = 0
        self.before = self._report(self._layout, self._context)
        self._before_bytes = {row.id: row.need_bytes for row in self.before.rows}

    # ------------------------------------------------------------------ kinds of change

    def moved_layers(self) -> Proposal | None:
        """Return the fewest layers moved off a device to the one with most room, to a neighbour before others."""
        if self._layout.split_mode not in ("layer", "none"):
            return None
        self._left = MAX_ESTIMATES
        too_short: set[Run] = set()
        for move in moves_off(self._layout, self._missing, self._targets()):
            if move.run in too_short:
                continue
            if not self._relieves(self._counted(move.after(self._layout, move.run.length))):
                too_short.add(move.run)
                continue
            count = self._fewest(move.run.length, partial(move.after, self._layout))
            if count is not None:
                return self._proposal("layers", self._move_words(move, count), move.after(self._layout, count))
        return self._left_device()

    def _move_words(self, move: Move, count: int) -> str:
        first, last = move.layers(count)
        output = last == self._layout.n_layers - 1 and self._layout.output_device == move.run.device
        what = f"{layer_words(first, last)} and the output layer" if output else layer_words(first, last)
        return f"Move {what} from {move.run.device} to {move.target}"

    def _left_device(self) -> Proposal | None:
        """Return all of a device moved to another one, for when no single run has enough on it."""
        for device in self._missing:
            for target in self._targets():
                text = f"Move everything from {device} to {target}"
                found = self._proposal("layers", text, self._layout.replace_device(device, target))
                if found is not None:
                    return found
        return None

    def shares(self) -> Proposal | None:
        """Return other shares of mode tensor, with more layers on the CPU where the members have no room."""
        if self._layout.split_mode != "tensor":
            return None
        limits = {row.id: row.need_bytes - row.shortfall_bytes for row in self.before.rows}
        for device, missing_bytes in self._missing.items():
            limits[device] = min(limits[device], self._before_bytes[device] - missing_bytes)
        found = shares_within(self._layout, limits, self._needs)
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
        if self._layout.split_mode not in ("layer", "none"):
            return None
        self._left = MAX_ESTIMATES
        runs = [run for name in self._missing if name != CPU_ID for run in self._expert_runs(name)]
        for run in sorted(runs, key=lambda run: (-run.length, run.first)):
            count = self._fewest(run.length, partial(self._after_experts, run))
            if count is not None:
                layers = layer_words(run.last - count + 1, run.last)
                text = f"Move the experts of {layers} from {run.device} to {CPU_ID}"
                return self._proposal("experts", text, self._after_experts(run, count))
        return None

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

    # ------------------------------------------------------------------ candidates

    def _targets(self) -> list[str]:
        """Return devices that were not short, those with most room first and the CPU last."""
        rows = [row for row in self.before.rows if row.id not in self._missing]
        return [row.id for row in sorted(rows, key=lambda row: (row.id == CPU_ID, row.shortfall_bytes))]

    def _expert_runs(self, device: str) -> Iterator[Run]:
        """Yield layers of `device` in a row that have experts which no override has taken elsewhere."""
        here: list[int] = []
        for layer, where in enumerate((*self._layout.assignment(), "")):
            if where == device and self._has_experts(layer):
                here.append(layer)
            elif here:
                yield Run(device, here[0], here[-1])
                here = []

    def _has_experts(self, layer: int) -> bool:
        taken = (
            each.part == "experts" and (each.layers is None or layer in each.layers) for each in self._layout.overrides
        )
        return self._plan.model.blocks[layer].expert_bytes > 0 and not any(taken)

    def _after_experts(self, run: Run, count: int) -> Layout:
        override = Override(CPU_ID, part="experts", first=run.last - count + 1, last=run.last)
        return replace(self._layout, overrides=(override, *self._layout.overrides))

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

    def _fewest(self, most: int, after: Callable[[int], Layout]) -> int | None:
        """Return the smallest count with enough taken off, None where that does not fit or the search was long."""
        low, high = 1, most
        while low < high and self._left > 0:
            middle = (low + high) // 2
            low, high = (low, middle) if self._relieves(self._counted(after(middle))) else (middle + 1, high)
        return low if low == high and self._left > 0 and self._helps(self._counted(after(low))) else None

    def _counted(self, layout: Layout) -> FitReport:
        self._left -= 1
        return self._report(layout, self._context)

    def _report(self, layout: Layout, context: ContextSettings) -> FitReport:
        return self._plan.with_edit(self._edit(layout, context)).report

    def _edit(self, layout: Layout, context: ContextSettings) -> Edit:
        return replace(self._plan.edit, layout=layout, context=context)

    def _relieves(self, report: FitReport) -> bool:
        """Return whether every device that was short has as much less on it as was missing, and its forecast fits."""
        return all(
            row.need_bytes == 0
            or (row.shortfall_bytes <= 0 and self._before_bytes[row.id] - row.need_bytes >= self._missing[row.id])
            for row in report.rows
            if row.id in self._missing
        )

    def _helps(self, report: FitReport) -> bool:
        return report.fits and self._relieves(report)

    def _needs(self, layout: Layout) -> dict[str, int]:
        return {row.id: row.need_bytes for row in self._report(layout, self._context).rows}

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
