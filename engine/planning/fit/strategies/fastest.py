"""Strategy "fastest", also used for the initial layout of a model: the layout with the least predicted time per token.

It predicts the speed of the layouts of all other strategies, and of layouts that fill devices in further orders, and
chooses the fastest. So no other strategy finds a layout that is predicted to be faster. Strategy "context" is left out,
because it plans with other settings.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import islice, permutations
from math import inf
from time import thread_time

from engine.base.language import tr, tr_count
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Rig
from engine.model.gguf.model_file import ModelFile
from engine.planning.fit.strategies.balanced import balanced_candidates
from engine.planning.fit.strategies.choosing import (
    Candidate,
    all_on_cpu,
    choose,
    describe_rest,
    describe_runs,
)
from engine.planning.fit.strategies.constraints import NO_CONSTRAINTS, AutoLayout, Constraints
from engine.planning.fit.strategies.draft_room import with_room_for_draft
from engine.planning.fit.strategies.expert_filling import fill_with_experts
from engine.planning.fit.strategies.experts import experts_candidates
from engine.planning.fit.strategies.fewest import fewest_candidates
from engine.planning.fit.strategies.filling import fill, whole_layouts
from engine.planning.fit.strategies.priority import priority_candidates
from engine.planning.fit.strategies.proportional import proportional_candidates
from engine.planning.fit.strategies.workbench import SLOW_LINK, Workbench, rank
from engine.planning.layout.layout import Layout
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.memory.side_files import NO_SIDE_FILES, SideFiles
from engine.planning.plan.decisions.context_length import context_lengths
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.speed.prediction import CostModel, SpeedForecast, SpeedRange
from engine.planning.speed.speeds import NO_MEASUREMENTS, Speeds, bandwidth, link, op_seconds, source
from engine.planning.speed.texts import rate_text
from engine.planning.speed.work import TokenWork

_NAMED_SHARE = 0.02
"""A link is mentioned in the explanation only if it takes at least this part of the time per token."""
_MAX_ORDERS = 24
"""Largest number of device orders that are tried: 24 is the number of orders of four devices.

With more devices, the four fastest are permuted, and the others follow by speed.
"""
INITIAL_SECONDS = 1.0
"""Limit of processor seconds for the search for the initial layout, for which the user waits."""
_STRATEGIES: tuple[Callable[[Workbench], Iterator[Candidate]], ...] = (
    fewest_candidates,
    priority_candidates,
    experts_candidates,
    proportional_candidates,
    balanced_candidates,
)
"""Functions that yield the candidate layouts of all other strategies except "context"."""


def fastest(
    memory: ModelMemory, rig: Rig, context: ContextSettings, constraints: Constraints = NO_CONSTRAINTS
) -> AutoLayout:
    """Return the layout with the least predicted time per token; measured speeds are used if there are any."""
    return _fastest(Workbench(memory, rig, context, constraints))


def initial_layout(
    model: ModelFile | ModelMemory,
    rig: Rig,
    context: ContextSettings,
    side_files: SideFiles = NO_SIDE_FILES,
    speeds: Speeds = NO_MEASUREMENTS,
    *,
    seconds: float = INITIAL_SECONDS,
) -> Layout:
    """Return the initial layout of a model that is opened: the fastest that was found in `seconds` of processor time.

    A layout is returned even if nothing fits. If the context length is "auto", the longest sensible length that fits is
    used.
    """
    memory = model if isinstance(model, ModelMemory) else ModelMemory(model)
    deadline_s = thread_time() + seconds
    found = None
    for n_ctx in context_lengths(memory.model, rig, context):
        settings = replace(context, n_ctx=n_ctx)
        constraints = Constraints(side_files=side_files, speeds=speeds)

        def search(wanted: Constraints, settings: ContextSettings = settings) -> AutoLayout:
            return _fastest(Workbench(memory, rig, settings, wanted), deadline_s)

        found = with_room_for_draft(search(constraints), memory, rig, constraints, search)
        if found.fits:
            break
    assert found is not None  # There is at least one length.
    return found.layout


def _fastest(bench: Workbench, deadline_s: float = inf) -> AutoLayout:
    """Return the fastest layout that fits.

    The search ends when the processor time of this thread (`thread_time`) exceeds `deadline_s`. At least one layout is
    tried.
    """
    memory, speeds = bench.memory, bench.constraints.speeds
    costs = CostModel(TokenWork(memory.model), bench.rig, bench.context, memory.for_context(bench.context), speeds)
    seconds: dict[Layout, float] = {}
    for layout in _layouts(bench, speeds):
        if layout not in seconds:
            seconds[layout] = costs.answer(layout).token_s
        # Checked after a layout, so that at least one is always found.
        if thread_time() > deadline_s:
            break
    for is_wanted in (_uses_a_device, _is_split) if bench.constraints.split else (_uses_a_device,):
        seconds = {layout: token_s for layout, token_s in seconds.items() if is_wanted(layout)} or seconds
    # Five digits are enough; what differs after them is rounding. Sorting is stable: of equally fast layouts the first
    # one found is taken, which is on the fewest devices.
    ordered = sorted(seconds, key=lambda layout: float(f"{seconds[layout]:.5g}"))
    best = next((layout for layout in ordered if bench.report(layout).fits), None)
    if best is None:
        return choose(bench, fewest_candidates(bench))
    best = _with_output_on_device(bench, costs, best)
    single = not bench.constraints.split and any(best == layout for _, layout in whole_layouts(bench))
    prediction = costs.answer(best)
    words = _reason(bench, best, prediction, len(seconds), single=single)
    reason = " ".join((words, *_link_sentences(prediction)))
    return AutoLayout(best, bench.context, reason, fits=True)


def _with_output_on_device(bench: Workbench, costs: CostModel, layout: Layout) -> Layout:
    """Return `layout` with its output layer moved from the CPU to a device, if that fits and is predicted to be faster.

    Otherwise return `layout` unchanged.
    """
    if layout.output_device != CPU_ID or CPU_ID in (bench.output, bench.pinned.get(layout.n_layers - 1)):
        return layout
    moved = [layout.move_output(device_id) for device_id in layout.devices if device_id != CPU_ID]
    going = [each for each in moved if not bench.shortfalls(each) and bench.report(each).fits]
    return min((layout, *going), key=lambda each: costs.answer(each).token_s)


def _uses_a_device(layout: Layout) -> bool:
    # A tiny model is predicted to be faster on the CPU alone. The CPU keeps what no device has room for, and no more.
    return layout.devices != (CPU_ID,)


def _is_split(layout: Layout) -> bool:
    return len({*layout.devices} - {CPU_ID}) > 1


def predict_layout(
    memory: ModelMemory, rig: Rig, layout: Layout, context: ContextSettings, speeds: Speeds = NO_MEASUREMENTS
) -> SpeedRange:
    """Return the predicted range of seconds per token of `layout`."""
    return CostModel(TokenWork(memory.model), rig, context, memory.for_context(context), speeds).range(layout)


def _layouts(bench: Workbench, speeds: Speeds) -> Iterator[Layout]:
    """Yield layouts to compare: on one device, from other strategies, and with devices filled in many orders.

    If the fastest device has room for the whole model, only the layouts on one device are yielded, because splitting
    the model cannot make it faster.
    """
    whole = {} if bench.constraints.split else dict(whole_layouts(bench))
    yield from whole.values()
    # Devices are filled from the last one on. A slow link costs a token more than slow memory.
    by_speed = sorted(bench.devices, key=lambda device: (bench.rank_of(device) < SLOW_LINK, bandwidth(device, speeds)))
    # Sharing a model between devices costs hops. It pays only if a device that cannot hold the model reads faster.
    # Over a slow link it costs more than several hops elsewhere.
    near = [device for device in whole if bench.rank_of(device) < SLOW_LINK or bench.rank_of(by_speed[-1]) == SLOW_LINK]
    if by_speed and any(bandwidth(device, speeds) >= bandwidth(by_speed[-1], speeds) for device in near):
        return
    is_one_speed = len({_speed_of(device, speeds) for device in bench.devices}) == 1
    # Quick and promising ones come first: the search for an initial layout may end after any of them.
    for candidate in fewest_candidates(bench):
        yield candidate.layout
        # Among devices of one speed only hops make a difference, and the fewest devices have the fewest hops. If a
        # split is asked for, a later candidate may be the first that is one.
        is_wanted = not bench.constraints.split or _is_split(candidate.layout)
        if is_one_speed and is_wanted and bench.holds_all(candidate.layout):
            return
    first, *orders = _orders(bench, by_speed, speeds)
    filled = fill(bench, first)
    yield filled
    sparse = None if bench.holds_all(filled) else fill_with_experts(bench, first)
    if sparse is not None:
        yield sparse
    for candidates in _STRATEGIES:
        yield choose(bench, candidates(bench)).layout
    for order in orders:
        yield fill(bench, order)


def _orders(bench: Workbench, by_speed: Sequence[Device], speeds: Speeds) -> Iterator[list[str]]:
    """Yield orders of device ids, beginning with the order of `by_speed`.

    If orders differ only in the positions of equal devices, only the first of these orders is yielded.
    """
    # Devices are interchangeable if they are equal in memory, speed and backend. A device with pins is like no other.
    held = {*bench.pinned.values(), bench.output}
    kinds = [
        (
            device.id if device.id in held else "",
            device.backend,
            bench.usable[device.id],
            device.overhead_bytes,
            _speed_of(device, speeds),
        )
        for device in by_speed
    ]
    numbers = [kinds.index(kind) for kind in kinds]
    known: set[tuple[int, ...]] = set()
    for order in islice(permutations(range(len(by_speed))), _MAX_ORDERS):
        kept = tuple(numbers[index] for index in order)
        if kept not in known:
            known.add(kept)
            yield [by_speed[index].id for index in order]


def _speed_of(device: Device, speeds: Speeds) -> Hashable:
    """Return the properties of a device that determine its predicted speed.

    If they are equal for two devices, a layer takes the same predicted time on both.
    """
    by_type = tuple(sorted(speeds.by_type.get(device.id, {}).items()))
    return (
        rank(device),
        bandwidth(device, speeds),
        source(device, speeds),
        link(device, speeds),
        op_seconds(device, speeds),
        speeds.factors.get(device.id),
        by_type,
    )


def _reason(bench: Workbench, layout: Layout, prediction: SpeedForecast, n_layouts: int, *, single: bool) -> str:
    if single:
        return tr(
            "Of the devices that can hold the whole model, {output_device} has the fastest memory: {text} predicted.",
            output_device=layout.output_device,
            text=prediction.text(),
        )
    if layout.devices == (CPU_ID,):
        return tr("{all_on_cpu} Predicted: {text}.", all_on_cpu=all_on_cpu(bench), text=prediction.text())
    return tr_count(
        "Best of {count} layout, {text} predicted: {describe_runs}.{describe_rest}",
        "Best of {count} layouts, {text} predicted: {describe_runs}.{describe_rest}",
        n_layouts,
        text=prediction.text(),
        describe_runs=describe_runs(layout),
        describe_rest=describe_rest(bench, layout),
    )


def _link_sentences(prediction: SpeedForecast) -> list[str]:
    """Return a sentence for each connection to a device whose transfers take a noticeable part of a token's time."""
    return [
        tr(
            "The link to {id} costs {lost} tokens/s of the predicted speed; the layout uses this link as rarely "
            "as possible.",
            id=use.id,
            lost=rate_text(prediction.lost_per_second(use)),
        )
        for use in prediction.links
        if use.seconds >= _NAMED_SHARE * prediction.token_s
    ]
