"""Layouts with a given number of layers on one device, or with the experts of a given number of layers on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.base.errors import LayoutError
from engine.base.language import tr
from engine.devices.device import CPU_ID
from engine.planning.layout.layout import Layout, make_layout
from engine.planning.layout.parts import part_device, place_parts


def layer_count(layout: Layout, device: str) -> int:
    """Return the number of layers on a device."""
    return sum(run.length for run in layout.runs if run.device == device)


def with_layer_count(layout: Layout, device: str, count: int) -> Layout:
    """Return the layout with `count` layers on a device; each device then has one run of neighbouring layers.

    Added layers come from the CPU first, then from the devices after `device` in layer order, then from the devices
    before it. Removed layers all go to the CPU if it has layers, else to the next device in layer order, else to the
    previous one. If no other device has layers, they go to the CPU.

    Raises:
        LayoutError: the model has fewer than `count` layers. Also if layers are to leave the CPU, and no other device
        has layers.
    """
    if not 0 <= count <= layout.n_layers:
        raise LayoutError(
            tr(
                "{device} cannot have {count} layers; the model has {n_layers}",
                device=device,
                count=count,
                n_layers=layout.n_layers,
            ),
            location="runs",
        )
    order = list(dict.fromkeys(run.device for run in layout.runs))
    if device not in order:
        # A device that joins gets the last layers, the CPU the first ones, where op offload can compute them.
        order.insert(0 if device == CPU_ID else len(order), device)
    counts = {each: layer_count(layout, each) for each in order}
    missing = count - counts[device]
    if missing < 0 and len(order) == 1:
        if device == CPU_ID:
            raise LayoutError(
                tr("to move layers off the CPU, raise the number of layers on another device"), location="runs"
            )
        order.insert(0, CPU_ID)
        counts[CPU_ID] = 0
    index = order.index(device)
    near = [each for each in (*order[index + 1 :], *reversed(order[:index])) if each != CPU_ID]
    others = [*([CPU_ID] if CPU_ID in order and device != CPU_ID else []), *near]
    counts[device] = count
    for each in others:
        # If layers are removed, `missing` is negative, so the first of `others` gets all of them.
        taken = min(missing, counts[each])
        counts[each] -= taken
        missing -= taken
    made = make_layout(layout.n_layers, [each for each in order for _ in range(counts[each])])
    # Moved run by run, because `made` has no overrides, and the output layer may be on another device.
    moved = layout
    for run in made.runs:
        moved = moved.move_range(run.first, run.last, run.device)
    return moved


def expert_layers(layout: Layout, device: str, with_experts: Sequence[int]) -> tuple[int, ...]:
    """Return the layers whose experts are on a device, among the layers `with_experts` that have experts."""
    return tuple(layer for layer in with_experts if part_device(layout, "experts", layer) == device)


def with_expert_count(layout: Layout, device: str, count: int, with_experts: Sequence[int]) -> tuple[Layout, ...]:
    """Return two layouts with the experts of `count` layers on `device`.

    One layout chooses layers from the first one upwards, the other from the last one downwards. If both layouts are
    equal, one is returned.

    To add experts, layers on `device` are chosen first, then layers on other devices. To remove experts, layers on
    other devices are chosen first, and their experts go to the device of their layer. Then layers on `device` are
    chosen, and their experts go to the CPU.

    `with_experts`: indices of the layers that have experts.

    Raises:
        LayoutError: fewer than `count` layers have experts. Also if `device` is the CPU and `count` is less than the
        number of CPU layers with experts, because their experts cannot leave it.
    """
    held = expert_layers(layout, device, with_experts)
    if not 0 <= count <= len(with_experts):
        raise LayoutError(
            tr(
                "{device} cannot hold the experts of {count} layers; only {total} layers have experts",
                device=device,
                count=count,
                total=len(with_experts),
            ),
            location="overrides",
        )
    if count >= len(held):
        rest = [layer for layer in with_experts if layer not in held]
        own = [layer for layer in rest if layout.device_of(layer) == device]
        others = [layer for layer in rest if layout.device_of(layer) != device]
        added = count - len(held)
        orders = ([*own, *others], [*reversed(own), *reversed(others)])
        return _distinct(place_parts(layout, "experts", dict.fromkeys(order[:added], device)) for order in orders)
    leaving = len(held) - count
    free = [layer for layer in held if device != CPU_ID or layout.device_of(layer) != CPU_ID]
    if leaving > len(free):
        raise LayoutError(
            tr(
                "the CPU keeps the experts of its own {count} layers; move these layers to a device first",
                count=len(held) - len(free),
            ),
            location="overrides",
        )
    foreign = [layer for layer in free if layout.device_of(layer) != device]
    own = [layer for layer in free if layout.device_of(layer) == device]
    return _distinct(
        place_parts(
            layout,
            "experts",
            {
                layer: CPU_ID if layout.device_of(layer) == device else layout.device_of(layer)
                for layer in order[:leaving]
            },
        )
        for order in ([*foreign, *own], [*reversed(foreign), *reversed(own)])
    )


def _distinct(layouts: Iterable[Layout]) -> tuple[Layout, ...]:
    return tuple(dict.fromkeys(layouts))
