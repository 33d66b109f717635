"""Strategy "fewest", which uses as few devices as can hold the model, and cards before integrated devices.

The capacity search of this module compares the bytes of layers with the memory that each device has for layers. It
fills each device to the same fraction of that memory. The fraction is as small as possible without leaving more layers
to the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct

from engine.base.language import tr
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device
from engine.planning.fit.strategies.choosing import (
    Candidate,
    all_on_cpu,
    count_layers,
    describe_rest,
    describe_runs,
    name_list,
    strategy_of,
)
from engine.planning.fit.strategies.filling import fill, whole_layouts
from engine.planning.fit.strategies.workbench import Workbench
from engine.planning.layout.layout import Layout
from engine.planning.memory.backends import backend_traits

_CORRECTIONS = 12


def fewest_candidates(bench: Workbench) -> Iterator[Candidate]:
    """Yield a layout on one device if one device can hold everything; else the layouts of two searches, best first.

    `capacity_layout` is the first search. The second one fills one device after another.
    """
    if not bench.constraints.split:
        for device, layout in whole_layouts(bench):
            yield Candidate(layout, whole_reason(bench, device))
            return
    searched = None if bench.pinned else capacity_layout(bench, spread=bench.constraints.split)
    filled = _fewest_filled(bench)
    both = [layout for layout in (searched, filled) if layout is not None]
    # A requested split prefers more devices, otherwise fewer are better.
    sign = -1 if bench.constraints.split else 1
    both.sort(key=lambda layout: (not bench.holds_all(layout), -bench.placed_bytes(layout), sign * len(layout.devices)))
    for layout in both:
        yield Candidate(layout, _reason(bench, layout))


def whole_reason(bench: Workbench, device: Device) -> str:
    """Return a sentence for the user on why everything is on one device."""
    return tr(
        "All {count_layers} and the output layer fit on {id} alone, so nothing is split.",
        count_layers=count_layers(bench.n_layers),
        id=device.id,
    )


def capacity_layout(bench: Workbench, *, spread: bool) -> Layout | None:
    """Return the layout of the capacity search, which compares the bytes of layers with the memory of each device.

    If a device lacks memory in the forecast of that layout, the search is repeated with less memory for layers on that
    device. The search runs at most `_CORRECTIONS` times. None if a device still lacks memory then.

    `spread`: if True, all devices are used, else the fewest.
    """
    # The search counts layers and a fixed cost for each device. The estimate of the whole layout is exact: a device
    # that it finds short has that much less room in the next round.
    if not bench.devices:
        return None
    fixed, output_bytes = _fixed_costs(bench)
    sizes = [layer.weights_bytes + (layer.kv_bytes if bench.context.offload_kqv else 0) for layer in bench.layers]
    free = {device_id: bench.usable[device_id] - cost for device_id, cost in fixed.items()}
    for _ in range(_CORRECTIONS):
        rooms = [DeviceRoom(device.id, max(0, free[device.id]), bench.rank_of(device)) for device in bench.devices]
        layout = _layout_of(bench, place_layers((*sizes, output_bytes), rooms, spread=spread))
        short = bench.shortfalls(layout)
        if not short:
            return layout
        if not short.keys() <= free.keys():
            return None  # Of what is pinned to a device that holds nothing else, nothing can be taken away.
        for device_id, size in short.items():
            free[device_id] -= size
    return None


def _fixed_costs(bench: Workbench) -> tuple[dict[str, int], int]:
    """Return (bytes that each device needs in addition to layers, bytes of the output layer with its buffers)."""
    # Cards of one kind need the same, unless side files are on one of them only.
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
    assignment = [first, *[device.id] * (bench.n_layers - 1)]
    inside = bench.need(bench.layout(assignment, CPU_ID))[device.id]
    with_output = bench.need(bench.layout(assignment, device.id))[device.id]
    besides = inside.overhead_bytes + inside.answering_bytes
    return inside.compute_bytes + besides, with_output.need_bytes - inside.need_bytes


def _layout_of(bench: Workbench, placed: Sequence[tuple[str, Sequence[int]]]) -> Layout:
    assignment = [CPU_ID] * (bench.n_layers + 1)
    for device_id, indices in placed:
        for index in indices:
            assignment[index] = device_id
    return bench.layout(assignment[:-1], assignment[-1])


def _fewest_filled(bench: Workbench) -> Layout:
    """Return a layout on the smallest number of devices that holds the whole model.

    Devices are taken in the order of `bench.devices`. If the model is too large for all of them, all are filled.
    """
    layout = fill(bench, [])
    for count in range(1, len(bench.devices) + 1):
        devices = bench.devices[:count]
        # A filling takes a search of many forecasts, and weights alone show that most of them cannot hold everything.
        if count < len(bench.devices) and not bench.may_hold_all(devices):
            continue
        layout = fill(bench, bench.in_layer_order(devices))
        if bench.holds_all(layout):
            break
    return layout


def _reason(bench: Workbench, layout: Layout) -> str:
    used = [device_id for device_id in layout.devices if device_id != CPU_ID]
    if not used:
        return all_on_cpu(bench)
    if not bench.holds_all(layout):
        small = (
            tr("The devices cannot hold all layers that are not pinned")
            if bench.pinned
            else tr("All devices together are too small")
        )
        return f"{small}: {describe_runs(layout)}.{describe_rest(bench, layout)}"
    runs = describe_runs(layout)
    if len(used) == 1:
        if layout.devices == (used[0],):
            return tr("{used} holds the whole model: {describe_runs}.", used=used[0], describe_runs=runs)
        return tr(
            "{used} holds everything that is not pinned elsewhere: {describe_runs}.", used=used[0], describe_runs=runs
        )
    if bench.constraints.split:
        why = tr("A split over several devices was requested")
    elif len(used) == 2:
        why = tr("No single device holds everything")
    else:
        why = tr("No {count} devices together hold everything", count=len(used) - 1)
    return tr(
        "{why}, so {name_list} share the layers in proportion to how many layers fit on each: {describe_runs}.",
        why=why,
        name_list=name_list(used),
        describe_runs=runs,
    )


_PRECISION = 1e-6
_MAX_STEPS = 64

LayersByDevice = tuple[tuple[str, tuple[int, ...]], ...]
"""Pairs of device id and its layers in ascending order, sorted by first layer; devices without layers are left out."""


class DeviceRoom(Struct, frozen=True):
    """A device for `place_layers`, which divides layers by their bytes.

    `room_bytes`: bytes for layers.
    `rank`: rank of the device as in `reach_rank`. Devices with a lower rank are filled first and get the later layers.
    """

    id: str
    room_bytes: int
    rank: int = 0


def place_layers(layers: Sequence[int], rooms: Sequence[DeviceRoom], *, spread: bool = False) -> LayersByDevice:
    """Place as many layers as fit on the fewest devices, and return the layers of each device.

    `layers`: bytes of each layer, the output layer last.
    `spread`: if True, all `rooms` are used, else the fewest.
    """
    # If not all layers fit, the output layer is left out: it would take the room of repeating layers.
    ordered = sorted(rooms, key=lambda room: (room.rank, -room.room_bytes))
    if spread:
        ordered = [replace(room, rank=0) for room in ordered]
    found: LayersByDevice = ()
    for sizes in (layers, layers[:-1]):
        for count in [len(ordered)] if spread else range(1, len(ordered) + 1):
            found = _best_fit(sizes, ordered[:count])
            if _count(found) == len(sizes):
                return found
    return found


def _best_fit(layers: Sequence[int], rooms: Sequence[DeviceRoom]) -> LayersByDevice:
    """Fill devices with layers, and return the layers of each device.

    Devices with the lowest rank are filled first, with the last layers. Devices of one rank are filled to the same
    fraction of their `room_bytes`.
    """
    found: LayersByDevice = ()
    left = len(layers)
    for kind in dict.fromkeys(room.rank for room in rooms):
        group = [room for room in rooms if room.rank == kind]
        best = _greedy(layers[:left], group, 1.0)
        # Bisect the smallest part of every room with which as many layers are placed as with all of it.
        target, low, high = _count(best), 0.0, 1.0
        for _ in range(_MAX_STEPS):
            if high - low <= _PRECISION:
                break
            factor = (low + high) / 2
            tried = _greedy(layers[:left], group, factor)
            if _count(tried) == target:
                best, high = tried, factor
            else:
                low = factor
        left -= target
        found = best + found
    return found


def _greedy(layers: Sequence[int], rooms: Sequence[DeviceRoom], factor: float) -> LayersByDevice:
    """Place layers from the last to the first, on devices from the last to the first.

    Each device gets layers for at most `factor` times its `room_bytes`.
    """
    taken: list[list[int]] = [[] for _ in rooms]
    index = len(layers) - 1
    for room, indices in zip(reversed(rooms), reversed(taken), strict=True):
        room_bytes = int(room.room_bytes * factor)
        while index >= 0 and layers[index] <= room_bytes:
            indices.insert(0, index)
            room_bytes -= layers[index]
            index -= 1
    return tuple((room.id, tuple(indices)) for room, indices in zip(rooms, taken, strict=True) if indices)


def _count(placed: LayersByDevice) -> int:
    return sum(len(indices) for _, indices in placed)


fewest = strategy_of(fewest_candidates)
"""The strategy: it finds the layout on the fewest devices that hold the whole model.

If all devices together are too small, it finds the layout with the largest part of the model off the CPU.
"""
