"""What each lane holds: which parts of which layers are drawn where, from a layout and its overrides; and pins."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from engine.base.language import tr
from engine.devices.device import CPU_ID, Rig
from engine.planning.layout.layout import Layout, Override
from engine.planning.plan.preview import LayerBytes, Preview

StripKey = Literal["dense", "attention", "ffn", "experts", "kv"]
"""`attention` and `ffn` are the halves of the `dense` strip, used where an override parts them."""

Blocks = tuple[tuple[StripKey, tuple[int, ...]], ...]
"""Layers by strip."""


@dataclass(frozen=True, slots=True)
class LaneDevice:
    """The device of a lane. `present` False: the layout names a device that the rig does not have."""

    id: str
    name: str
    present: bool = True


@dataclass(frozen=True, slots=True)
class LaneContent:
    """What is drawn in the track of one lane. `ghosts` are parts of its layers that live in another lane."""

    device: LaneDevice
    ranges: tuple[tuple[int, int], ...]
    blocks: Blocks
    ghosts: Blocks
    has_embedding: bool
    has_output: bool

    @property
    def is_empty(self) -> bool:
        return not (self.ranges or self.blocks or self.has_output)


def lane_devices(rig: Rig, layout: Layout) -> tuple[LaneDevice, ...]:
    """Return a lane per device of the rig, host last, and one for each device that only the layout knows."""
    known = set(rig.ids)
    named = [run.device for run in layout.runs] + [layout.output_device] + [item.device for item in layout.overrides]
    missing = [device_id for device_id in dict.fromkeys(named) if device_id not in known]
    return (
        *(LaneDevice(device.id, device.name) for device in rig.all_devices),
        *(LaneDevice(device_id, tr("not on this machine"), present=False) for device_id in missing),
    )


def _overridden(overrides: Sequence[Override], part: str, layer: int) -> str | None:
    for override in overrides:
        if override.part not in (part, "all"):
            continue
        first = 0 if override.first is None else override.first
        last = layer if override.last is None else override.last
        if first <= layer <= last:
            return override.device
    return None


def layer_parts(
    layer: LayerBytes, device: str, overrides: Sequence[Override], *, kv_on_device: bool
) -> tuple[tuple[StripKey, str], ...]:
    """Return the parts of `layer` that have bytes, each with the device that really holds it."""
    attention = _overridden(overrides, "attention", layer.index) or device
    ffn = _overridden(overrides, "ffn", layer.index) or device
    parts: list[tuple[StripKey, str]] = []
    if layer.attention_bytes + layer.other_bytes == 0 and layer.ffn_bytes:
        parts.append(("dense", ffn))
    elif layer.ffn_bytes == 0 or attention == ffn:
        parts.append(("dense", attention))
    else:
        parts += [("attention", attention), ("ffn", ffn)]
    if layer.expert_bytes:
        parts.append(("experts", _overridden(overrides, "experts", layer.index) or device))
    if layer.kv_bytes:
        parts.append(("kv", device if kv_on_device else CPU_ID))
    return tuple(parts)


_Found = defaultdict[str, defaultdict[StripKey, list[int]]]


def _freeze(found: defaultdict[StripKey, list[int]]) -> Blocks:
    return tuple((key, tuple(layers)) for key, layers in found.items())


def lane_contents(preview: Preview) -> tuple[LaneContent, ...]:
    """Return what each lane of `preview` holds, in the order of the lanes."""
    layout = preview.layout
    overrides = tuple(item for item in layout.overrides if item.part is not None)
    solid: _Found = defaultdict(lambda: defaultdict(list))
    ghosts: _Found = defaultdict(lambda: defaultdict(list))
    ranges: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for run in layout.runs:
        ranges[run.device].append((run.first, run.last))
        for layer in preview.layers[run.first : run.last + 1]:
            parts = layer_parts(layer, run.device, overrides, kv_on_device=preview.context.offload_kqv)
            for key, device in parts:
                solid[device][key].append(layer.index)
                if device != run.device:
                    ghosts[run.device][key].append(layer.index)
    return tuple(
        LaneContent(
            device=device,
            ranges=tuple(ranges[device.id]),
            blocks=_freeze(solid[device.id]),
            ghosts=_freeze(ghosts[device.id]),
            has_embedding=device.id == CPU_ID,
            has_output=device.id == layout.output_device,
        )
        for device in lane_devices(preview.rig, layout)
    )


@dataclass(frozen=True, slots=True)
class PinnedLayers:
    """Layers `first` to `last`, both included, that stay on `device`."""

    device: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Pins:
    """What is pinned: ranges of layers, and the device of the output layer if that is."""

    layers: tuple[PinnedLayers, ...] = ()
    output: str | None = None

    def device_of(self, layer: int) -> str | None:
        """Return where a layer is pinned to, None where it is free."""
        return next((pin.device for pin in self.layers if pin.first <= layer <= pin.last), None)


NO_PINS = Pins()


@dataclass(frozen=True, slots=True)
class PinToggle:
    """Pin or unpin layers `(first, last)`, both included; None: the output layer."""

    layers: tuple[int, int] | None
