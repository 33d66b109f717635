"""Contents of the editor's lanes (a row for each device): the parts of layers that a layout places on the device.

Also the pins, which fix layers to a device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from engine.base.language import tr
from engine.devices.device import CPU_ID, Device, Rig
from engine.planning.layout.layout import Layout, Override
from engine.planning.layout.parts import EMBEDDING_PATTERN, MovablePart, PartPin, Pin, embedding_device
from engine.planning.plan.preview import LayerBytes, Preview
from engine.planning.plan.report import DeviceRow
from widgets.common.memory_bar import PlacedWeights

StripKey = Literal["dense", "attention", "ffn", "experts", "kv"]
"""A part of layers, which has a horizontal strip in each lane.

`attention` and `ffn` are the upper and lower half of the strip `dense`. They are drawn separately if overrides place
them on different devices.
"""

Blocks = tuple[tuple[StripKey, tuple[int, ...]], ...]
"""The layers that a lane draws in each strip: pairs of the strip and the indices of its layers."""


SliceBlocks = tuple[tuple[StripKey, tuple[tuple[int, float, float], ...]], ...]
"""The slices of layers that a lane draws in each strip: pairs of the strip and its slices (layer, begin, end).

Begin and end are fractions of the layer's width, 0 to 1.
"""


class LaneDevice(Struct, frozen=True):
    """The device that a lane (a row of the editor) stands for.

    `present`: whether the rig has the device. A layout can also name devices that the rig lacks.
    `state`: the reason why nothing can be placed on the device now ("in use", "worker stopped"), shown instead of its
    free memory; empty if it is usable.
    """

    id: str
    name: str
    present: bool = True
    state: str = ""


class MachineGroup(Struct, frozen=True):
    """A machine (paired computer) with several devices. Their lanes (rows of the editor) can be folded.

    When they are folded, a single row stands for the machine: its head lane.

    key: fingerprint of the machine's certificate.
    devices: ids of the machine's devices.
    roomiest: id of the device that has the most free memory with this layout; None if no device can be used. Layers
    that are dropped on the folded machine go to this device.
    is_folded: whether the lanes of the devices are hidden, so that only the head lane is shown.
    """

    key: str
    devices: tuple[str, ...]
    roomiest: str | None
    is_folded: bool


class LaneContent(Struct, frozen=True):
    """What a lane (the layout editor's row for one device) shows between its label and its memory bar.

    ranges: layers `(first, last)` of the device, both included.
    blocks: for each part of layers, such as experts, the layers whose part is on the device.
    ghosts: for each part, the layers of this device whose part is on another device, because an override moves it or
    because the KV cache is in host memory. They are drawn pale.
    has_embedding, has_output: whether the token embedding, and the output layer, are on the device.
    slices: in split modes tensor and row, the slices of layers, drawn instead of `blocks`.
    share: the device's mean share of a split layer; None if the device takes no part in the split.
    group: the machine, if the lane stands for a whole machine; None for the lane of a device.
    has_draft: whether layers of the draft model are on the device.
    """

    device: LaneDevice
    ranges: tuple[tuple[int, int], ...]
    blocks: Blocks
    ghosts: Blocks
    has_embedding: bool
    has_output: bool
    slices: SliceBlocks = ()
    share: float | None = None
    group: MachineGroup | None = None
    has_draft: bool = False

    @property
    def is_empty(self) -> bool:
        return not (self.ranges or self.blocks or self.has_output or self.has_draft)


def lane_devices(rig: Rig, layout: Layout, further: Sequence[str] = ()) -> tuple[LaneDevice, ...]:
    """Return the devices that have a lane: the rig's devices, then the host (CPU), then devices that the rig lacks.

    `further`: ids of more devices that need a lane, such as those of a draft model.
    """
    known = set(rig.ids)
    named = [run.device for run in layout.runs] + [layout.output_device] + [item.device for item in layout.overrides]
    named += further
    missing = [device_id for device_id in dict.fromkeys(named) if device_id not in known]
    return (
        *(LaneDevice(device.id, _lane_name(device), state=_state_words(device)) for device in rig.all_devices),
        *(LaneDevice(device_id, tr("not on this computer"), present=False) for device_id in missing),
    )


def _lane_name(device: Device) -> str:
    # The nodes come first, because the end of a long name is not shown.
    return (
        tr("{count} NUMA nodes of {name}", count=len(device.nodes), name=device.name) if device.nodes else device.name
    )


def _state_words(device: Device) -> str:
    if device.is_stopped:
        return tr("worker stopped")
    if device.away:
        return device.away
    # An RPC server serves one client at a time, so another model's worker has no free memory, however little it holds.
    return tr("in use") if device.is_rpc and device.holdings else ""


def _overridden(overrides: Sequence[Override], part: str, layer: int) -> str | None:
    # The first match wins, as in llama.cpp's list of tensor buffer overrides.
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
    """Return (part, device) for each part of `layer` that has bytes.

    `device`: the device of the layer. A part that has an override is on the device of the override instead.
    `kv_on_device`: whether the KV cache is on that device; if not, it is in host memory.
    """
    # Only tensors of weights are matched by overrides. The KV cache follows the layer's device (`model.dev_layer` in
    # llama-kv-cache.cpp), or is in host memory if `offload_kqv` is off.
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
    """Return the contents of the lanes (the editor's rows for devices) for `preview`, from top to bottom."""
    layout = preview.layout
    # An override with a pattern of its own has no part: which tensors it matches is not known here.
    overrides = tuple(item for item in layout.overrides if item.part is not None)
    solid: _Found = defaultdict(lambda: defaultdict(list))
    ghosts: _Found = defaultdict(lambda: defaultdict(list))
    ranges: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    embedding = embedding_device(layout)
    for run in layout.runs:
        ranges[run.device].append((run.first, run.last))
        for layer in preview.layers[run.first : run.last + 1]:
            parts = layer_parts(layer, run.device, overrides, kv_on_device=preview.context.offload_kqv)
            for key, device in parts:
                solid[device][key].append(layer.index)
                if device != run.device:
                    ghosts[run.device][key].append(layer.index)
    slices, share = _sliced(preview, overrides)
    return tuple(
        LaneContent(
            device=device,
            slices=slices.get(device.id, ()),
            share=share.get(device.id),
            ranges=tuple(ranges[device.id]),
            blocks=_freeze(solid[device.id]),
            ghosts=_freeze(ghosts[device.id]),
            # llama.cpp keeps the input layer on the CPU (`dev_input` in llama-model.cpp), unless an override moves it.
            has_embedding=device.id == embedding,
            has_output=device.id == layout.output_device,
            has_draft=preview.draft is not None and device.id in preview.draft.devices,
        )
        for device in lane_devices(preview.rig, layout, () if preview.draft is None else preview.draft.devices)
    )


def _sliced(preview: Preview, overrides: Sequence[Override]) -> tuple[dict[str, SliceBlocks], dict[str, float]]:
    """Return two mappings by device id: the slices of layers on the device, and its mean share of a layer.

    Only split modes tensor and row slice layers. In other modes both mappings are empty.
    """
    if preview.slices is None:
        return {}, {}
    members = preview.slices.members
    found: defaultdict[str, defaultdict[StripKey, list[tuple[int, float, float]]]]
    found = defaultdict(lambda: defaultdict(list))
    widths: defaultdict[str, float] = defaultdict(float)
    for sliced in preview.slices.layers:
        layer = preview.layers[sliced.index]
        bounds = {"experts": sliced.experts, "ffn": sliced.ffn}
        main = sliced.experts if layer.expert_bytes else sliced.ffn if layer.ffn_bytes else sliced.attention
        for key, device in layer_parts(layer, members[0], overrides, kv_on_device=preview.context.offload_kqv):
            # A part that an override moves is not split.
            ends = bounds.get(key, sliced.attention) if device == members[0] else None
            for index, member in enumerate(members if ends else ()):
                assert ends is not None
                found[member][key].append((layer.index, ends[index], ends[index + 1]))
        for index, member in enumerate(members):
            widths[member] += (main[index + 1] - main[index]) / len(preview.slices.layers)
    blocks = {member: tuple((key, tuple(each)) for key, each in by_key.items()) for member, by_key in found.items()}
    return blocks, dict(widths)


def placed_weights(preview: Preview, content: LaneContent, row: DeviceRow | None) -> PlacedWeights:
    """Return the bytes of all weights, and of experts, that the layout places on the device of `content`.

    They are sums of tensor sizes, except in two cases:
    - In split modes tensor and row, the bytes of experts are estimated: the device's weights times the share of experts
      in the model. The experts on the host (CPU) are summed in these modes too.
    - In these modes, or if an override has a pattern that matches no known part of layers, the bytes of all weights are
      None. For the host they are the weights of the whole model less those of the other devices.

    `row`: memory that the layout needs on the device; None if it is unknown.
    """
    layers = preview.layers
    is_split = preview.layout.split_mode in ("tensor", "row")
    if is_split and content.device.id != CPU_ID:
        model_bytes = sum(layer.weights_bytes for layer in layers)
        experts = sum(layer.expert_bytes for layer in layers)
        held_bytes = 0 if row is None else row.weights_bytes
        return PlacedWeights(expert_bytes=held_bytes * experts // max(model_bytes, 1))
    expert_bytes = sum(
        layers[index].expert_bytes for key, indices in content.blocks if key == "experts" for index in indices
    )
    if is_split or unknown_patterns(preview.layout):
        # Which tensors a pattern matches is not known here. A device has the forecast's weights, and the host the rest.
        if content.device.id != CPU_ID:
            return PlacedWeights(expert_bytes=expert_bytes)
        model_bytes = sum(layer.weights_bytes for layer in layers)
        model_bytes += preview.token_embedding_bytes + preview.output_weights_bytes
        elsewhere_bytes = sum(each.weights_bytes for each in preview.report.rows if each.id != CPU_ID)
        return PlacedWeights(max(model_bytes - elsewhere_bytes, 0), expert_bytes)
    total_bytes = expert_bytes
    for key, indices in content.blocks:
        for index in indices:
            layer = layers[index]
            attention_bytes = layer.attention_bytes + layer.other_bytes
            if key == "dense":
                total_bytes += attention_bytes + layer.ffn_bytes
            elif key in ("attention", "ffn"):
                total_bytes += attention_bytes if key == "attention" else layer.ffn_bytes
    total_bytes += preview.token_embedding_bytes if content.has_embedding else 0
    total_bytes += preview.output_weights_bytes if content.has_output else 0
    return PlacedWeights(total_bytes, expert_bytes)


def unknown_patterns(layout: Layout) -> int:
    """Return the number of overrides whose pattern matches no known part of layers. The editor does not draw them."""
    return sum(1 for item in layout.overrides if item.part is None and item.pattern != EMBEDDING_PATTERN)


class Pins(Struct, frozen=True):
    """The pins of a layout. A pin fixes layers, or a part of them, to a device: automatic layouts do not move them.

    `layers`: pinned ranges of layers.
    `output`: the device of the output layer; None if it is not pinned.
    `parts`: pinned parts of layers.
    """

    layers: tuple[Pin, ...] = ()
    output: str | None = None
    parts: tuple[PartPin, ...] = ()

    def device_of(self, layer: int) -> str | None:
        """Return the device to which a layer is pinned; None if it is not pinned."""
        return next((pin.device for pin in self.layers if pin.first <= layer <= pin.last), None)

    def part_device_of(self, part: MovablePart, layer: int) -> str | None:
        """Return the device to which a part of a layer is pinned; None if it is not pinned."""
        return next((pin.device for pin in self.parts if pin.part == part and pin.first <= layer <= pin.last), None)


NO_PINS = Pins()


class PinToggle(Struct, frozen=True):
    """A request to pin or unpin layers `(first, last)`, both included, or a part of them.

    `layers` is None for the output layer. `part` is None for whole layers and the output.
    """

    layers: tuple[int, int] | None
    part: MovablePart | None = None
