"""A preview (a plan as the editor draws it) with its geometry, and a function that finds the part at a point."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from PySide6.QtCore import QRectF

from engine.planning.layout.layout import Run
from engine.planning.layout.parts import MovablePart
from engine.planning.plan.placement_check import DeviceDifference
from engine.planning.plan.preview import Preview
from widgets.layout_editor.geometry import Columns, HandleGeometry, Lanes, Track, handle_at
from widgets.layout_editor.lane import LaneValues, strip_of
from widgets.layout_editor.placement import LaneContent, MachineGroup, StripKey
from widgets.layout_editor.texts import LoadedTexts


class HandleTarget(Struct, frozen=True):
    """What is under the mouse pointer: the drag handle of boundary `index` between the layers of two devices."""

    index: int


class LayerTarget(Struct, frozen=True):
    """What is under the mouse pointer: a layer, in the lane of the device that holds it."""

    layer: int
    lane: int


class PartTarget(Struct, frozen=True):
    """What is under the mouse pointer: a part of a layer that can be moved alone.

    It is either the layer's experts, or its dense part if an override puts the dense part on another device than the
    layer.
    """

    layer: int
    lane: int
    part: MovablePart


class OutputTarget(Struct, frozen=True):
    """What is under the mouse pointer: the output block."""


class EmbeddingTarget(Struct, frozen=True):
    """What is under the mouse pointer: the token embedding, if it can be moved."""


class DraftTarget(Struct, frozen=True):
    """What is under the mouse pointer: the block of the draft model in `lane`."""

    lane: int


class EmptyTarget(Struct, frozen=True):
    """What is under the mouse pointer: a point in the layer area of `lane` where nothing can be dragged.

    part_layer: index of the layer at this point, if parts of it are on the lane's device but the layer itself is on
    another device; else None.
    embedding: whether the token embedding is at this point, and cannot be moved.
    """

    lane: int
    part_layer: int | None
    embedding: bool = False


class BarTarget(Struct, frozen=True):
    """What is under the mouse pointer: the memory bar or the label of `lane`."""

    lane: int


Target = (
    HandleTarget | LayerTarget | PartTarget | OutputTarget | EmbeddingTarget | DraftTarget | EmptyTarget | BarTarget
)


def lanes_of(contents: Sequence[LaneContent]) -> dict[str, int]:
    """Return the index of the lane of each device, by device id.

    `contents`: contents of all lanes, from top to bottom.

    The devices of a folded machine have no lanes of their own: their index is that of the machine's head lane.
    """
    found: dict[str, int] = {}
    for lane, content in enumerate(contents):
        if content.group is None:
            found[content.device.id] = lane
        elif content.group.is_folded:
            found |= dict.fromkeys(content.group.devices, lane)
    return found


def _drop_device(content: LaneContent) -> str | None:
    if content.group is not None:
        return content.group.roomiest if content.group.is_folded else None
    return content.device.id if content.device.present else None


class PreviewGeometry(Struct, frozen=True):
    """A preview (a plan as the editor draws it) with the geometry of its lanes, layers and handles.

    The geometry is in scene coordinates.

    `state`: whether the layout is loaded, as text.
    `contents`: the layers of each lane. `values`: all values that each lane shows.
    `elsewhere`: layers, KV caches and output that are on another device than the layout asks for, if the preview is
    loaded.
    """

    preview: Preview
    state: LoadedTexts
    contents: tuple[LaneContent, ...]
    columns: Columns
    lanes: Lanes
    track: Track
    handles: tuple[HandleGeometry, ...]
    values: tuple[LaneValues, ...]
    elsewhere: tuple[DeviceDifference, ...] = ()

    @property
    def lane_of(self) -> dict[str, int]:
        return lanes_of(self.contents)

    def run_at(self, layer: int) -> Run:
        """Return the run (neighbouring layers on one device) that holds `layer`."""
        return next(run for run in self.preview.layout.runs if run.first <= layer <= run.last)

    def lane_of_layer(self, layer: int) -> int:
        """Return the index of the lane of the device that holds `layer`."""
        return self.lane_of[self.run_at(layer).device]

    def drop_devices(self, lane: int | None = None, home: str | None = None) -> tuple[str | None, ...]:
        """Return for each lane the id of the device that gets an object dropped there; None if nothing can be dropped.

        Lanes that accept nothing: the lane of a device that the rig lacks, and the head lane of an unfolded machine
        (a paired computer whose devices have lanes of their own).

        `lane`: the lane in which the drag begins.
        `home`: the device of the dragged object. If `lane` is a head lane, an object that is dropped there again stays
        on this device.
        """
        found = [_drop_device(content) for content in self.contents]
        # A drag that ends where it began must not move the object to the roomiest device of the machine.
        if lane is not None and home is not None and self.contents[lane].group is not None:
            found[lane] = home
        return tuple(found)

    def destinations(self) -> tuple[str, ...]:
        """Return the ids of all devices that accept layers, from top to bottom, also those of folded machines."""
        found: list[str] = []
        for content in self.contents:
            if content.group is not None:
                found += content.group.devices if content.group.is_folded else ()
            elif content.device.present:
                found.append(content.device.id)
        return tuple(found)

    def group_of(self, device: str) -> MachineGroup | None:
        """Return the group (one paired computer's lanes) that contains a device; None if the device is in no group."""
        groups = (content.group for content in self.contents)
        return next((group for group in groups if group is not None and device in group.devices), None)

    def block_rect(self, lane: int, first: int, last: int) -> QRectF:
        """Return the rectangle of layers `first` to `last` in `lane`, in scene coordinates."""
        left, right = self.track.span(first, last)
        return QRectF(left - 1, self.lanes.track_top(lane) + 1, right - left + 1, self.lanes.track_height - 2)

    def span_rects(self, first: int, last: int) -> tuple[QRectF, ...]:
        """Return rectangles that cover layers `first` to `last`, in scene coordinates.

        There is one rectangle for each run (neighbouring layers on one device).
        """
        lane_of = self.lane_of
        return tuple(
            self.block_rect(lane_of[run.device], max(run.first, first), min(run.last, last))
            for run in self.preview.layout.runs
            if run.first <= last and run.last >= first
        )

    @property
    def embedding_lane(self) -> int:
        """Index of the lane that holds the token embedding."""
        return next(lane for lane, content in enumerate(self.contents) if content.has_embedding)

    def embedding_rect(self) -> QRectF:
        """Return the rectangle of the token embedding, in scene coordinates."""
        left, right = self.track.embedding
        top = self.lanes.track_top(self.embedding_lane)
        return QRectF(left, top + 3, right - left, self.lanes.track_height - 6)

    def has_part(self, part: MovablePart, first: int, last: int) -> bool:
        """Return whether any of layers `first` to `last` has weights in `part`, such as the experts."""
        layers = self.preview.layers[first : last + 1]
        if part == "experts":
            return any(layer.expert_bytes for layer in layers)
        return any(layer.attention_bytes + layer.ffn_bytes for layer in layers)

    def part_lane(self, part: MovablePart, layer: int) -> int:
        """Return the index of the lane in which a part of a layer is drawn.

        If the layer has no such part, it is the lane of the layer.
        """
        keys = _KEYS[part]
        return next(
            (
                lane
                for lane, content in enumerate(self.contents)
                if any(key in keys and layer in layers for key, layers in content.blocks)
            ),
            self.lane_of_layer(layer),
        )

    def part_rect(self, lane: int, part: MovablePart, layer: int) -> QRectF:
        """Return the rectangle of a part of a layer in `lane`, in scene coordinates."""
        strip = strip_of(part, self.lanes)
        left, right = self.track.span(layer, layer)
        return QRectF(left - 1, self.lanes.track_top(lane) + strip.top, right - left + 1, strip.height)

    def track_rect(self, lane: int) -> QRectF:
        """Return the rectangle of the track of `lane` (between label and memory bar), in scene coordinates."""
        track = self.track
        return QRectF(track.left, self.lanes.track_top(lane), track.right - track.left, self.lanes.track_height)

    def output_rect(self) -> QRectF:
        """Return the rectangle of the output block, in scene coordinates."""
        left, right = self.track.output
        lane = self.lane_of[self.preview.layout.output_device]
        return QRectF(left, self.lanes.track_top(lane) + 3, right - left, self.lanes.track_height - 6)

    @property
    def draft_lane(self) -> int | None:
        """Index of the first lane that holds the draft model; None if there is none."""
        return next((lane for lane, content in enumerate(self.contents) if content.has_draft), None)

    def draft_rect(self, lane: int) -> QRectF:
        """Return the rectangle of the draft model's block in `lane`, in scene coordinates; empty if there is none."""
        left, right = self.track.draft or (0.0, 0.0)
        return QRectF(left, self.lanes.track_top(lane) + 3, right - left, self.lanes.track_height - 6)

    def target_at(self, x: float, y: float) -> Target | None:
        """Return the pointer target at a point of the scene, such as a layer; None outside of all lanes."""
        # Handles come first: they overlap the layers at both sides.
        index = handle_at(self.handles, x, y)
        if index is not None:
            return HandleTarget(index)
        # The output may be 7 pixels wide; the reach of 3 on both sides makes it easier to take.
        if self.output_rect().adjusted(-3, 0, 3, 0).contains(x, y):
            return OutputTarget()
        lane = self.lanes.lane_at(y)
        if lane is None:
            return None
        if not self.track.left <= x <= self.track.right:
            return BarTarget(lane)
        content = self.contents[lane]
        if content.has_draft and self.draft_rect(lane).adjusted(-2, 0, 2, 0).contains(x, y):
            return DraftTarget(lane)
        if self.track.edges[0] <= x < self.track.edges[-1]:
            layer = self.track.layer_at(x)
            part = self._part_at(layer, lane, y - self.lanes.track_top(lane))
            if part is not None:
                return PartTarget(layer, lane, part)
            if any(first <= layer <= last for first, last in content.ranges):
                return LayerTarget(layer, lane)
            has_part = any(layer in layers for _, layers in content.blocks)
            return EmptyTarget(lane, layer if has_part else None)
        # Left of the layers is the token embedding. An embedding that is the output layer too cannot be moved.
        embedding = content.has_embedding and x <= self.track.embedding[1] + 2
        if embedding and self.preview.embedding_moves:
            return EmbeddingTarget()
        return EmptyTarget(lane, None, embedding=embedding)

    def _part_at(self, layer: int, lane: int, height: float) -> MovablePart | None:
        """Return the part of `layer` that is drawn `height` pixels below the track's top, if it can be moved alone."""
        content = self.contents[lane]
        is_home = any(first <= layer <= last for first, last in content.ranges)
        for key, layers in content.blocks:
            strip = strip_of(key, self.lanes)
            # The KV cache stays on the device of its layer: llama.cpp's overrides are for weights only.
            if key == "kv" or not strip.top <= height <= strip.top + strip.height or layer not in layers:
                continue
            if key == "experts":
                return "experts"
            # In the layer's own lane its dense part stands for the layer.
            return None if is_home else "dense"
        return None


_KEYS: dict[MovablePart, tuple[StripKey, ...]] = {"experts": ("experts",), "dense": ("dense", "attention", "ffn")}
