"""`Constraints`: limits on the layouts that a strategy may find, and their validation. `AutoLayout`: a found layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import ClassVar

from msgspec import Struct

from engine.base.cancellation import CancelToken
from engine.base.errors import ArgumentError, CancelledError
from engine.base.language import tr
from engine.base.values import ComparedWithout, replace
from engine.devices.device import CPU_ID, Rig
from engine.planning.layout.layout import Layout
from engine.planning.layout.parts import PartPin, Pin, part_text, place_part
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.memory.side_files import NO_SIDE_FILES, SideFiles
from engine.planning.settings.context_settings import ContextSettings, KvType
from engine.planning.speed.speeds import NO_MEASUREMENTS, Speeds


class SearchLimit:
    """Counter of the layouts that a search has tried, which can also cancel the search.

    `token`: cancel token of the search.
    `on_tried`: function that is called with the number of layouts, in the thread of the search.
    """

    def __init__(self, token: CancelToken | None = None, on_tried: Callable[[int], None] | None = None) -> None:
        self.n_tried = 0
        self._token = token
        self._on_tried = on_tried

    @property
    def is_over(self) -> bool:
        """Whether the search was cancelled.

        The estimate of a layout checks this value as well, because one estimate may take seconds.
        """
        return self._token is not None and self._token.cancelled

    def step(self) -> None:
        """Count one more layout that the search is about to try, and call `on_tried` with the new number.

        Raises:
            CancelledError: the search was cancelled.
        """
        if self.is_over:
            raise CancelledError(tr("The search for a layout was cancelled."))
        self.n_tried += 1
        if self._on_tried is not None:
            self._on_tried(self.n_tried)


class Constraints(ComparedWithout, frozen=True):
    """Limits on the layouts that a strategy may find.

    Margins are not included; they are in the rig (`Device.margin_bytes`).

    `order`: device ids, the preferred first; other devices follow in the order of the rig.
    `off`: ids of devices that must not be used.
    `pins`: layers that must be on a given device.
    `output`: id of the device of the output layer; None for any device.
    `split`: whether several devices are to be used even if one holds everything.
    `kv_types`: KV cache types that strategy "context" may choose, the preferred first; empty: only the type in the
    settings.
    `max_ctx`: longest context for strategy "context", in tokens; None for the trained length.
    `side_files`: files loaded with the model.
    `speeds`: measured speeds, for strategy "fastest".
    `watch`: counts the tried layouts and can cancel the search; None if neither is needed.
    `one_backend`: whether all devices must be of one backend.
    `parts`: parts of layers that must be on a given device.
    """

    # It belongs to one search, and is no limit on its result.
    not_compared: ClassVar[str] = "watch"
    order: tuple[str, ...] = ()
    off: frozenset[str] = frozenset()
    pins: tuple[Pin, ...] = ()
    output: str | None = None
    split: bool = False
    kv_types: tuple[KvType, ...] = ()
    max_ctx: int | None = None
    side_files: SideFiles = NO_SIDE_FILES
    speeds: Speeds = NO_MEASUREMENTS
    watch: SearchLimit | None = None
    one_backend: bool = False
    parts: tuple[PartPin, ...] = ()

    def with_parts(self, layout: Layout) -> Layout:
        """Return `layout` with overrides that put the pinned parts on their devices."""
        for pin in self.parts:
            layout = place_part(layout, pin.part, pin.first, min(pin.last, layout.n_layers - 1), pin.device)
        return layout

    def off_beside(self, layout: Layout, rig: Rig) -> frozenset[str]:
        """Return the ids of the devices that must not be used when `layout` is changed.

        With `one_backend`, all devices of backends that the layout does not use are included too.
        """
        used = {device.backend for device in rig.devices if device.id in layout.devices}
        if not self.one_backend or not used:
            return self.off
        return self.off | {device.id for device in rig.devices if device.backend not in used}

    def kept_by(self, layout: Layout) -> Constraints:
        """Return the constraints without the pins that `layout` breaks: moving a pinned layer removes its pin."""
        held = ((pin.device, range(pin.first, pin.last + 1)) for pin in self.pins)
        pins = tuple(
            Pin(device, layer, layer)
            for device, layers in held
            for layer in layers
            if layout.device_of(layer) == device
        )
        output = self.output if self.output == layout.output_device else None
        parts = tuple(
            PartPin(pin.device, pin.part, layer, layer)
            for pin in self.parts
            for layer in range(pin.first, pin.last + 1)
            if PartPin(pin.device, pin.part, layer, layer).is_kept(layout)
        )
        return replace(self, pins=pins, output=output, parts=parts)


NO_CONSTRAINTS = Constraints()


class AutoLayout(Struct, frozen=True):
    """A layout found by a strategy.

    `context`: settings that the layout was planned with.
    `explanation`: one or two sentences for the user on why this layout was chosen.
    `fits`: whether the layout is forecast to fit.
    """

    layout: Layout
    context: ContextSettings
    explanation: str
    fits: bool = False


Strategy = Callable[[ModelMemory, Rig, ContextSettings, Constraints], AutoLayout]


def pinned_backends(constraints: Constraints, rig: Rig) -> tuple[str, ...]:
    """Return the names of the backends of devices with pinned layers, each once, without the CPU."""
    pins: tuple[Pin | PartPin, ...] = (*constraints.pins, *constraints.parts)
    pinned_to = {*(pin.device for pin in pins), constraints.output}
    return tuple(dict.fromkeys(device.backend for device in rig.devices if device.id in pinned_to))


def check_constraints(constraints: Constraints, rig: Rig, n_layers: int) -> None:
    """Check that all named devices and layers exist, and that no two constraints contradict each other.

    Raises:
        ArgumentError: the first fault, with its remedy.
    """
    for fault in _faults(constraints, rig, n_layers):
        raise ArgumentError(fault)


def _faults(constraints: Constraints, rig: Rig, n_layers: int) -> Iterator[str]:
    pins: tuple[Pin | PartPin, ...] = (*constraints.pins, *constraints.parts)
    pinned_to = [*(pin.device for pin in pins), *filter(None, [constraints.output])]
    for device_id in (*constraints.order, *sorted(constraints.off), *pinned_to):
        if rig.device(device_id) is None:
            yield tr(
                'There is no device "{device_id}" here; the devices are {names}.',
                device_id=device_id[:60],
                names=", ".join(rig.ids),
            )
    if CPU_ID in constraints.off:
        yield tr("The CPU cannot be excluded: it holds the layers that fit on no other device. Do not exclude the CPU.")
    if CPU_ID in constraints.order:
        yield tr(
            "The CPU cannot be in the device order: it gets the layers that fit on no other device. Leave the CPU "
            "out of the order."
        )
    for device_id, count in Counter(constraints.order).items():
        if count > 1:
            yield tr("{device_id} is in the device order twice; list the device once.", device_id=device_id)
    for cache_type, count in Counter(constraints.kv_types).items():
        if count > 1:
            yield tr("Cache type {cache_type} is listed twice; list the type once.", cache_type=cache_type)
    for device_id in pinned_to:
        if device_id in constraints.off:
            yield tr(
                "{device_id} is excluded but has pinned layers; allow the device or unpin the layers.",
                device_id=device_id,
            )
    backends = pinned_backends(constraints, rig)
    if constraints.one_backend and len(backends) > 1:
        yield tr(
            "Layers are pinned to devices of {names}, but only one backend may be used; pin the layers to "
            "devices of one backend.",
            names=" and ".join(backends),
        )
    yield from _pin_errors(constraints, n_layers)
    yield from _part_errors(constraints, n_layers)


def _pin_errors(constraints: Constraints, n_layers: int) -> Iterator[str]:
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
                    "Layer {index} is pinned to both {before} and {device}; pin the layer to one device only.",
                    index=index,
                    before=before,
                    device=pin.device,
                )
                return


def _part_errors(constraints: Constraints, n_layers: int) -> Iterator[str]:
    held: dict[tuple[str, int], str] = {}
    for pin in constraints.parts:
        if not 0 <= pin.first <= pin.last < n_layers:
            yield tr(
                "The {part} of layers {first}-{last} cannot be pinned: the model has layers 0-{n_layers}.",
                part=part_text(pin.part),
                first=pin.first,
                last=pin.last,
                n_layers=n_layers - 1,
            )
            return
        for index in range(pin.first, pin.last + 1):
            before = held.setdefault((pin.part, index), pin.device)
            if before != pin.device:
                yield tr(
                    "Two devices are given for the {part} of layer {index}: {before} and {device}; name one device.",
                    part=part_text(pin.part),
                    index=index,
                    before=before,
                    device=pin.device,
                )
                return
