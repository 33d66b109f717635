"""Finds and moves parts of layers, such as experts, that are not on the device of their layer.

A moved part becomes an ordinary override of a range of layers, so that layout files stay readable. Overrides of parts
come before patterns and before overrides of whole layers, because the first match decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Literal

from msgspec import Struct

from engine.base.errors import LayoutError
from engine.base.language import tr
from engine.base.values import replace
from engine.devices.device import CPU_ID
from engine.model.architectures.registry import architecture_rules
from engine.model.gguf.model_file import ModelFile
from engine.planning.layout.layout import Layout, Override
from engine.planning.layout.patterns import OverridePart, pattern_finder

MovablePart = Literal["experts", "dense"]
"""Part of a layer that a user can move; `dense`: attention and feed-forward without the experts."""
MOVABLE_PARTS: Mapping[MovablePart, tuple[OverridePart, ...]] = {"experts": ("experts",), "dense": ("attention", "ffn")}

EMBEDDING = "token_embd.weight"
EMBEDDING_PATTERN = r"^token_embd\.weight$"
_SEPARATE: tuple[OverridePart, ...] = ("experts", "ffn", "attention")
"""Parts that have no tensor in common, so that the order of their overrides does not matter."""


def part_text(part: str) -> str:
    """Return the name of a part in the user's language, such as "dense feed-forward" for "ffn"."""
    return {
        "experts": tr("experts"),
        "dense": tr("non-expert weights"),
        "attention": tr("attention"),
        "ffn": tr("dense feed-forward"),
    }.get(part, part)


def part_device(layout: Layout, part: OverridePart, layer: int) -> str:
    """Return the device of a part of a layer.

    Overrides by regex are ignored; only those of parts and whole layers count.
    """
    return override_device(layout, part, layer) or layout.device_of(layer)


def override_device(layout: Layout, part: OverridePart, layer: int) -> str | None:
    """Return the device to which an override of parts or whole layers moves a part; None if there is no such override.

    `layer`: index of the layer.
    """
    for override in layout.overrides:
        if override.part in (part, "all") and (override.layers is None or layer in override.layers):
            return override.device
    return None


def place_part(layout: Layout, part: MovablePart, first: int, last: int, device: str) -> Layout:
    """Return the layout with a part of layers `first` to `last`, both included, on `device`.

    A part on the device of its layer gets no override, unless a later override would move it.

    Raises:
        LayoutError: there are no such layers.
    """
    if not 0 <= first <= last < layout.n_layers:
        raise LayoutError(
            tr(
                "layers {first}-{last} are not a valid range within 0-{n_layers}",
                first=first,
                last=last,
                n_layers=layout.n_layers - 1,
            ),
            location="overrides",
        )
    for name in MOVABLE_PARTS[part]:
        layout = _placed(layout, name, dict.fromkeys(range(first, last + 1), device))
    return layout


def place_parts(layout: Layout, part: MovablePart, devices: Mapping[int, str]) -> Layout:
    """Return the layout with a part of some layers on new devices; `devices` maps a layer's index to a device id.

    Raises:
        LayoutError: there is no layer with such an index.
    """
    # `place_part` raises the error for an invalid range.
    if devices and not (min(devices) >= 0 and max(devices) < layout.n_layers):
        return place_part(layout, part, min(devices), max(devices), CPU_ID)
    for name in MOVABLE_PARTS[part]:
        layout = _placed(layout, name, devices)
    return layout


def _placed(layout: Layout, part: OverridePart, moved: Mapping[int, str]) -> Layout:
    front, rest = _split(layout)
    devices = _devices(front, part, layout.n_layers) | dict(moved)
    # What is on the device of its layer needs no override, unless a later override would move it.
    caught = any(each.part in (None, "all") for each in rest)
    devices = {layer: device for layer, device in devices.items() if device != layout.device_of(layer) or caught}
    made = [
        override
        for name in _SEPARATE
        for override in _ranges(
            name, devices if name == part else _devices(front, name, layout.n_layers), layout.n_layers
        )
    ]
    made += [each for each in front if each.part is None]
    kept = [piece for each in rest for piece in (_without(each, moved) if each.part == part else (each,))]
    return replace(layout, overrides=(*made, *kept))


def _devices(overrides: Iterable[Override], part: OverridePart, n_layers: int) -> dict[int, str]:
    """Map each layer whose `part` is moved by one of these overrides to the device id of the first such override."""
    devices: dict[int, str] = {}
    for override in overrides:
        if override.part == part:
            for layer in override.layers or range(n_layers):
                # The first match decides, so an earlier override is not replaced by a later one.
                devices.setdefault(layer, override.device)
    return devices


def _split(layout: Layout) -> tuple[tuple[Override, ...], tuple[Override, ...]]:
    """Divide the layout's overrides into two groups: the first ones, whose order does not matter, and the rest.

    The first group ends before the first override of anything but `_SEPARATE` parts and the token embedding. Its order
    does not matter, because no two of its overrides for different parts match the same tensor.
    """
    front = tuple(takewhile(lambda each: each.part in _SEPARATE or each.pattern == EMBEDDING_PATTERN, layout.overrides))
    return front, layout.overrides[len(front) :]


def _ranges(part: OverridePart, devices: Mapping[int, str], n_layers: int) -> list[Override]:
    """Return overrides of a part, one for each range of neighbouring layers; `devices` maps layers to device ids.

    An override that covers all `n_layers` layers has no range.
    """
    ranges: list[Override] = []
    for layer in sorted(devices):
        before = ranges[-1] if ranges else None
        if before is not None and before.last == layer - 1 and before.device == devices[layer]:
            ranges[-1] = replace(before, last=layer)
        else:
            ranges.append(Override(devices[layer], part, layer, layer))
    if len(ranges) == 1 and (ranges[0].first, ranges[0].last) == (0, n_layers - 1):
        return [Override(ranges[0].device, part)]
    return ranges


def _without(override: Override, layers: Iterable[int]) -> list[Override]:
    """Return overrides for the layers of `override` that are not in `layers`.

    An override for all layers is returned unchanged.
    """
    if override.layers is None:
        # An earlier override decides for these layers; one for all layers stays as it was written.
        return [override]
    left = {layer: override.device for layer in override.layers if layer not in set(layers)}
    return _ranges(override.part or "all", left, override.layers.stop + 1)


def ties_embedding(model: ModelFile) -> bool:
    """Return whether the model uses its token embedding as output layer.

    llama.cpp then cannot place the two separately.
    """
    names = {tensor.name for tensor in model.global_tensors}
    return "output.weight" not in names and EMBEDDING in names and architecture_rules(model.architecture).ties_output


def embedding_device(layout: Layout) -> str:
    """Return the device of the token embedding. llama.cpp puts it in host memory unless an override moves it."""
    for override in layout.overrides:
        if override.pattern is not None and pattern_finder(override.pattern)(EMBEDDING):
            return override.device
    return CPU_ID


def place_embedding(layout: Layout, device: str) -> Layout:
    """Return the layout with the token embedding on `device`."""
    bare = replace(layout, overrides=tuple(each for each in layout.overrides if each.pattern != EMBEDDING_PATTERN))
    if embedding_device(bare) == device:
        return bare
    front, rest = _split(bare)
    return replace(bare, overrides=(*front, Override(device, pattern=EMBEDDING_PATTERN), *rest))


class Pin(Struct, frozen=True):
    """A constraint: layers `first` to `last`, both included, must be on `device`."""

    device: str
    first: int
    last: int


class PartPin(Struct, frozen=True):
    """A constraint: one part (such as experts) of layers `first` to `last`, both included, must be on `device`.

    The rest of these layers may be on other devices.
    """

    device: str
    part: MovablePart
    first: int
    last: int

    def is_kept(self, layout: Layout) -> bool:
        """Return whether `layout` meets this constraint; overrides by regex are ignored."""
        return all(
            part_device(layout, name, layer) == self.device
            for name in MOVABLE_PARTS[self.part]
            for layer in range(self.first, min(self.last, layout.n_layers - 1) + 1)
        )
