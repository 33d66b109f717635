"""Changes after which a load that ran out of memory should fit, least harmful first. All of it is arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from engine.devices.device import CPU_ID, Rig
from engine.fit.preview import make_report
from engine.fit.report import DeviceRow, FitReport
from engine.gguf.model_file import ModelFile
from engine.gguf.tensor_types import TYPES_BY_NAME
from engine.layout.context_settings import ContextSettings, KvType
from engine.layout.engine_parameters import entry_count
from engine.layout.layout import Layout, Override, Run
from engine.memory.estimate import Grade
from engine.memory.model_memory import ModelMemory
from engine.units import format_bytes

MAX_PROPOSALS = 5
CONTEXT_STEP = 256
"""The engine rounds contexts up to multiples of this."""
MIN_UBATCH = 32
MAX_ESTIMATES = 32
"""Layouts estimated in the search for layers to move, and for experts: a person waits for the report."""
_SMALL_KV_TYPES: tuple[KvType, ...] = ("q8_0", "q4_0")


@dataclass(frozen=True, slots=True)
class Proposal:
    """A change in one sentence, the layout and settings after it, and what it does to each device that it changes."""

    text: str
    layout: Layout
    context: ContextSettings
    detail: str
    grade: Grade = Grade.ESTIMATED


def propose(
    model: ModelFile | ModelMemory,
    rig: Rig,
    layout: Layout,
    context: ContextSettings,
    missing: Mapping[str, int],
) -> tuple[Proposal, ...]:
    """Return at most `MAX_PROPOSALS` changes of `layout` and `context` that are forecast to fit, without duplicates.

    `missing` is how many bytes too few each device had in the load that failed: every proposal takes at least these
    off the device, whatever was forecast. Nothing is proposed for a model whose forecast is not whole, nor for
    a layout that breaks a rule.
    """
    search = _Search(model if isinstance(model, ModelMemory) else ModelMemory(model), rig, layout, context, missing)
    if not missing or search.before.violations or search.before.probe_only is not None:
        return ()
    kinds = (search.moved_layers, search.shorter_context, search.smaller_cache, search.moved_experts, search.ubatch)
    found = [proposal for kind in kinds if (proposal := kind()) is not None]
    if not found:
        found = [proposal for proposal in [search.smaller_cache_and_context()] if proposal is not None]
    return tuple(found[:MAX_PROPOSALS])


@dataclass(frozen=True, slots=True)
class _Move:
    """Layers at an end of a run of a device that is short: `layers(n)` are the `n` that would go first."""

    run: Run
    target: str
    from_end: bool

    def layers(self, count: int) -> tuple[int, int]:
        if self.from_end:
            return self.run.last - count + 1, self.run.last
        return self.run.first, self.run.first + count - 1


class _Search:
    """One failed load; every method is one kind of change and returns the smallest that helps."""

    def __init__(
        self,
        memory: ModelMemory,
        rig: Rig,
        layout: Layout,
        context: ContextSettings,
        missing: Mapping[str, int],
    ) -> None:
        self._memory, self._rig, self._layout, self._context, self._missing = memory, rig, layout, context, missing
        self._left = 0
        self.before = self._report(layout, context)
        self._before_bytes = {row.id: row.need_bytes for row in self.before.rows}

    # ------------------------------------------------------------------ kinds of change

    def moved_layers(self) -> Proposal | None:
        """Return the fewest layers moved off a device to the one with most room, to a neighbour before others."""
        if self._layout.split_mode not in ("layer", "none"):
            return None
        self._left = MAX_ESTIMATES
        too_short: set[Run] = set()
        for move in self._moves():
            if move.run in too_short:
                continue
            if not self._relieves(self._counted(self._after_move(move, move.run.length))):
                too_short.add(move.run)
                continue
            count = self._fewest(move.run.length, partial(self._after_move, move))
            if count is None:
                continue
            first, last = move.layers(count)
            output = last == self._layout.n_layers - 1 and self._layout.output_device == move.run.device
            what = f"{_layers(first, last)} and the output layer" if output else _layers(first, last)
            text = f"Move {what} from {move.run.device} to {move.target}"
            return self._proposal(text, self._after_move(move, count), self._context)
        return self._left_device()

    def _left_device(self) -> Proposal | None:
        """Return all of a device moved to another one, for when no single run has enough on it."""
        for device in self._missing:
            for target in self._targets():
                text = f"Move everything from {device} to {target}"
                found = self._proposal(text, self._layout.replace_device(device, target), self._context)
                if found is not None:
                    return found
        return None

    def shorter_context(self) -> Proposal | None:
        """Return the longest context that fits, in steps of the engine."""
        context = self._longest_context(self._context)
        if context is None:
            return None
        text = f"Shorten the context to {context.n_ctx}"
        return self._proposal(text, self._layout, context)

    def smaller_cache(self) -> Proposal | None:
        """Return the largest of the small KV types that helps."""
        return next((found for each in self._smaller_caches() if (found := self._cache_proposal(each))), None)

    def smaller_cache_and_context(self) -> Proposal | None:
        """Return the smallest KV type with the longest context that fits then: for loads that miss by far."""
        for cache in reversed(tuple(self._smaller_caches())):
            context = self._longest_context(cache)
            if context is not None:
                change = _cache_words(self._context, cache)
                text = f"Shorten the context to {context.n_ctx} and set the {change}"
                return self._proposal(text, self._layout, context)
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
                layers = _layers(run.last - count + 1, run.last)
                text = f"Move the experts of {layers} from {run.device} to {CPU_ID}"
                return self._proposal(text, self._after_experts(run, count), self._context)
        return None

    def ubatch(self) -> Proposal | None:
        """Return the largest smaller ubatch that helps."""
        n_ubatch = self._context.n_ubatch // 2
        while n_ubatch >= MIN_UBATCH:
            context = msgspec.structs.replace(self._context, n_ubatch=n_ubatch)
            found = self._proposal(f"Lower the ubatch to {n_ubatch}", self._layout, context)
            if found is not None:
                return found
            n_ubatch //= 2
        return None

    # ------------------------------------------------------------------ candidates

    def _targets(self) -> list[str]:
        """Return devices that were not short, those with most room first and the CPU last."""
        rows = [row for row in self.before.rows if row.id not in self._missing]
        return [row.id for row in sorted(rows, key=lambda row: (row.id == CPU_ID, row.shortfall_bytes))]

    def _moves(self) -> Iterator[_Move]:
        """Yield both ends of every run of a short device with every other device, in the order they are tried."""
        moves: list[tuple[tuple[int, ...], _Move]] = []
        runs, targets = self._layout.runs, self._targets()
        for index, run in enumerate(runs):
            if run.device not in self._missing:
                continue
            for rank, target in enumerate(targets):
                for from_end in (True, False):
                    neighbour = index + 1 if from_end else index - 1
                    near = 0 <= neighbour < len(runs) and runs[neighbour].device == target
                    move = _Move(run, target, from_end)
                    with_output = from_end and index == len(runs) - 1
                    more = entry_count(self._after_move(move, 1)) - entry_count(self._layout)
                    order = (not near, target == CPU_ID, max(0, more), rank, with_output, -run.length, not from_end)
                    moves.append((order, move))
        yield from (move for _, move in sorted(moves, key=lambda pair: pair[0]))

    def _after_move(self, move: _Move, count: int) -> Layout:
        return self._layout.move_range(*move.layers(count), move.target)

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
        return self._memory.model.blocks[layer].expert_bytes > 0 and not any(taken)

    def _after_experts(self, run: Run, count: int) -> Layout:
        override = Override(CPU_ID, part="experts", first=run.last - count + 1, last=run.last)
        return replace(self._layout, overrides=(override, *self._layout.overrides))

    def _smaller_caches(self) -> Iterator[ContextSettings]:
        """Yield settings with K and V, then K alone, in a smaller type; V needs what the rules check."""
        now = self._context
        for kind in _SMALL_KV_TYPES:
            key = kind if _bits(kind) < _bits(now.type_k) else now.type_k
            value = kind if _bits(kind) < _bits(now.type_v) else now.type_v
            for type_v in dict.fromkeys((value, now.type_v)):
                if (key, type_v) != (now.type_k, now.type_v):
                    yield msgspec.structs.replace(now, type_k=key, type_v=type_v)

    def _cache_proposal(self, context: ContextSettings) -> Proposal | None:
        return self._proposal(f"Set the {_cache_words(self._context, context)}", self._layout, context)

    @property
    def _n_ctx(self) -> int:
        """The context in tokens; 0 asks for the one that the model was trained with."""
        trained = self._memory.model.hyper_parameter("context_length")
        return self._context.n_ctx or (trained if isinstance(trained, int) else 0)

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
        return make_report(self._memory, self._rig, layout, context)

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

    def _proposal(self, text: str, layout: Layout, context: ContextSettings) -> Proposal | None:
        report = self._report(layout, context)
        if not self._helps(report):
            return None
        return Proposal(text, layout, context, _detail(self.before.rows, report.rows))


def _detail(before: Sequence[DeviceRow], after: Sequence[DeviceRow]) -> str:
    """Return "RPC0 310 MiB less, CPU 312 MiB more" for devices that change, what gets free first."""
    changes = [(new.id, new.need_bytes - old.need_bytes) for old, new in zip(before, after, strict=True)]
    changes = sorted((change for change in changes if change[1]), key=lambda change: change[1])
    return ", ".join(f"{name} {format_bytes(abs(size))} {'less' if size < 0 else 'more'}" for name, size in changes)


def _layers(first: int, last: int) -> str:
    return f"layer {first}" if first == last else f"layers {first}-{last}"


def _bits(kind: KvType) -> float:
    return TYPES_BY_NAME[kind].block_bytes / TYPES_BY_NAME[kind].block_elements


def _cache_words(before: ContextSettings, after: ContextSettings) -> str:
    if before.type_k != after.type_k and before.type_v != after.type_v:
        return f"KV cache to {after.type_k}"
    return f"K cache to {after.type_k}" if before.type_k != after.type_k else f"V cache to {after.type_v}"
