"""Strategy fastest: the layout with the least predicted time per token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, permutations

from engine.base.language import tr, tr_count
from engine.devices.device import CPU_ID, Device, Rig
from engine.planning.fit.strategies.balanced import balanced_layout
from engine.planning.fit.strategies.choosing import Candidate, all_on_cpu, choose, describe_rest, describe_runs
from engine.planning.fit.strategies.constraints import NO_CONSTRAINTS, AutoLayout, Constraints
from engine.planning.fit.strategies.experts import experts_candidates
from engine.planning.fit.strategies.fewest import fewest_candidates
from engine.planning.fit.strategies.filling import fill, whole_layouts
from engine.planning.fit.strategies.workbench import Workbench, rank
from engine.planning.layout.layout import Layout
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.speed.prediction import CostModel, SpeedRange
from engine.planning.speed.speeds import NO_MEASUREMENTS, Speeds, bandwidth, link
from engine.planning.speed.work import Work

_MAX_ORDERS = 24
"""All orders of four devices; of more, those of the four fastest, with the others behind them by speed."""


def fastest(
    memory: ModelMemory, rig: Rig, context: ContextSettings, constraints: Constraints = NO_CONSTRAINTS
) -> AutoLayout:
    """Return the layout with the least predicted time per token; what was measured counts, where anything was."""
    bench = Workbench(memory, rig, context, constraints)
    speeds = constraints.speeds
    costs = CostModel(Work(memory.model), rig, context, memory.for_context(context), speeds)
    predicted = {layout: costs.range(layout) for layout in _layouts(bench, speeds)}
    if constraints.split:
        predicted = {layout: each for layout, each in predicted.items() if _is_split(layout)} or predicted
    ordered = sorted(predicted, key=lambda layout: predicted[layout].middle_s)
    single = not constraints.split and any(True for _ in whole_layouts(bench))
    return choose(
        bench,
        (
            Candidate(layout, _reason(bench, layout, predicted[layout], len(predicted), single=single))
            for layout in ordered
        ),
    )


def _is_split(layout: Layout) -> bool:
    return len({*layout.devices} - {CPU_ID}) > 1


def predict_layout(
    memory: ModelMemory, rig: Rig, layout: Layout, context: ContextSettings, speeds: Speeds = NO_MEASUREMENTS
) -> SpeedRange:
    """Return the predicted time per token of any layout."""
    return CostModel(Work(memory.model), rig, context, memory.for_context(context), speeds).range(layout)


def _layouts(bench: Workbench, speeds: Speeds) -> Iterator[Layout]:
    """Yield single devices where one is enough, else what every order of devices and every other idea leads to."""
    if not bench.constraints.split:
        whole = [layout for _, layout in whole_layouts(bench)]
        if whole:
            yield from whole
            return
    by_speed = sorted(bench.devices, key=lambda device: bandwidth(device, speeds))
    for order in _orders(bench, by_speed, speeds):
        yield fill(bench, order)
    yield balanced_layout(bench)
    for candidate in (*fewest_candidates(bench), *experts_candidates(bench)):
        yield candidate.layout


def _orders(bench: Workbench, by_speed: Sequence[Device], speeds: Speeds) -> Iterator[list[str]]:
    """Yield orders of devices, first the given one; those that only swap devices of one kind are one order."""
    held = {*bench.pinned.values(), bench.output}
    kinds = [
        (
            device.id if device.id in held else "",
            device.name,
            device.backend,
            rank(device),
            bench.usable[device.id],
            device.overhead_bytes,
            bandwidth(device, speeds),
            link(device, speeds),
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


def _reason(bench: Workbench, layout: Layout, prediction: SpeedRange, n_layouts: int, *, single: bool) -> str:
    if single:
        return tr(
            "{output_device} holds everything and reads its memory fastest of the devices that do: {text} predicted.",
            output_device=layout.output_device,
            text=prediction.text(),
        )
    if layout.devices == (CPU_ID,):
        return tr("{all_on_cpu} Predicted are {text}.", all_on_cpu=all_on_cpu(bench), text=prediction.text())
    return tr_count(
        "Of {count} layout this one reads its weights soonest, {text} predicted: {describe_runs}.{describe_rest}",
        "Of {count} layouts this one reads its weights soonest, {text} predicted: {describe_runs}.{describe_rest}",
        n_layouts,
        text=prediction.text(),
        describe_runs=describe_runs(layout),
        describe_rest=describe_rest(bench, layout),
    )
