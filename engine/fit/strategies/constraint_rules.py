"""What people may ask of an automatic layout, and a sentence for what makes no sense."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from engine.devices.device import CPU_ID, Rig
from engine.errors import ArgumentError
from engine.fit.strategies.constraints import Constraints


def check_constraints(constraints: Constraints, rig: Rig, n_layers: int) -> None:
    """Refuse constraints that name what is not there, or that contradict each other.

    Raises:
        ArgumentError: with the first fault and its remedy.
    """
    for fault in _faults(constraints, rig, n_layers):
        raise ArgumentError(fault)


def _faults(constraints: Constraints, rig: Rig, n_layers: int) -> Iterator[str]:
    pinned_to = [*(pin.device for pin in constraints.pins), *filter(None, [constraints.output])]
    for device_id in (*constraints.order, *sorted(constraints.off), *pinned_to):
        if rig.device(device_id) is None:
            yield f'There is no device "{device_id[:60]}" here; there are {", ".join(rig.ids)}.'
    if CPU_ID in constraints.off:
        yield "The CPU cannot be switched off: it keeps what no device has room for."
    if CPU_ID in constraints.order:
        yield "The CPU has no place in the order: it keeps what no device has room for. Leave it out."
    for device_id, count in Counter(constraints.order).items():
        if count > 1:
            yield f"{device_id} is in the order twice; name it once."
    for cache_type, count in Counter(constraints.kv_types).items():
        if count > 1:
            yield f"Cache type {cache_type} is allowed twice; name it once."
    for device_id in pinned_to:
        if device_id in constraints.off:
            yield f"{device_id} is switched off and has layers pinned to it; switch it on or release them."
    yield from _pin_faults(constraints, n_layers)


def _pin_faults(constraints: Constraints, n_layers: int) -> Iterator[str]:
    held: dict[int, str] = {}
    for pin in constraints.pins:
        if not 0 <= pin.first <= pin.last < n_layers:
            yield f"Layers {pin.first}-{pin.last} cannot be pinned: the model has layers 0-{n_layers - 1}."
            return
        for index in range(pin.first, pin.last + 1):
            before = held.setdefault(index, pin.device)
            if before != pin.device:
                yield f"Layer {index} is pinned to {before} and to {pin.device}; pin it to one device."
                return
