"""Drags with the mouse: from pointer positions to moves, one for each change of the value. Without Qt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from engine.planning.layout.layout import Layout
from engine.planning.layout.moves import BoundaryMove, EmbeddingMove, OutputMove, PartMove, RangeMove
from engine.planning.layout.parts import MovablePart
from widgets.layout_editor.geometry import Lanes, Track

LaneMove = RangeMove | PartMove | OutputMove | EmbeddingMove


def boundary_limits(layout: Layout, index: int) -> tuple[int, int]:
    """Return the first and last layer before which boundary `index` can be put: each of its runs keeps a layer."""
    return layout.runs[index].first + 1, layout.runs[index + 1].last


@dataclass(slots=True)
class BoundaryDrag:
    """A drag of boundary `index`.

    layout: the layout at the start of the drag.
    grab: distance in pixels from the boundary to the pointer at the start.
    layer: the layer before which the boundary is now.
    """

    layout: Layout
    index: int
    grab: float
    layer: int = field(init=False)

    def __post_init__(self) -> None:
        self.layer = self.layout.runs[self.index + 1].first

    def move_to(self, x: float, track: Track) -> BoundaryMove | None:
        """Return the move to the layer edge nearest to `x`, or None if the boundary is there already."""
        low, high = boundary_limits(self.layout, self.index)
        # Without `grab` the boundary would jump to the pointer when a handle is pressed beside its line.
        layer = max(low, min(track.boundary_at(x - self.grab), high))
        # One move for each change: the pointer moves hundreds of times a second, the boundary a few times.
        if layer == self.layer:
            return None
        self.layer = layer
        return BoundaryMove(self.index, layer)


@dataclass(slots=True)
class LaneDrag:
    """A drag of layers (`span`; None: the output), or of a part of them, from `lane` to another lane.

    `part`: None for whole layers; "embedding" with a `span` of None: the token embedding.

    It begins once the pointer is `threshold` pixels from where it was pressed, so that a click moves nothing.
    """

    span: tuple[int, int] | None
    lane: int
    start: tuple[float, float]
    devices: Sequence[str | None]
    threshold: float
    begun: bool = False
    part: MovablePart | Literal["embedding"] | None = None

    def move_to(self, x: float, y: float, lanes: Lanes) -> LaneMove | None:
        """Return the move to the lane at `y`, or None if nothing would change or the device is not in the rig."""
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
            return EmbeddingMove(device) if self.part == "embedding" else OutputMove(device)
        if self.part is None or self.part == "embedding":
            return RangeMove(*self.span, device)
        return PartMove(self.part, *self.span, device)


@dataclass(slots=True)
class SelectDrag:
    """A range of layers drawn over the empty part of a lane."""

    anchor: int
    start: tuple[float, float]
    threshold: float
    begun: bool = False

    def span_to(self, x: float, track: Track) -> tuple[int, int] | None:
        """Return the layers between the start and `x`, None before the pointer has moved."""
        self.begun = self.begun or abs(x - self.start[0]) >= self.threshold
        if not self.begun:
            return None
        layer = track.layer_at(x)
        return min(self.anchor, layer), max(self.anchor, layer)


Drag = BoundaryDrag | LaneDrag | SelectDrag
