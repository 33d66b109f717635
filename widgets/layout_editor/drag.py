"""What the mouse is moving: turns pointer positions into moves, one only where the value changes. No Qt in here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.layout.layout import Layout
from engine.layout.moves import BoundaryMove, OutputMove, RangeMove
from widgets.layout_editor.geometry import Lanes, Track


def boundary_limits(layout: Layout, index: int) -> tuple[int, int]:
    """Return the first and last layer that boundary `index` can be before: each of its runs keeps a layer."""
    return layout.runs[index].first + 1, layout.runs[index + 1].last


@dataclass(slots=True)
class BoundaryDrag:
    """A boundary of the layout at the start; `grab` is how far right of the boundary the pointer took it."""

    layout: Layout
    index: int
    grab: float
    layer: int = field(init=False)

    def __post_init__(self) -> None:
        self.layer = self.layout.runs[self.index + 1].first

    def move_to(self, x: float, track: Track) -> BoundaryMove | None:
        """Return the move to the layer edge nearest to `x`, None where that is no change."""
        low, high = boundary_limits(self.layout, self.index)
        layer = max(low, min(track.boundary_at(x - self.grab), high))
        if layer == self.layer:
            return None
        self.layer = layer
        return BoundaryMove(self.index, layer)


@dataclass(slots=True)
class LaneDrag:
    """Layers (`span`), or the output where it is None, on their way from `lane` to another one.

    It begins once the pointer is `threshold` pixels from where it was pressed, so that a click moves nothing.
    """

    span: tuple[int, int] | None
    lane: int
    start: tuple[float, float]
    devices: Sequence[str | None]
    threshold: float
    begun: bool = False

    def move_to(self, x: float, y: float, lanes: Lanes) -> RangeMove | OutputMove | None:
        """Return the move to the lane at `y`, None where that is no change or no device is."""
        if not self.begun:
            distance = abs(x - self.start[0]) + abs(y - self.start[1])
            self.begun = distance >= self.threshold
        if not self.begun:
            return None
        lane = lanes.nearest_lane(y)
        device = self.devices[lane]
        if lane == self.lane or device is None:
            return None
        self.lane = lane
        return OutputMove(device) if self.span is None else RangeMove(*self.span, device)


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
