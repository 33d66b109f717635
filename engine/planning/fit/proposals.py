"""Changes after which a load that ran out of memory should fit, what gives up least first. All of it is arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

import msgspec

from engine.base.errors import ArgumentError, CancelledError
from engine.base.language import tr
from engine.devices.device import CPU_ID, Device, Rig
from engine.model.gguf.model_file import FileIdentity
from engine.model.gguf.tensor_table import TYPES_BY_NAME
from engine.planning.fit.needs import Needs, first_number
from engine.planning.fit.proposal import (
    ALL_KINDS,
    Proposal,
    ProposalKind,
    by_what_they_keep,
    changes_in_words,
    kinds_by_what_they_keep,
    less_words,
)
from engine.planning.fit.relief import Move, Relief
from engine.planning.fit.shares import share_words
from engine.planning.fit.step_back import change_words, layout_words
from engine.planning.fit.strategies.catalogue import auto_layout
from engine.planning.fit.strategies.constraints import NO_CONSTRAINTS, Constraints, check_constraints
from engine.planning.fit.strategies.fastest import predict_layout
from engine.planning.layout.layout import Layout, layer_words
from engine.planning.plan.plan import Plan
from engine.planning.plan.report import shortfalls
from engine.planning.settings.context_settings import ContextSettings, KvType
from engine.planning.settings.table import CONTEXT_STEP

MAX_PROPOSALS = 8
MIN_UBATCH = 32
_SMALL_TYPES: tuple[KvType, ...] = ("q8_0", "q4_0")


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
    search = _Search(plan, missing, constraints)
    if not missing or search.before.violations or search.before.report.probe_only is not None:
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
    short = {row.id: row.shortfall_bytes for row in plan.forecast if row.is_short}
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


class _Search:
    """One load that does not fit; every method is one kind of change and returns the smallest that helps."""

    def __init__(self, plan: Plan, missing: Mapping[str, int], constraints: Constraints) -> None:
        self._plan, self._missing, self._constraints = plan, missing, constraints
        self._layout, self._context = plan.edit.layout, plan.edit.context
        self.before = plan.with_edit(plan.edit)  # What was probed is not known of other layouts.
        self._limits = {row.id: row.need_bytes - row.shortfall_bytes for row in self.before.forecast}
        for row in self.before.forecast:
            if row.id in missing:
                self._limits[row.id] = min(self._limits[row.id], row.need_bytes - missing[row.id])
        self._needs = Needs(self.before, self._limits)
        self._relief = Relief(plan, self._needs, constraints)

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
        found = self._relief.moved_layers(self._layout, self._missing)
        if found is None:
            return self._left_device() or self._nearest()
        move, count = found
        return self._proposal("layers", self._move_words(move, count), move.after(self._layout, count))

    def _nearest(self) -> Proposal | None:
        """Return several moves, for when more than one device is short."""
        found = self._relief.nearest(self._layout)
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
            found = self._relief.without(self._layout, device, self._missing)
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
        found = self._relief.changed_shares(self._layout)
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
        found = self._relief.moved_experts(self._layout, self._missing)
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
        if self._context.pipeline == "off" or not any(row.pipeline_bytes for row in self.before.forecast):
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
        rig = self._plan.rig
        held = {
            device: {each.key: each.size_bytes for each in found.holdings}
            for device in self._missing
            if (found := rig.device(device)) is not None
        }
        names = {each.key: each.model for device in rig.all_devices for each in device.holdings}
        enough = [
            key
            for key in names
            if all(held[device].get(key, 0) >= missing_bytes for device, missing_bytes in self._missing.items())
        ]
        for key in sorted(enough, key=lambda key: (sum(sizes[key] for sizes in held.values()), names[key])):
            report = self._plan.on(rig_without(rig, key)).report
            if report.fits:
                freed = ", ".join(less_words(device, sizes[key]) for device, sizes in held.items())
                text = tr("Unload {name}", name=names[key])
                return Proposal(text, self._plan.edit, freed, "unload", report.rows, unload=key)
        return None

    def _cache_proposal(self, context: ContextSettings) -> Proposal | None:
        return self._proposal(
            "cache", tr("Set the {cache}", cache=cache_words(self._context, context)), context=context
        )

    @property
    def _n_ctx(self) -> int:
        """The context in tokens, also where its length was left open."""
        return self.before.settings.n_ctx

    def _longest_context(self, context: ContextSettings) -> ContextSettings | None:
        """Return `context` with the longest context that helps, in steps of the engine; None if none does."""

        def shorter(steps: int) -> ContextSettings:
            return context.with_each(steps * CONTEXT_STEP)

        def is_too_long(steps: int) -> bool:
            return not self._helps(self._plan_of(self._layout, shorter(steps)))

        most = (msgspec.structs.replace(context, n_ctx=self._n_ctx).n_ctx_each - 1) // CONTEXT_STEP
        # The shortest goes first: if that does not help, nothing does.
        if most < 1 or is_too_long(1):
            return None
        return shorter(first_number(2, most + 1, is_too_long) - 1)

    # ------------------------------------------------------------------ checks

    def _plan_of(self, layout: Layout, context: ContextSettings) -> Plan:
        if context is self._context:
            return self._needs.plan(layout)
        return self._plan.with_edit(replace(self._plan.edit, layout=layout, context=context))

    def _helps(self, plan: Plan) -> bool:
        """Return whether it fits, with as much less on every device that was short as was missing."""
        return not plan.violations and not shortfalls({row.id: row.memory for row in plan.forecast}, self._limits)

    def _proposal(
        self, kind: ProposalKind, text: str, layout: Layout | None = None, context: ContextSettings | None = None
    ) -> Proposal | None:
        plan = self._plan_of(layout or self._layout, context or self._context)
        if not self._helps(plan):
            return None
        words = changes_in_words(self.before.forecast, plan.forecast)
        return Proposal(text, plan.edit, words, kind, plan.forecast, speed=self._speed(plan))

    def _speed(self, plan: Plan) -> float:
        """Return how many of the tokens per second are left that what was asked for is predicted to have."""
        if plan.edit.layout == self._layout:
            return 1.0  # Of settings the prediction knows the cache only, which is not what decides.
        before_s, after_s = (
            predict_layout(each.memory, each.rig, each.edit.layout, each.settings, self._constraints.speeds).middle_s
            for each in (self.before, plan)
        )
        return before_s / after_s


def _length_words(context: ContextSettings) -> str:
    """Return "4096", or of how many requests each has that many tokens."""
    each = context.n_ctx_each
    return (
        str(each)
        if each == context.n_ctx
        else tr("{each} for each of {n_seq_max} requests", each=each, n_seq_max=context.n_seq_max)
    )


def rig_without(rig: Rig, key: FileIdentity) -> Rig:
    """Return `rig` as it will be when our other model with this key has been unloaded."""

    def freed(device: Device) -> Device:
        held_bytes = sum(each.size_bytes for each in device.holdings if each.key == key)
        holdings = tuple(each for each in device.holdings if each.key != key)
        if holdings == device.holdings:
            return device
        free_bytes = None if device.free_bytes is None else min(device.free_bytes + held_bytes, device.total_bytes)
        return replace(device, free_bytes=free_bytes, holdings=holdings)

    return Rig(tuple(map(freed, rig.devices)), freed(rig.host))


# ---------------------------------------------------------------------- smaller types for the KV cache


def smaller_caches(now: ContextSettings) -> Iterator[ContextSettings]:
    """Yield settings with K and V, then K alone, in a smaller type; V needs what the rules check."""
    for kind in _SMALL_TYPES:
        key = kind if _bits(kind) < _bits(now.type_k) else now.type_k
        value = kind if _bits(kind) < _bits(now.type_v) else now.type_v
        for type_v in dict.fromkeys((value, now.type_v)):
            if (key, type_v) != (now.type_k, now.type_v):
                yield msgspec.structs.replace(now, type_k=key, type_v=type_v)


def cache_words(before: ContextSettings, after: ContextSettings) -> str:
    """Return "KV cache to q8_0", or which half of it."""
    if before.type_k != after.type_k and before.type_v != after.type_v:
        return tr("KV cache to {type_k}", type_k=after.type_k)
    return (
        tr("K cache to {type_k}", type_k=after.type_k)
        if before.type_k != after.type_k
        else tr("V cache to {type_v}", type_v=after.type_v)
    )


def _bits(kind: KvType) -> float:
    return TYPES_BY_NAME[kind].block_bytes / TYPES_BY_NAME[kind].block_elements
