"""One plan for several models that are loaded at the same time: a layout for each, or the model to leave out.

Each model has its own process. So the needs of the models on one device are added, and each includes the overhead of
the backend. The host's memory that devices share (`Rig.pool`) is counted once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from msgspec import Struct

from engine.base.errors import ArgumentError
from engine.base.language import tr, tr_count
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Rig
from engine.model.gguf.model_file import ModelFile
from engine.planning.fit.strategies.catalogue import auto_layout
from engine.planning.fit.strategies.constraints import NO_CONSTRAINTS, Constraints
from engine.planning.fit.unload_plan import is_whole
from engine.planning.layout.layout import single_device
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.memory.side_files import NO_SIDE_FILES, SideFiles
from engine.planning.plan.decisions.context_length import reads_whole_texts
from engine.planning.plan.edit import Edit
from engine.planning.plan.figures import Figures, figures_of
from engine.planning.plan.plan import Plan
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.speed.speeds import Speeds, bandwidth

MAX_MODELS = 8
"""Largest number of models in one plan. Each model takes a search for a layout, in several orders of planning."""
DEFAULT_STRATEGY = "fewest"
_SMALL_DIVISOR = 8
"""Divisor of the largest model's file size: models of at most an eighth of that size count as small."""
_GAIN_DIVISOR = 8
"""Divisor of a model's number of layers: an eighth of the layers is the smallest gain that counts.

A model gains if at least so many of its layers leave the CPU when another model is left out.
"""


class Wanted(Struct, frozen=True):
    """A model that is to be loaded together with others.

    `name`: unique name of the model in the plan.
    """

    name: str
    memory: ModelMemory
    context: ContextSettings
    side_files: SideFiles = NO_SIDE_FILES


class PlannedModel(Struct, frozen=True, dict=True):
    """A model with its layout.

    `plan`: the plan with this layout. Its devices have only the memory that models loaded earlier leave free.
    """

    name: str
    plan: Plan

    @property
    def fits(self) -> bool:
        return self.plan.report.fits

    @cached_property
    def need_bytes(self) -> Mapping[str, int]:
        """Bytes that the model needs on each device that it uses, by device id."""
        return {row.id: row.need_bytes for row in self.plan.forecast if row.need_bytes}

    @property
    def n_host_layers(self) -> int:
        """Number of layers on the CPU; all layers if an override moves anything to the CPU."""
        layout = self.plan.edit.layout
        moved = any(override.device == CPU_ID for override in layout.overrides)
        return layout.n_layers if moved else sum(run.length for run in layout.runs if run.device == CPU_ID)

    @property
    def is_whole(self) -> bool:
        """Whether the model fits and no layer has weights on the CPU."""
        return is_whole(self.plan)


class Gain(Struct, frozen=True):
    """What one model gains if another model is left out.

    `before`, `after`: figures of its plan (fit, layers on the CPU, speed) with and without the other model.
    """

    name: str
    before: Figures
    after: Figures


class LeaveOut(Struct, frozen=True):
    """The model that should be left out of the plan, and what each of the other models gains if it is left out."""

    name: str
    gains: tuple[Gain, ...]


class Together(Struct, frozen=True):
    """Layouts for several models.

    `placed`: the models in the order of loading; each is planned for the memory that the ones before it leave free.
    `leave_out`: the model to leave out; None if all models fit without the CPU, or if leaving one out helps no other.
    """

    rig: Rig
    placed: tuple[PlannedModel, ...]
    leave_out: LeaveOut | None = None

    @property
    def fits(self) -> bool:
        """Whether all models can be loaded at the same time."""
        return all(each.fits for each in self.placed)

    @property
    def is_whole(self) -> bool:
        """Whether all models fit and have no weights on the CPU."""
        return all(each.is_whole for each in self.placed)

    def need_bytes(self, device_id: str) -> int:
        """Return the bytes that all models need together on a device."""
        return sum(each.need_bytes.get(device_id, 0) for each in self.placed)

    def find(self, name: str) -> PlannedModel:
        return next(each for each in self.placed if each.name == name)


def plan_together(
    wanted: Sequence[Wanted],
    rig: Rig,
    speeds: Speeds,
    *,
    strategy: str = DEFAULT_STRATEGY,
    constraints: Constraints = NO_CONSTRAINTS,
) -> Together:
    """Return a layout for each model, so that all models can be loaded at the same time.

    The models are planned one after another, in several orders. The best result is the one in which the most models
    fit. If several results are equal, it is the one in which the most important models have nothing on the CPU. Small
    models and embedding models get the slowest device on which they fit, so that faster devices stay free for others.

    `wanted`: the models, most important first.

    Raises:
        ArgumentError: there is no model, there are too many, two have the same name, or the strategy is unknown.
        CancelledError: the search was cancelled by `constraints.watch`.
    """
    names = [each.name for each in wanted]
    if not wanted or len(wanted) > MAX_MODELS:
        raise ArgumentError(tr("Choose 1 to {most} models to plan together.", most=MAX_MODELS))
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ArgumentError(tr("{name} is chosen twice; models of one plan need different names.", name=twice))
    planner = _Planner(rig, speeds, strategy, constraints)
    best = planner.best(wanted)
    return best if best.is_whole or len(wanted) == 1 else replace(best, leave_out=planner.leave_out(wanted, best))


def distinct_names(models: Sequence[ModelFile]) -> list[str]:
    """Return a distinct name for each model: the model's name, else its file name, else its file name with a number."""
    own = [model.name for model in models]
    names: list[str] = []
    for model in models:
        name = model.name if own.count(model.name) == 1 else model.paths[0].stem
        number = 2
        while name in names:
            name, number = f"{model.paths[0].stem} ({number})", number + 1
        names.append(name)
    return names


def small_models(wanted: Sequence[Wanted]) -> frozenset[str]:
    """Return the names of the embedding models, and of the models that are small compared with the largest one."""
    largest_bytes = max(each.memory.model.size_bytes for each in wanted)
    return frozenset(
        each.name
        for each in wanted
        if len(wanted) > 1
        and (reads_whole_texts(each.memory.model) or each.memory.model.size_bytes * _SMALL_DIVISOR <= largest_bytes)
    )


def together_sentence(found: Together) -> str:
    """Return sentences for the user on whether all models fit, and if not, which model should be left out."""
    short = [each for each in found.placed if not each.fits]
    if short:
        text = tr("{names} would not fit together with the other models.", names=", ".join(each.name for each in short))
    elif found.is_whole:
        text = tr_count(
            "{count} model fits without the CPU.", "All {count} models fit without the CPU.", len(found.placed)
        )
    else:
        parts = [
            tr("{name} has {count} of {total} layers on the CPU", name=each.name, count=each.n_host_layers, total=total)
            for each in found.placed
            if each.n_host_layers and (total := each.plan.model.n_layers)
        ]
        text = tr("All models fit; {parts}.", parts=", ".join(parts))
    return f"{text} {leave_out_sentence(found.leave_out)}" if found.leave_out is not None else text


def leave_out_sentence(leave_out: LeaveOut) -> str:
    """Return a sentence for the user on the model that should be left out, and on the gains of the other models."""
    gains = "; ".join(map(_gain_text, leave_out.gains))
    return tr("Leave out {name}: without this model, {gains}.", name=leave_out.name, gains=gains)


def _gain_text(gain: Gain) -> str:
    before, after = gain.before, gain.after
    if not before.fits:
        text = tr("{name} fits", name=gain.name)
    elif after.n_host_layers:
        text = tr(
            "{name} has {after} instead of {before} layers on the CPU",
            name=gain.name,
            after=after.n_host_layers,
            before=before.n_host_layers,
        )
    else:
        text = tr("{name} fits without the CPU", name=gain.name)
    if not before.fits or before.speed is None or after.speed is None:
        return text
    return tr("{text} ({after} instead of {before})", text=text, after=after.speed.text(), before=before.speed.text())


class _Planner:
    """Plans models one after another on one rig."""

    def __init__(self, rig: Rig, speeds: Speeds, strategy: str, constraints: Constraints) -> None:
        self._rig, self._speeds, self._strategy, self._constraints = rig, speeds, strategy, constraints
        self._placed: dict[tuple[str, Rig], PlannedModel] = {}
        """Cached results by model name and rig. Many orders of planning begin with the same models."""

    def best(self, wanted: Sequence[Wanted]) -> Together:
        """Plan the models in several orders, and return the best result; the first one if several are equally good."""
        small = small_models(wanted)
        large = {each.name for each in _too_large(wanted, self._rig)}
        found: list[Together] = []
        for order in _orders(wanted, small, self._rig):
            found.append(self._in_order(order, small))
            # In another order, a model that is too large anyway would only get about the same rest.
            if found[-1].fits and all(each.is_whole or each.name in large for each in found[-1].placed):
                return found[-1]
        return max(found, key=lambda each: _score(each, wanted, small))

    def leave_out(self, wanted: Sequence[Wanted], found: Together) -> LeaveOut | None:
        """Return the model that should be left out, with what the other models gain; None if no other model gains.

        Each model is left out in turn, the least important one first, and the others are planned again. As soon as all
        others fit and use no CPU, the model that is left out is returned. If that never happens, the model is returned
        that helps the most others: they fit without the CPU, or they fit and did not fit before. If several models help
        equally many, the others must have the fewest layers on the CPU.
        """
        best: tuple[tuple[int, int], LeaveOut] | None = None
        small = small_models(wanted)
        # One order only: the searches without each of the models would take several times as long.
        order = next(_orders(wanted, small, self._rig))
        for left_out in reversed(wanted):
            rest = [each for each in wanted if each is not left_out]
            without = self._in_order([each for each in order if each is not left_out], small)
            gains = tuple(self._gains(rest, found, without))
            if not gains:
                continue
            leave_out = LeaveOut(left_out.name, gains)
            if without.is_whole:
                return leave_out
            worth = (
                sum(each.is_whole or each.fits > found.find(each.name).fits for each in without.placed),
                -sum(each.n_host_layers for each in without.placed),
            )
            if best is None or worth > best[0]:
                best = worth, leave_out
        return None if best is None else best[1]

    def _gains(self, rest: Sequence[Wanted], found: Together, without: Together) -> Iterator[Gain]:
        for each in rest:
            before, after = found.find(each.name), without.find(each.name)
            fewer = before.n_host_layers - after.n_host_layers
            is_much = fewer * _GAIN_DIVISOR >= after.plan.model.n_layers
            if after.fits and (not before.fits or after.is_whole > before.is_whole or is_much):
                yield Gain(each.name, figures_of(before.plan, self._speeds), figures_of(after.plan, self._speeds))

    def _in_order(self, order: Sequence[Wanted], small: frozenset[str]) -> Together:
        placed: list[PlannedModel] = []
        rig = self._rig
        for each in order:
            placed.append(self._place(each, rig, is_small=each.name in small))
            rig = rig_after(rig, placed[-1].need_bytes)
        return Together(self._rig, tuple(placed))

    def _place(self, wanted: Wanted, rig: Rig, *, is_small: bool) -> PlannedModel:
        known = self._placed.get((wanted.name, rig))
        if known is None:
            known = self._placed[wanted.name, rig] = self._search(wanted, rig, is_small=is_small)
        return known

    def _search(self, wanted: Wanted, rig: Rig, *, is_small: bool) -> PlannedModel:
        for device in self._cheapest(rig) if is_small else ():
            layout = single_device(wanted.memory.model.n_layers, device.id)
            plan = Plan(wanted.memory, rig, Edit(layout, wanted.context, wanted.side_files))
            if plan.report.fits:
                return PlannedModel(wanted.name, plan)
        limits = replace(self._constraints, side_files=wanted.side_files, speeds=self._speeds)
        found = auto_layout(self._strategy, wanted.memory, rig, wanted.context, limits)
        return PlannedModel(wanted.name, Plan(wanted.memory, rig, Edit(found.layout, found.context, wanted.side_files)))

    def _cheapest(self, rig: Rig) -> list[Device]:
        """Return the devices of `rig` that may hold layers, the slowest first.

        Of equally fast devices, the one with the least available memory comes first.
        """
        off = self._constraints.off
        devices = [each for each in rig.devices if each.kind != "accel" and each.id not in off]
        # Of equal cards the fuller one first: another model may need the whole of the emptier one.
        return sorted(devices, key=lambda each: (bandwidth(each, self._speeds), each.available_bytes))


def _orders(wanted: Sequence[Wanted], small: frozenset[str], rig: Rig) -> Iterator[tuple[Wanted, ...]]:
    """Yield orders in which the models are planned; a model gets the memory that earlier ones in the order leave free.

    The orders are: large models by importance, then small models; small models, then large models by importance; large
    models by file size, then small models. Models that are too large for all devices together come last in each order:
    they would take memory from the others and still be slow.

    `small`: names of the small models (`small_models`); all other models count as large.
    """
    too_large = _too_large(wanted, rig)
    main = [each for each in wanted if each.name not in small and each not in too_large]
    rest = [each for each in wanted if each.name in small and each not in too_large]
    by_size = sorted(main, key=lambda each: -each.memory.model.size_bytes)
    orders = ((main, rest), (rest, main), (by_size, rest))
    yield from dict.fromkeys((*first, *second, *too_large) for first, second in orders)


def _too_large(wanted: Sequence[Wanted], rig: Rig) -> list[Wanted]:
    """Return the models whose files are larger than the available memory of all devices except the CPU together."""
    room_bytes = sum(device.available_bytes for device in rig.devices if device.kind != "accel")
    return [each for each in wanted if each.memory.model.size_bytes > room_bytes]


def _score(found: Together, wanted: Sequence[Wanted], small: frozenset[str]) -> tuple[object, ...]:
    """Return the sort key of a result; the best result has the largest key.

    The criteria, the most important first:
    1. number of models that fit;
    2. which large models have nothing on the CPU; more important models count first;
    3. number of models with nothing on the CPU;
    4. layers of large models on the CPU, fewer are better; more important models count first.
    """
    by_name = {each.name: each for each in found.placed}
    placed = [by_name[each.name] for each in wanted]
    main = [each for each in placed if each.name not in small]
    # Lists compare element by element. So an important model on devices outweighs all less important ones.
    return (
        sum(each.fits for each in placed),
        [each.is_whole for each in main],
        sum(each.is_whole for each in placed),
        [-each.n_host_layers for each in main],
    )


def rig_after(rig: Rig, need_bytes: Mapping[str, int]) -> Rig:
    """Return `rig` with the memory that is left after a model was loaded.

    `need_bytes`: bytes that the model needs, by device id. An RPC worker that the model uses has no memory left,
    because a worker serves one client at a time.
    """
    endpoints = {device.endpoint for device in rig.devices if device.endpoint and device.id in need_bytes}
    shared_bytes = sum(need_bytes.get(device.id, 0) for device in rig.devices if device.unified)

    def after(device: Device) -> Device:
        taken_bytes = need_bytes.get(device.id, 0) + (shared_bytes if device.is_host else 0)
        if device.endpoint in endpoints:
            return replace(device, free_bytes=0)
        if not taken_bytes:
            return device
        free_bytes = device.total_bytes if device.free_bytes is None else device.free_bytes
        # A cap is for all models together, so the loaded one uses up a part of it.
        cap_bytes = None if device.cap_bytes is None else max(0, device.cap_bytes - taken_bytes)
        return replace(device, free_bytes=max(0, free_bytes - taken_bytes), cap_bytes=cap_bytes)

    return Rig(tuple(map(after, rig.devices)), after(rig.host))
