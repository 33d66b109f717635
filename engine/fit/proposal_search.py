"""Looking for changes after which a load fits: one kind of change after the other. All of it is arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from engine.devices.device import CPU_ID, Device, Rig
from engine.errors import ArgumentError, CancelledError
from engine.fit.layer_moves import Move
from engine.fit.proposal import Proposal, ProposalKind, changes_in_words
from engine.fit.relief import Relief, excess
from engine.fit.shares import share_words
from engine.fit.smaller_caches import cache_words, smaller_caches
from engine.fit.step_back import change_words, layout_words
from engine.fit.strategies.catalogue import auto_layout
from engine.fit.strategies.constraint_rules import check_constraints
from engine.fit.strategies.constraints import Constraints
from engine.fit.strategies.fastest import predict_layout
from engine.language import tr
from engine.layout.layout import Layout, layer_words
from engine.plan.edit import Edit
from engine.plan.plan import Plan
from engine.plan.report import FitReport
from engine.settings.context_settings import ContextSettings
from engine.units import format_bytes

CONTEXT_STEP = 256
"""The engine rounds contexts up to multiples of this."""
MIN_UBATCH = 32


class ProposalSearch:
    """One load that does not fit; every method is one kind of change and returns the smallest that helps."""

    def __init__(self, plan: Plan, missing: Mapping[str, int], constraints: Constraints) -> None:
        self._plan, self._missing, self._constraints = plan, missing, constraints
        self._layout, self._context = plan.edit.layout, plan.edit.context
        self._relief = Relief(plan, constraints)
        self.before = self._report(self._layout, self._context)
        self._limits = {row.id: row.need_bytes - row.shortfall_bytes for row in self.before.rows}
        for row in self.before.rows:
            if row.id in missing:
                self._limits[row.id] = min(self._limits[row.id], row.need_bytes - missing[row.id])

    # ------------------------------------------------------------------ kinds of change

    def found_layout(self) -> Proposal | None:
        """Return the layout that the automatic search finds on what the devices turned out to have.

        Modes tensor and row are a wish of their own, which that search knows nothing of.
        """
        if self._layout.split_mode in ("tensor", "row"):
            return None
        sized = msgspec.structs.replace(self._context, n_ctx=self._n_ctx)
        constraints = replace(self._constraints, side_files=self._plan.edit.side_files)
        try:
            check_constraints(constraints, self._plan.rig, self._layout.n_layers)
            found = auto_layout("fewest", self._plan.memory, self._rig_within_limits(), sized, constraints)
        except (ArgumentError, CancelledError):
            return None
        if not found.fits:
            return None
        experts = tr(" with some experts on the CPU") if found.layout.overrides else ""
        text = tr("Place {layout}{experts}", layout=layout_words(found.layout), experts=experts)
        # A length that was left open stays so, where what would then be decided fits too.
        proposals = (self._proposal("layout", text, found.layout, each) for each in (self._context, sized))
        return next(filter(None, proposals), None)

    def _rig_within_limits(self) -> Rig:
        """Return the rig with margins that leave of each device no more than it turned out to have."""

        def limited(device: Device) -> Device:
            kept_bytes = device.available_bytes - self._limits[device.id]
            return replace(device, margin_bytes=max(device.margin_bytes, kept_bytes))

        return Rig(tuple(map(limited, self._plan.rig.devices)), limited(self._plan.rig.host))

    def moved_layers(self) -> Proposal | None:
        """Return the fewest layers moved off a device to the one with most room, to a neighbour before others."""
        if self._layout.split_mode not in ("layer", "none"):
            return None
        found = self._relief.moved_layers(self._layout, self._missing, self._limits)
        if found is None:
            return self._left_device() or self._nearest()
        move, count = found
        return self._proposal("layers", self._move_words(move, count), move.after(self._layout, count))

    def _nearest(self) -> Proposal | None:
        """Return several moves, for when more than one device is short."""
        found = self._relief.within(self._layout, self._limits)
        if found is None or found == self._layout:
            return None
        return self._proposal("layers", tr("Move {change}", change=change_words(self._layout, found)), found)

    def _move_words(self, move: Move, count: int) -> str:
        first, last = move.layers(count)
        output = last == self._layout.n_layers - 1 and self._layout.output_device == move.run.device
        what = (
            tr("{layer} and the output layer", layer=layer_words(first, last)) if output else layer_words(first, last)
        )
        return tr("Move {what} from {device} to {target}", what=what, device=move.run.device, target=move.target)

    def _left_device(self) -> Proposal | None:
        """Return all of a device moved to another one, for when no single run has enough on it."""
        for device in self._missing:
            found = self._relief.without(self._layout, device, self._limits, self._missing)
            if found is not None:
                target, layout = found
                return self._proposal(
                    "layers", tr("Move everything from {device} to {target}", device=device, target=target), layout
                )
        return None

    def shares(self) -> Proposal | None:
        """Return other shares of mode tensor, with more layers on the CPU where the members have no room."""
        if self._layout.split_mode != "tensor":
            return None
        found = self._relief.changed_shares(self._layout, self._limits)
        return (
            None
            if found is None
            else self._proposal("shares", tr("Change the shares to {share}", share=share_words(found)), found)
        )

    def shorter_context(self) -> Proposal | None:
        """Return the longest context that fits, in steps of the engine."""
        context = self._longest_context(self._context)
        if context is None:
            return None
        return self._proposal(
            "context", tr("Shorten the context to {length}", length=_length_words(context)), context=context
        )

    def smaller_cache(self) -> Proposal | None:
        """Return the largest of the small KV types that helps."""
        return next((found for each in smaller_caches(self._context) if (found := self._cache_proposal(each))), None)

    def smaller_cache_and_context(self) -> Proposal | None:
        """Return the smallest KV type with the longest context that fits then: for loads that miss by far."""
        for cache in reversed(tuple(smaller_caches(self._context))):
            context = self._longest_context(cache)
            if context is not None:
                change = cache_words(self._context, cache)
                text = tr(
                    "Shorten the context to {length} and set the {change}", length=_length_words(context), change=change
                )
                return self._proposal("cache_and_context", text, context=context)
        return None

    def moved_experts(self) -> Proposal | None:
        """Return the fewest layers whose experts go to the CPU; attention and KV cache stay."""
        found = self._relief.moved_experts(self._layout, self._missing, self._limits)
        if found is None:
            return None
        move, count = found
        text = tr(
            "Move the experts of {layer} from {device} to {cpu_id}",
            layer=layer_words(*move.layers(count)),
            device=move.run.device,
            cpu_id=CPU_ID,
        )
        return self._proposal("experts", text, move.after(self._layout, count))

    def no_pipeline(self) -> Proposal | None:
        """Return the plan without the copies for a pipeline; long prompts are then read by one device at a time."""
        if self._context.pipeline == "off" or not any(row.pipeline_bytes for row in self.before.rows):
            return None
        context = msgspec.structs.replace(self._context, pipeline="off")
        return self._proposal("pipeline", tr("Do without the copies for a pipeline"), context=context)

    def ubatch(self) -> Proposal | None:
        """Return the largest smaller ubatch that helps."""
        n_ubatch = self._context.n_ubatch // 2
        while n_ubatch >= MIN_UBATCH:
            context = msgspec.structs.replace(self._context, n_ubatch=n_ubatch)
            found = self._proposal("ubatch", tr("Lower the ubatch to {n_ubatch}", n_ubatch=n_ubatch), context=context)
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
                freed = ", ".join(
                    tr("{device} {sizes} less", device=device, sizes=format_bytes(sizes[name]))
                    for device, sizes in held.items()
                )
                return Proposal(
                    tr("Unload {name}", name=name), self._plan.edit, freed, "unload", report.rows, unload=name
                )
        return None

    def _cache_proposal(self, context: ContextSettings) -> Proposal | None:
        return self._proposal(
            "cache", tr("Set the {cache}", cache=cache_words(self._context, context)), context=context
        )

    @property
    def _n_ctx(self) -> int:
        """The context in tokens, also where its length was left open."""
        return (self.before.context or self._context).n_ctx

    def _longest_context(self, context: ContextSettings) -> ContextSettings | None:
        """Return `context` with the longest context that helps, found by halving."""
        each = msgspec.structs.replace(context, n_ctx=self._n_ctx).n_ctx_each
        low, high, best = 1, (each - 1) // CONTEXT_STEP, None
        while low <= high:
            # The shortest goes first: where that does not help, nothing does.
            middle = 1 if best is None else (low + high + 1) // 2
            shorter = context.with_each(middle * CONTEXT_STEP)
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
        return Proposal(text, self._edit(layout, context), words, kind, report.rows, speed=self._speed(layout, report))

    def _speed(self, layout: Layout, report: FitReport) -> float:
        """Return how many of the tokens per second are left that what was asked for is predicted to have."""
        if layout == self._layout:
            return 1.0  # Of settings the prediction knows the cache only, which is not what decides.
        return self._seconds(self._layout, self.before) / self._seconds(layout, report)

    def _seconds(self, layout: Layout, report: FitReport) -> float:
        plan = self._plan
        context = report.context or self._context
        return predict_layout(plan.memory, plan.rig, layout, context, self._constraints.speeds).middle_s


def _length_words(context: ContextSettings) -> str:
    """Return "4096", or of how many requests each has that many tokens."""
    each = context.n_ctx_each
    return (
        str(each)
        if each == context.n_ctx
        else tr("{each} for each of {n_seq_max} requests", each=each, n_seq_max=context.n_seq_max)
    )


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
