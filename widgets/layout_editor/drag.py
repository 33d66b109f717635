"""Mouse drags: conversion of pointer positions to moves of the layout. No Qt.

A pointer position becomes a move only if it puts the dragged object on another layer or lane than before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from engine.planning.layout.layout import Layout
from engine.planning.layout.moves import BoundaryMove, DraftMove, EmbeddingMove, OutputMove, PartMove, RangeMove
from engine.planning.layout.parts import MovablePart
from widgets.layout_editor.geometry import Lanes, Track

LaneMove = RangeMove | PartMove | OutputMove | EmbeddingMove | DraftMove


def boundary_limits(layout: Layout, index: int) -> tuple[int, int]:
    """Return the lowest and the highest layer that boundary `index` can be moved to.

    The boundary is at the left edge of that layer. The device on each side of the boundary keeps at least one layer.
    """
    return layout.runs[index].first + 1, layout.runs[index + 1].last


class BoundaryDrag(Struct):
    """A drag of boundary `index` between the layers of two devices.

    layout: the layout at the start of the drag.
    grab: distance in pixels from the boundary to the pointer at the start.
    layer: the layer that is now the first one right of the boundary.
    """

    layout: Layout
    index: int
    grab: float
    layer: int = 0

    def __post_init__(self) -> None:
        self.layer = self.layout.runs[self.index + 1].first

    def move_to(self, x: float, track: Track) -> BoundaryMove | None:
        """Return the move of the boundary to the layer edge nearest to `x`; None if the boundary is already there."""
        low, high = boundary_limits(self.layout, self.index)
        # Without `grab` the boundary would jump to the pointer when a handle is pressed beside its line.
        layer = max(low, min(track.boundary_at(x - self.grab), high))
        # One move for each change: the pointer moves hundreds of times a second, the boundary a few times.
        if layer == self.layer:
            return None
        self.layer = layer
        return BoundaryMove(self.index, layer)


class LaneDrag(Struct):
    """A drag of whole layers, a part of layers, the output, the token embedding or the draft to another lane.

    `span`: the first and last layer; None for the output, the embedding and the draft.
    `lane`: the lane where the dragged object is now.
    `start`: the point where the button was pressed. `threshold`: distance in pixels from it at which the drag begins.
    `devices`: for each lane the device that gets the dropped object; None if the lane accepts none.
    `part`: the dragged part of layers, the embedding or the draft; None for whole layers and the output.
    """

    span: tuple[int, int] | None
    lane: int
    start: tuple[float, float]
    devices: Sequence[str | None]
    threshold: float
    begun: bool = False
    part: MovablePart | Literal["embedding", "draft"] | None = None

    def move_to(self, x: float, y: float, lanes: Lanes) -> LaneMove | None:
        """Return the move that takes the dragged object to the lane at the pointer position (`x`, `y`).

        Return None if the drag has not begun, the object is already in that lane, or the rig lacks the lane's device.
        """
        if not self.begun:
            # The Manhattan length, which Qt compares with `QApplication.startDragDistance` too.
            distance = abs(x - self.start[0]) + abs(y - self.start[1])
            self.begun = distance >= self.threshold
        if not self.begun:
            return None
        lane = lanes.nearest_lane(y)
        device = self.devices[lane]
        # `lane` is the one last reported, so that a drag back to the first lane is a move as well.
        if lane == self.lane or device is None:
            return None
        self.lane = lane
        if self.span is None:
            if self.part == "draft":
                return DraftMove(device)
            return EmbeddingMove(device) if self.part == "embedding" else OutputMove(device)
        if self.part == "experts" or self.part == "dense":  # noqa: PLR1714 - mypy narrows by comparison only
            return PartMove(self.part, *self.span, device)
        return RangeMove(*self.span, device)


class SelectDrag(Struct):
    """A drag over an empty part of a lane, which selects a range of layers from the layer `anchor`."""

    anchor: int
    start: tuple[float, float]
    threshold: float
    begun: bool = False

    def span_to(self, x: float, track: Track) -> tuple[int, int] | None:
        """Return the first and last layer of the range from `anchor` to the layer at `x`.

        Return None until the pointer has moved `threshold` pixels.
        """
        self.begun = self.begun or abs(x - self.start[0]) >= self.threshold
        if not self.begun:
            return None
        layer = track.layer_at(x)
        return min(self.anchor, layer), max(self.anchor, layer)


Drag = BoundaryDrag | LaneDrag | SelectDrag
