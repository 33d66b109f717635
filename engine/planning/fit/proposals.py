"""Search for proposals: changes of a plan that ran out of memory, after which the plan is forecast to fit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from engine.base.errors import ArgumentError, CancelledError
from engine.base.language import tr
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Rig
from engine.model.gguf.model_file import FileIdentity
from engine.model.gguf.tensor_table import TYPES_BY_NAME
from engine.planning.fit.needs import Needs, first_number
from engine.planning.fit.proposal import (
    ALL_KINDS,
    Proposal,
    ProposalKind,
    best_first,
    changes_in_text,
    kinds_by_cost,
    less_text,
)
from engine.planning.fit.relief import Move, Relief
from engine.planning.fit.shares import share_text
from engine.planning.fit.step_back import change_text, describe_layout
from engine.planning.fit.strategies.catalogue import auto_layout
from engine.planning.fit.strategies.constraints import NO_CONSTRAINTS, Constraints, check_constraints
from engine.planning.fit.strategies.fastest import predict_layout
from engine.planning.layout.layout import Layout, layer_text, single_device
from engine.planning.memory.drafts import Draft
from engine.planning.plan.decisions.drafts import draft_candidates
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
    """Return at most `MAX_PROPOSALS` changes after which `plan` is forecast to fit, without duplicates.

    There is at most one change of each kind; those with the smallest disadvantage for the user come first. Pinned
    layers stay on their device, and disabled devices get no layers. The result is empty if the forecast is incomplete
    or the layout breaks a rule.

    `missing`: bytes that each device lacked in the failed load. Each proposal reduces the need of each of these devices
    by at least as many bytes, even if fewer are missing in the forecast.
    `kinds`: kinds of changes to search for.
    `constraints.watch`: can cancel the search for a layout; proposals of other kinds are still searched.
    """
    search = _Search(plan, missing, constraints)
    if not missing or search.before.violations or search.before.report.probe_only is not None:
        return ()
    searches: dict[ProposalKind, Callable[[], Proposal | None]] = {
        "layout": search.found_layout,
        "layers": search.moved_layers,
        "shares": search.shares,
        "experts": search.moved_experts,
        "draft": search.moved_draft,
        "no_draft": search.no_draft,
        "pipeline": search.no_pipeline,
        "ubatch": search.ubatch,
        "unload": search.unloaded_model,
        "cache": search.smaller_cache,
        "context": search.shorter_context,
    }
    found = [found for kind, look in searches.items() if kind in kinds and (found := look()) is not None]
    # This change gives up most, so it is only looked for if there is no other.
    if not found and "cache_and_context" in kinds:
        found = [proposal for proposal in [search.smaller_cache_and_context()] if proposal is not None]
    return best_first(found)[:MAX_PROPOSALS]


def propose_by_forecast(
    plan: Plan, constraints: Constraints = NO_CONSTRAINTS, kinds: Collection[ProposalKind] = ALL_KINDS
) -> tuple[Proposal, ...]:
    """Return the proposals (`propose`) for a plan that is forecast not to fit.

    The missing bytes of each device are taken from the forecast, not from a failed load.
    """
    short = {row.id: row.shortfall_bytes for row in plan.forecast if row.is_short}
    return propose(plan, short, kinds, constraints)


def best_by_forecast(
    plan: Plan, constraints: Constraints = NO_CONSTRAINTS, kinds: Collection[ProposalKind] = ALL_KINDS
) -> Proposal | None:
    """Return the best of the proposals for a plan that is forecast not to fit; None if there is none.

    As soon as there is a proposal, kinds with a larger disadvantage are not searched.

    Raises:
        CancelledError: the search was cancelled by `constraints.watch`.
    """
    for together in kinds_by_cost():
        if constraints.watch is not None:
            constraints.watch.step()
        found = propose_by_forecast(plan, constraints, [kind for kind in together if kind in kinds])
        if found:
            return found[0]
    return None


class _Search:
    """Search for changes of one plan that does not fit.

    Each method returns the smallest change of one kind, or None.
    """

    def __init__(self, plan: Plan, missing: Mapping[str, int], constraints: Constraints) -> None:
        self._plan, self._missing, self._constraints = plan, missing, constraints
        self._layout, self._context = plan.edit.layout, plan.edit.context
        self.before = plan.with_edit(plan.edit)  # Without probed rows: other layouts have none to compare with.
        # Not from the rows: what devices lack of memory that they share (`Rig.pool`) is in the row of each of them.
        self._limits = {each.id: each.available_bytes - each.margin_bytes for each in plan.rig.all_devices}
        for row in self.before.forecast:
            # What the load was short of counts more than what was forecast.
            if row.id in missing and missing[row.id] > row.shortfall_bytes:
                self._limits[row.id] = min(self._limits[row.id], row.need_bytes - missing[row.id])
        self._needs = Needs(self.before, self._limits)
        self._relief = Relief(plan, self._needs, constraints)

    # ------------------------------------------------------------------ kinds of change

    def found_layout(self) -> Proposal | None:
        """Return a proposal with the layout that strategy "fewest" finds within the memory limits of the failed load.

        None if no layout fits, and for split modes tensor and row, which strategies do not support.
        """
        if self._layout.split_mode in ("tensor", "row"):
            return None
        sized = replace(self._context, n_ctx=self._n_ctx)
        # The search has to leave room for the side files of the edit too.
        constraints = replace(self._constraints, side_files=self._plan.edit.side_files)
        try:
            check_constraints(constraints, self._plan.rig, self._layout.n_layers)
            found = auto_layout("fewest", self._plan.memory, self._rig_within_limits(), sized, constraints)
        # One proposal less. The other kinds need no search and are still wanted.
        except (ArgumentError, CancelledError):
            return None
        if not found.fits:
            return None
        experts = tr(" with some experts on the CPU") if found.layout.overrides else ""
        text = tr("Place {layout}{experts}", layout=describe_layout(found.layout), experts=experts)
        # An open context length stays open if the length that would be decided fits too.
        proposals = (self._proposal("layout", text, found.layout, each) for each in (self._context, sized))
        return next(filter(None, proposals), None)

    def _rig_within_limits(self) -> Rig:
        """Return the rig with memory caps, so that no device has more memory than it had in the failed load."""

        # Not larger margins: the largest one counts for all devices that share the host's memory.
        def limited(device: Device) -> Device:
            limit_bytes = max(0, self._limits[device.id] + device.margin_bytes)
            return replace(device, cap_bytes=min(device.available_bytes, limit_bytes))

        return Rig(tuple(map(limited, self._plan.rig.devices)), limited(self._plan.rig.host))

    def moved_layers(self) -> Proposal | None:
        """Return a proposal that moves the fewest layers from a device that lacks memory to another device.

        Devices of neighbouring layers are tried first, then the device with the most room. If no such move is enough,
        several moves are combined. None in split modes row and tensor, or if nothing helps.
        """
        if self._layout.split_mode not in ("layer", "none"):
            return None
        found = self._relief.moved_layers(self._layout, self._missing)
        if found is None:
            return self._left_device() or self._nearest()
        move, count = found
        return self._proposal("layers", self._move_words(move, count), move.after(self._layout, count))

    def _nearest(self) -> Proposal | None:
        """Return a proposal with a layout that fits and differs little from the present one; None if none was found.

        The two layouts may differ by several moves of layers. `moved_layers` calls this if no single move is enough.
        """
        found = self._relief.nearest(self._layout)
        if found is None or found == self._layout:
            return None
        return self._proposal("layers", tr("Move {change}", change=change_text(self._layout, found)), found)

    def _move_words(self, move: Move, count: int) -> str:
        first, last = move.layers(count)
        output = last == self._layout.n_layers - 1 and self._layout.output_device == move.run.device
        what = tr("{layer} and the output layer", layer=layer_text(first, last)) if output else layer_text(first, last)
        return tr("Move {layers} from {device} to {target}", layers=what, device=move.run.device, target=move.target)

    def _left_device(self) -> Proposal | None:
        """Return a proposal that moves everything from a device that lacks memory to another device.

        None if no device has room. `moved_layers` calls this if moving part of the layers is not enough.
        """
        for device in self._missing:
            found = self._relief.without(self._layout, device, self._missing)
            if found is not None:
                target, layout = found
                return self._proposal(
                    "layers", tr("Move everything from {device} to {target}", device=device, target=target), layout
                )
        return None

    def shares(self) -> Proposal | None:
        """Return a proposal that changes the devices' shares in split mode tensor; None in other modes.

        If the devices have too little memory for all layers, more layers go to the CPU. None if no shares fit.
        """
        if self._layout.split_mode != "tensor":
            return None
        found = self._relief.changed_shares(self._layout)
        return (
            None
            if found is None
            else self._proposal(
                "shares", tr("Change the split over the devices to {share}", share=share_text(found)), found
            )
        )

    def shorter_context(self) -> Proposal | None:
        """Return a proposal with the longest context that fits, a multiple of `CONTEXT_STEP` tokens.

        None if no length fits.
        """
        context = self._longest_context(self._context)
        if context is None:
            return None
        return self._proposal(
            "context", tr("Shorten the context to {length}", length=_length_text(context)), context=context
        )

    def smaller_cache(self) -> Proposal | None:
        """Return a proposal with a smaller type of the KV cache: q8_0 if that fits, else q4_0; None if none fits."""
        return next((found for each in smaller_caches(self._context) if (found := self._cache_proposal(each))), None)

    def smaller_cache_and_context(self) -> Proposal | None:
        """Return a proposal with the smallest KV cache type and the longest context that then fits.

        None if none fits.
        """
        # Backwards, so that the smallest cache comes first: it leaves the longest context.
        for cache in reversed(tuple(smaller_caches(self._context))):
            context = self._longest_context(cache)
            if context is not None:
                change = cache_text(self._context, cache)
                text = tr(
                    "Shorten the context to {length} and set the {change}", length=_length_text(context), change=change
                )
                return self._proposal("cache_and_context", text, context=context)
        return None

    def moved_experts(self) -> Proposal | None:
        """Return a proposal that moves the experts of the fewest layers to the CPU; None if no such move is enough.

        Attention and KV cache stay on their devices.
        """
        found = self._relief.moved_experts(self._layout, self._missing)
        if found is None:
            return None
        move, count = found
        text = tr(
            "Move the experts of {layer} from {device} to {cpu_id}",
            layer=layer_text(*move.layers(count)),
            device=move.run.device,
            cpu_id=CPU_ID,
        )
        return self._proposal("experts", text, move.after(self._layout, count))

    def moved_draft(self) -> Proposal | None:
        """Return a proposal that moves the draft model to the first other device with which everything fits.

        The CPU is tried last. None if no device helps.
        """
        draft = self._plan.edit.side_files.draft
        if draft is None or draft.model is None:
            return None
        now = self.before.draft_devices
        for device in draft_candidates(self._plan.rig, draft.model):
            if now == (device.id,) or device.id in self._constraints.off:
                continue
            moved = replace(draft, layout=single_device(draft.model.n_layers, device.id))
            text = tr("Move the draft model from {device} to {target}", device=", ".join(now), target=device.id)
            found = self._draft_proposal("draft", text, moved)
            if found is not None:
                return found
        return None

    def no_draft(self) -> Proposal | None:
        """Return a proposal to load without speculative decoding, if that fits. Answers stay the same, but slower."""
        if self._plan.edit.side_files.draft is None:
            return None
        return self._draft_proposal("no_draft", tr("Load without the draft (speculative decoding)"), None)

    def _draft_proposal(self, kind: ProposalKind, text: str, draft: Draft | None) -> Proposal | None:
        edit = self._plan.edit
        plan = self._plan.with_edit(replace(edit, side_files=replace(edit.side_files, draft=draft)))
        if not self._helps(plan):
            return None
        words = changes_in_text(self.before.forecast, plan.forecast)
        return Proposal(text, plan.edit, words, kind, plan.forecast)

    def no_pipeline(self) -> Proposal | None:
        """Return a proposal to load without pipeline parallelism and its copies of tensors; None if that does not help.

        Without pipeline parallelism, only one device at a time computes a long prompt.
        """
        if self._context.pipeline == "off" or not any(row.pipeline_bytes for row in self.before.forecast):
            return None
        context = replace(self._context, pipeline="off")
        return self._proposal(
            "pipeline", tr("Turn off pipeline parallelism, which needs extra copies in memory"), context=context
        )

    def ubatch(self) -> Proposal | None:
        """Return a proposal with the largest `n_ubatch` that fits, found by halving it down to `MIN_UBATCH`."""
        # Compute buffers grow about linearly with the micro batch, so halving finds a value near the limit in few
        # steps.
        n_ubatch = self._context.n_ubatch // 2
        while n_ubatch >= MIN_UBATCH:
            context = replace(self._context, n_ubatch=n_ubatch)
            found = self._proposal(
                "ubatch", tr("Lower the micro batch size to {n_ubatch}", n_ubatch=n_ubatch), context=context
            )
            if found is not None:
                return found
            n_ubatch //= 2
        return None

    def unloaded_model(self) -> Proposal | None:
        """Return a proposal to unload another model: the smallest one whose memory is enough.

        It must hold at least the missing bytes on every device that lacks memory.
        """
        rig = self._plan.rig
        held = {device: _held_by_key(rig, device) for device in self._missing if rig.device(device) is not None}
        names = {each.key: each.model for device in rig.all_devices for each in device.holdings}
        enough = [
            key
            for key in names
            if all(held[device].get(key, 0) >= missing_bytes for device, missing_bytes in self._missing.items())
        ]
        for key in sorted(enough, key=lambda key: (sum(sizes[key] for sizes in held.values()), names[key])):
            # Enough bytes are not all: the plan may also be short of devices on which that model holds nothing.
            report = self._plan.on(rig_without(rig, key)).report
            if report.fits:
                own = [(each.id, one.size_bytes) for each in rig.all_devices for one in each.holdings if one.key == key]
                freed = ", ".join(less_text(device, size) for device, size in own if device in held and size)
                text = tr("Unload {name}", name=names[key])
                return Proposal(text, self._plan.edit, freed, "unload", report.rows, unload=key)
        return None

    def _cache_proposal(self, context: ContextSettings) -> Proposal | None:
        return self._proposal("cache", tr("Set the {cache}", cache=cache_text(self._context, context)), context=context)

    @property
    def _n_ctx(self) -> int:
        """The context length of the plan in tokens; for "auto", the length that the plan chose."""
        return self.before.settings.n_ctx

    def _longest_context(self, context: ContextSettings) -> ContextSettings | None:
        """Return `context` with the longest context that fits, in multiples of `CONTEXT_STEP` tokens.

        None if none fits.
        """

        def shorter(steps: int) -> ContextSettings:
            return context.with_each(steps * CONTEXT_STEP)

        def is_too_long(steps: int) -> bool:
            return not self._helps(self._plan_of(self._layout, shorter(steps)))

        most = (replace(context, n_ctx=self._n_ctx).n_ctx_each - 1) // CONTEXT_STEP
        # The shortest goes first: if that does not help, nothing does.
        if most < 1 or is_too_long(1):
            return None
        return shorter(first_number(2, most + 1, is_too_long) - 1)

    # ------------------------------------------------------------------ checks

    def _plan_of(self, layout: Layout, context: ContextSettings) -> Plan:
        # `Needs` has plans of the settings as asked for, by layout. Other settings need plans of their own.
        if context is self._context:
            return self._needs.plan(layout)
        return self._plan.with_edit(replace(self._plan.edit, layout=layout, context=context))

    def _helps(self, plan: Plan) -> bool:
        """Return whether `plan` breaks no rule and is within the memory limits of the failed load."""
        needs = {row.id: row.memory for row in plan.forecast}
        return not plan.violations and not shortfalls(needs, self._limits, plan.rig.pool)

    def _proposal(
        self, kind: ProposalKind, text: str, layout: Layout | None = None, context: ContextSettings | None = None
    ) -> Proposal | None:
        plan = self._plan_of(layout or self._layout, context or self._context)
        if not self._helps(plan):
            return None
        words = changes_in_text(self.before.forecast, plan.forecast)
        return Proposal(text, plan.edit, words, kind, plan.forecast, speed=self._speed(plan))

    def _speed(self, plan: Plan) -> float:
        """Return the predicted tokens per second of `plan`, divided by those of the original plan."""
        if plan.edit.layout == self._layout:
            return 1.0  # Settings hardly change the prediction: it only knows the size of the cache.
        before_s, after_s = (
            predict_layout(each.memory, each.rig, each.edit.layout, each.settings, self._constraints.speeds).middle_s
            for each in (self.before, plan)
        )
        return before_s / after_s


def _length_text(context: ContextSettings) -> str:
    """Return the context length of a request as text: "4096", or "4096 tokens for each of 2 parallel requests"."""
    each = context.n_ctx_each
    return (
        str(each)
        if each == context.n_ctx
        else tr("{each} tokens for each of {n_seq_max} parallel requests", each=each, n_seq_max=context.n_seq_max)
    )


def _held_by_key(rig: Rig, device_id: str) -> dict[FileIdentity, int]:
    """Return for each loaded model, by its key, the bytes that unloading it would free on a device.

    If the device shares its memory with other devices (unified memory), the model's bytes on those are included.
    """
    shared = rig.pool.ids if rig.pool is not None and device_id in rig.pool.ids else (device_id,)
    held: dict[FileIdentity, int] = {}
    for device in rig.all_devices:
        for each in device.holdings if device.id in shared else ():
            held[each.key] = held.get(each.key, 0) + each.size_bytes
    return held


def rig_without(rig: Rig, key: FileIdentity) -> Rig:
    """Return `rig` with the free memory that it would have after unloading the loaded model with this key."""

    def freed(device: Device) -> Device:
        held_bytes = sum(each.size_bytes for each in device.holdings if each.key == key)
        if device.is_host:
            # What it holds on devices that use the host's memory is free for the host too.
            shared = [each for card in rig.devices if card.unified for each in card.holdings if each.key == key]
            held_bytes += sum(each.size_bytes for each in shared)
        holdings = tuple(each for each in device.holdings if each.key != key)
        if not held_bytes and holdings == device.holdings:
            return device
        free_bytes = None if device.free_bytes is None else min(device.free_bytes + held_bytes, device.total_bytes)
        return replace(device, free_bytes=free_bytes, holdings=holdings)

    return Rig(tuple(map(freed, rig.devices)), freed(rig.host))


# ---------------------------------------------------------------------- smaller types for the KV cache


def smaller_caches(now: ContextSettings) -> Iterator[ContextSettings]:
    """Yield settings with smaller KV cache types: first q8_0, then q4_0.

    For each type, the K and V cache are changed together first, then the K cache alone. A cache whose present type is
    not larger keeps this type. The type of the V cache may break a rule of llama.cpp; the caller checks the rules.
    """
    for kind in _SMALL_TYPES:
        key = kind if _bits(kind) < _bits(now.type_k) else now.type_k
        value = kind if _bits(kind) < _bits(now.type_v) else now.type_v
        for type_v in dict.fromkeys((value, now.type_v)):
            if (key, type_v) != (now.type_k, now.type_v):
                yield replace(now, type_k=key, type_v=type_v)


def cache_text(before: ContextSettings, after: ContextSettings) -> str:
    """Return the change of cache types as a phrase, such as "KV cache to q8_0" or "K cache to q8_0"."""
    if before.type_k != after.type_k and before.type_v != after.type_v:
        return tr("KV cache to {type_k}", type_k=after.type_k)
    return (
        tr("K cache to {type_k}", type_k=after.type_k)
        if before.type_k != after.type_k
        else tr("V cache to {type_v}", type_v=after.type_v)
    )


def _bits(kind: KvType) -> float:
    return TYPES_BY_NAME[kind].block_bytes / TYPES_BY_NAME[kind].block_elements
