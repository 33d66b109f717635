"""Strategy fewest: as few devices as hold the model, cards before integrated ones, filled in proportion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.devices.device import CPU_ID, Device, Rig
from engine.fit.strategies.capacity_search import Place, place_layers
from engine.fit.strategies.choosing import Candidate, choose
from engine.fit.strategies.constraints import NO_CONSTRAINTS, AutoLayout, Constraints
from engine.fit.strategies.filling import fill, whole_layouts
from engine.fit.strategies.wording import all_on_cpu, count_layers, describe_rest, describe_runs, name_list
from engine.fit.strategies.workbench import Workbench, rank
from engine.language import tr
from engine.layout.layout import Layout
from engine.memory.backends import backend_traits
from engine.memory.model_memory import ModelMemory
from engine.settings.context_settings import ContextSettings

_CORRECTIONS = 12


def fewest(
    memory: ModelMemory, rig: Rig, context: ContextSettings, constraints: Constraints = NO_CONSTRAINTS
) -> AutoLayout:
    """Return the layout on the fewest devices; where all of them are too small, with most of the model on them."""
    bench = Workbench(memory, rig, context, constraints)
    return choose(bench, fewest_candidates(bench))


def fewest_candidates(bench: Workbench) -> Iterator[Candidate]:
    """Yield a single device if one holds everything, else the search's and the plain filling of the fewest."""
    if not bench.constraints.split:
        for device, layout in whole_layouts(bench):
            yield Candidate(layout, whole_reason(bench, device))
            return
    searched = None if bench.pinned else capacity_layout(bench, spread=bench.constraints.split)
    filled = _fewest_filled(bench)
    both = [layout for layout in (searched, filled) if layout is not None]
    sign = -1 if bench.constraints.split else 1
    both.sort(key=lambda layout: (not bench.holds_all(layout), -bench.placed_bytes(layout), sign * len(layout.devices)))
    for layout in both:
        yield Candidate(layout, _reason(bench, layout))


def whole_reason(bench: Workbench, device: Device) -> str:
    """Return why everything is on one device."""
    return tr(
        "All {count_layers} and the output layer fit on {id} alone, so nothing is split.",
        count_layers=count_layers(bench.n_layers),
        id=device.id,
    )


def capacity_layout(bench: Workbench, *, spread: bool) -> Layout | None:
    """Return the layout of the capacity search once no device is short; None where that does not settle.

    The search counts layers and a fixed cost per device; where the estimate of the whole layout says that a device is
    short it is given less the next time.
    """
    if not bench.devices:
        return None
    fixed, output_bytes = _fixed_costs(bench)
    sizes = [layer.weights_bytes + (layer.kv_bytes if bench.context.offload_kqv else 0) for layer in bench.layers]
    free = {device_id: bench.usable[device_id] - cost for device_id, cost in fixed.items()}
    for _ in range(_CORRECTIONS):
        places = [Place(device.id, max(0, free[device.id]), rank(device)) for device in bench.devices]
        layout = _layout_of(bench, place_layers((*sizes, output_bytes), places, spread=spread))
        short = bench.shortfalls(layout)
        if not short:
            return layout
        if not short.keys() <= free.keys():
            return None  # Of what is pinned to a device that holds nothing else, nothing can be taken away.
        for device_id, size in short.items():
            free[device_id] -= size
    return None


def _fixed_costs(bench: Workbench) -> tuple[dict[str, int], int]:
    """Return what each device takes besides layers, and what the output layer takes with its share of buffers."""
    # Cards of one sort take the same; what is loaded beside the model may be on one of them only.
    alike: dict[object, tuple[int, int]] = {}
    fixed: dict[str, int] = {}
    for device in bench.devices:
        sort = device.id if bench.side_files else (backend_traits(device), device.overhead_bytes)
        if sort not in alike:
            alike[sort] = _costs_of(bench, device)
        fixed[device.id] = alike[sort][0]
    return fixed, max((bench.output_bytes, *(with_output for _, with_output in alike.values())))


def _costs_of(bench: Workbench, device: Device) -> tuple[int, int]:
    first = CPU_ID if bench.n_layers > 1 else device.id
    places = [first, *[device.id] * (bench.n_layers - 1)]
    inside = bench.need(bench.layout(places, CPU_ID))[device.id]
    with_output = bench.need(bench.layout(places, device.id))[device.id]
    return inside.compute_bytes + inside.overhead_bytes, with_output.need_bytes - inside.need_bytes


def _layout_of(bench: Workbench, placed: Sequence[tuple[str, Sequence[int]]]) -> Layout:
    places = [CPU_ID] * (bench.n_layers + 1)
    for device_id, indices in placed:
        for index in indices:
            places[index] = device_id
    return bench.layout(places[:-1], places[-1])


def _fewest_filled(bench: Workbench) -> Layout:
    """Return the plain filling of the first few devices that hold everything, else of all."""
    layout = fill(bench, [])
    for count in range(1, len(bench.devices) + 1):
        layout = fill(bench, bench.in_layer_order(bench.devices[:count]))
        if bench.holds_all(layout):
            break
    return layout


def _reason(bench: Workbench, layout: Layout) -> str:
    used = [device_id for device_id in layout.devices if device_id != CPU_ID]
    if not used:
        return all_on_cpu(bench)
    if not bench.holds_all(layout):
        small = (
            tr("Beside what is pinned nothing more goes on devices")
            if bench.pinned
            else tr("All devices together are too small")
        )
        return f"{small}: {describe_runs(layout)}.{describe_rest(bench, layout)}"
    runs = describe_runs(layout)
    if len(used) == 1:
        if layout.devices == (used[0],):
            return tr("{used} holds everything: {describe_runs}.", used=used[0], describe_runs=runs)
        return tr(
            "{used} holds everything that is not pinned elsewhere: {describe_runs}.", used=used[0], describe_runs=runs
        )
    if bench.constraints.split:
        why = tr("Splitting was asked for")
    elif len(used) == 2:
        why = tr("No single device holds everything")
    else:
        why = tr("No {count} devices together hold everything", count=len(used) - 1)
    return tr(
        "{why}, so {name_list} share it in proportion to what they can take: {describe_runs}.",
        why=why,
        name_list=name_list(used),
        describe_runs=runs,
    )
