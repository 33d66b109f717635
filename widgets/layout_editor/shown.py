"""A preview with the places of all its parts in the scene, and the search for the part at a point."""

from __future__ import annotations

from dataclasses import dataclass

from PySide6.QtCore import QRectF

from engine.planning.layout.layout import Run
from engine.planning.plan.preview import Preview
from widgets.layout_editor.geometry import Columns, HandlePlace, Lanes, Track, handle_at
from widgets.layout_editor.lane import LaneValues
from widgets.layout_editor.placement import LaneContent
from widgets.layout_editor.texts import LoadedWords


@dataclass(frozen=True, slots=True)
class HandleTarget:
    """The handle of boundary `index`."""

    index: int


@dataclass(frozen=True, slots=True)
class LayerTarget:
    """A layer in the lane of its own device."""

    layer: int
    lane: int


@dataclass(frozen=True, slots=True)
class OutputTarget:
    """The output block."""


@dataclass(frozen=True, slots=True)
class EmptyTarget:
    """An empty place in the track of `lane`.

    part_layer: layer of another device whose overridden parts are drawn there; None if there is none.
    embedding: the place is at the token embedding.
    """

    lane: int
    part_layer: int | None
    embedding: bool = False


@dataclass(frozen=True, slots=True)
class BarTarget:
    """The memory bar of `lane`, or its label."""

    lane: int


Target = HandleTarget | LayerTarget | OutputTarget | EmptyTarget | BarTarget


@dataclass(frozen=True, slots=True)
class Shown:
    """A preview with the places of its lanes, layers and handles, in scene coordinates."""

    preview: Preview
    state: LoadedWords
    contents: tuple[LaneContent, ...]
    columns: Columns
    lanes: Lanes
    track: Track
    handles: tuple[HandlePlace, ...]
    values: tuple[LaneValues, ...]

    @property
    def lane_of(self) -> dict[str, int]:
        return {content.device.id: lane for lane, content in enumerate(self.contents)}

    def run_at(self, layer: int) -> Run:
        """Return the run that holds `layer`."""
        return next(run for run in self.preview.layout.runs if run.first <= layer <= run.last)

    def lane_of_layer(self, layer: int) -> int:
        """Return the lane of the device that holds `layer`."""
        return self.lane_of[self.run_at(layer).device]

    def drop_devices(self) -> tuple[str | None, ...]:
        """Return the device of each lane; None for lanes that take no layers, because the rig lacks the device."""
        return tuple(content.device.id if content.device.present else None for content in self.contents)

    def block_rect(self, lane: int, first: int, last: int) -> QRectF:
        """Return the rectangle of layers `first` to `last` in `lane`, in scene coordinates."""
        left, right = self.track.span(first, last)
        return QRectF(left - 1, self.lanes.track_top(lane) + 1, right - left + 1, self.lanes.track_height - 2)

    def span_rects(self, first: int, last: int) -> tuple[QRectF, ...]:
        """Return a rectangle for each run that has layers of `first` to `last`."""
        lane_of = self.lane_of
        return tuple(
            self.block_rect(lane_of[run.device], max(run.first, first), min(run.last, last))
            for run in self.preview.layout.runs
            if run.first <= last and run.last >= first
        )

    def track_rect(self, lane: int) -> QRectF:
        """Return the whole track of `lane`."""
        track = self.track
        return QRectF(track.left, self.lanes.track_top(lane), track.right - track.left, self.lanes.track_height)

    def output_rect(self) -> QRectF:
        """Return the rectangle of the output block."""
        left, right = self.track.output
        lane = self.lane_of[self.preview.layout.output_device]
        return QRectF(left, self.lanes.track_top(lane) + 3, right - left, self.lanes.track_height - 6)

    def target_at(self, x: float, y: float) -> Target | None:
        """Return the part at a point of the scene, None outside of all lanes."""
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
        if self.track.edges[0] <= x < self.track.edges[-1]:
            layer = self.track.layer_at(x)
            if any(first <= layer <= last for first, last in content.ranges):
                return LayerTarget(layer, lane)
            has_part = any(layer in layers for _, layers in content.blocks)
            return EmptyTarget(lane, layer if has_part else None)
        # Left of the layers is the token embedding, which has a tooltip and cannot be moved.
        return EmptyTarget(lane, None, embedding=content.has_embedding and x <= self.track.embedding[1] + 2)
