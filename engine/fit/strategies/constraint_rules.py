"""What people may ask of an automatic layout, and a sentence for what makes no sense."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from engine.devices.device import CPU_ID, Rig
from engine.errors import ArgumentError
from engine.fit.strategies.constraints import Constraints
from engine.language import tr


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
            yield tr(
                'There is no device "{device_id}" here; there are {names}.',
                device_id=device_id[:60],
                names=", ".join(rig.ids),
            )
    if CPU_ID in constraints.off:
        yield tr("The CPU cannot be switched off: it keeps what no device has room for.")
    if CPU_ID in constraints.order:
        yield tr("The CPU has no place in the order: it keeps what no device has room for. Leave it out.")
    for device_id, count in Counter(constraints.order).items():
        if count > 1:
            yield tr("{device_id} is in the order twice; name it once.", device_id=device_id)
    for cache_type, count in Counter(constraints.kv_types).items():
        if count > 1:
            yield tr("Cache type {cache_type} is allowed twice; name it once.", cache_type=cache_type)
    for device_id in pinned_to:
        if device_id in constraints.off:
            yield tr(
                "{device_id} is switched off and has layers pinned to it; switch it on or release them.",
                device_id=device_id,
            )
    yield from _pin_faults(constraints, n_layers)


def _pin_faults(constraints: Constraints, n_layers: int) -> Iterator[str]:
    held: dict[int, str] = {}
    for pin in constraints.pins:
        if not 0 <= pin.first <= pin.last < n_layers:
            yield tr(
                "Layers {first}-{last} cannot be pinned: the model has layers 0-{n_layers}.",
                first=pin.first,
                last=pin.last,
                n_layers=n_layers - 1,
            )
            return
        for index in range(pin.first, pin.last + 1):
            before = held.setdefault(index, pin.device)
            if before != pin.device:
                yield tr(
                    "Layer {index} is pinned to {before} and to {device}; pin it to one device.",
                    index=index,
                    before=before,
                    device=pin.device,
                )
                return
