"""Geometry of the layout editor, without Qt: widths of layers, lanes (a row for each device), columns, drag handles.

A layer is as wide as its bytes. A handle moves the boundary between layers on two devices.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from msgspec import Struct

GAP = 16.0
MIN_LAYER_WIDTH = 3.0
_TRACK_PADDING = 3.0
_END_GAP = 4.0
_MIN_END_WIDTH = 7.0
_MAX_END_SHARE = 0.07
_DRAFT_WIDTH = 18.0
_DRAFT_GAP = 6.0
MIN_PITCH = 60.0
MAX_PITCH = 104.0


def _clamp(value: float, low: float, high: float) -> float:
    return max(low, min(value, high))


class Columns(Struct, frozen=True):
    """Horizontal geometry of a lane's three columns, in scene pixels: label, track of layers, memory bar."""

    label_width: float
    track_left: float
    track_width: float
    bar_left: float
    bar_width: float


def columns(width: float) -> Columns:
    """Return the columns (label, layers, memory bar) of a scene that is `width` pixels wide."""
    label_width = round(_clamp(width * 0.16, 92.0, 152.0))
    bar_width = round(_clamp(width * 0.26, 176.0, 264.0))
    track_left = label_width + GAP / 2
    track_width = max(width - track_left - GAP - bar_width, 40.0)
    return Columns(label_width, track_left, track_width, track_left + track_width + GAP, bar_width)


def layer_widths(sizes: Sequence[int], width: float, minimum: float = MIN_LAYER_WIDTH) -> list[float]:
    """Return widths in pixels that are proportional to `sizes` and add up to `width`.

    Each width is at least `minimum`. If `width` has no room for that, all widths are equal.
    """
    count = len(sizes)
    if count == 0:
        return []
    # More layers than the width has room for share it evenly.
    minimum = min(minimum, width / count)
    narrow = [size <= 0 for size in sizes]
    # Each layer raised to the minimum takes room from the others, which may bring another one below it. Every round
    # that does not return raises at least one layer, so the loop ends.
    while True:
        room = width - minimum * sum(narrow)
        total = sum(size for size, is_narrow in zip(sizes, narrow, strict=True) if not is_narrow)
        if total <= 0:
            return [width / count] * count
        scale = room / total
        added = False
        for index, size in enumerate(sizes):
            if not narrow[index] and size * scale < minimum:
                narrow[index] = added = True
        if not added:
            return [minimum if n else size * scale for size, n in zip(sizes, narrow, strict=True)]


Span = tuple[float, float]


class Track(Struct, frozen=True):
    """Horizontal geometry of the layer column, in scene pixels.

    `edges[i]`: left edge of layer i; `edges[-1]`: right edge of the last layer.
    `embedding`, `output`: left and right edge of these blocks.
    `draft`: left and right edge of the block of a draft model; None if there is none.
    """

    left: float
    right: float
    edges: tuple[float, ...]
    embedding: Span
    output: Span
    draft: Span | None = None

    @property
    def n_layers(self) -> int:
        return len(self.edges) - 1

    def span(self, first: int, last: int) -> Span:
        """Return two x coordinates: the left edge of layer `first`, and the right edge of layer `last`."""
        return self.edges[first], self.edges[last + 1]

    def layer_at(self, x: float) -> int:
        """Return the index of the layer at `x`; the first or last layer if `x` is outside."""
        # Edges ascend, because no layer has a width of 0. `bisect_right`: a layer begins at its left edge.
        return int(_clamp(bisect_right(self.edges, x) - 1, 0, self.n_layers - 1))

    def boundary_at(self, x: float) -> int:
        """Return the index of the layer whose left edge is nearest to `x`; `n_layers` if the right end is nearest."""
        right = min(bisect_right(self.edges, x), self.n_layers)
        left = max(right - 1, 0)
        return right if abs(self.edges[right] - x) < abs(x - self.edges[left]) else left


def make_track(
    sizes: Sequence[int], embedding_bytes: int, output_bytes: int, left: float, width: float, *, draft: bool = False
) -> Track:
    """Return the track with layers of `sizes` bytes between embedding and output.

    Edges of layers are whole pixels if the layers are wide enough.

    `left`, `width`: left edge and width of the track in pixels.
    `draft`: whether a block of a draft model comes after the output. Its width does not depend on its bytes, so that
    its label can be read.
    """
    outer_width, draft_width = width, round(max(width * _MAX_END_SHARE / 2, _DRAFT_WIDTH))
    if draft:
        width -= draft_width + _DRAFT_GAP
    total = max(sum(sizes) + embedding_bytes + output_bytes, 1)
    # The ends are not to scale: a large vocabulary outweighs the layers of a small model (Gemma 3 270M: 170M of its
    # parameters are the token embedding), and only layers can be cut at boundaries.
    most = max(width * _MAX_END_SHARE, _MIN_END_WIDTH)
    embedding = round(_clamp(width * embedding_bytes / total, _MIN_END_WIDTH, most))
    output = round(_clamp(width * output_bytes / total, _MIN_END_WIDTH, most))
    start = left + _TRACK_PADDING + embedding + _END_GAP
    end = left + width - _TRACK_PADDING - output - _END_GAP
    edges = [start]
    for layer_width in layer_widths(sizes, end - start):
        edges.append(edges[-1] + layer_width)
    # Whole pixels look crisp, but where layers are narrow they would make a rhythm of thick and thin ones.
    if end - start >= 6 * len(sizes):
        edges = [float(round(edge)) for edge in edges]
    right = left + outer_width
    return Track(
        left,
        right,
        tuple(edges),
        (left + _TRACK_PADDING, left + _TRACK_PADDING + embedding),
        (left + width - _TRACK_PADDING - output, left + width - _TRACK_PADDING),
        (right - _TRACK_PADDING - draft_width, right - _TRACK_PADDING) if draft else None,
    )


class Strip(Struct, frozen=True):
    """Horizontal stripe of a lane in which one part of layers, such as the experts, is drawn.

    `top`: distance in pixels from the top of the lane's track (the area of its layers).
    """

    top: float
    height: float


class Lanes(Struct, frozen=True):
    """Vertical geometry of the lanes (the layout editor's rows, one for each device), in pixels.

    `pitch`: distance between the tops of two lanes.
    `dense`, `experts`, `kv`: horizontal stripes of each lane, in which these parts of layers are drawn. `experts` is
    None for a model without experts.
    """

    count: int
    pitch: float
    dense: Strip
    experts: Strip | None
    kv: Strip

    @property
    def track_height(self) -> float:
        return self.pitch - 20.0

    @property
    def height(self) -> float:
        return self.count * self.pitch

    def track_top(self, lane: int) -> float:
        """Return the y coordinate of the top of a lane's track (the area of its layers). `lane`: index of the lane."""
        return lane * self.pitch + 10.0

    def lane_at(self, y: float) -> int | None:
        """Return the index of the lane at `y`; None above the first lane and below the last one."""
        lane = int(y // self.pitch) if self.pitch else 0
        return lane if 0 <= lane < self.count else None

    def nearest_lane(self, y: float) -> int:
        """Return the index of the lane at `y`; the first or last lane if `y` is outside."""
        return int(_clamp(y // self.pitch, 0, self.count - 1))


def make_lanes(count: int, height: float, *, experts: bool) -> Lanes:
    """Return the vertical geometry of `count` lanes (rows of devices) that fill a view `height` pixels high.

    The distance from lane to lane is at least `MIN_PITCH` and at most `MAX_PITCH` pixels.
    `experts`: whether the lanes have a strip for experts.
    """
    # Whole pixels, so that every lane has its lines and strips on the same pixel rows. Below the minimum the view
    # scrolls.
    pitch = float(int(_clamp(height / max(count, 1), MIN_PITCH, MAX_PITCH)))
    # Room for the strips: the track's height (`track_height`) without its padding, and without the gaps of 2 pixels
    # between the strips.
    room = pitch - 20.0 - 2 * _TRACK_PADDING - (4.0 if experts else 2.0)
    # Strips are not to scale: the KV cache of a short context would be too thin to see.
    kv = round(room * (0.22 if experts else 0.28))
    dense = round(room * 0.34) if experts else room - kv
    top = _TRACK_PADDING
    if not experts:
        return Lanes(count, pitch, Strip(top, dense), None, Strip(top + dense + 2, kv))
    middle = room - kv - dense
    return Lanes(count, pitch, Strip(top, dense), Strip(top + dense + 2, middle), Strip(top + dense + middle + 4, kv))


class HandleGeometry(Struct, frozen=True):
    """The drag handle of boundary `index`, in scene pixels: a line from `top` to `bottom` at `x`, a dot at `dot_y`.

    `layer`: the first layer at the right of the boundary.
    """

    index: int
    layer: int
    x: float
    top: float
    bottom: float
    dot_y: float


_LINE_REACH = 4.0
_DOT_REACH = 9.0


def handle_at(handles: Sequence[HandleGeometry], x: float, y: float) -> int | None:
    """Return the index of the handle at the point (`x`, `y`); None if no handle is within reach.

    The nearest dot within reach wins, else the nearest line within reach.
    """
    best: tuple[float, int] | None = None
    for handle in handles:
        distance = abs(x - handle.x)
        # The longer of both distances, so a dot's reach is a square. A dot scores 0 to 1 and a line from 1, so that the
        # dot of one boundary wins over the line of another that crosses it.
        if not (distance <= _DOT_REACH and handle.top <= y <= handle.bottom):
            continue
        dot_distance = max(distance, abs(y - handle.dot_y))
        if dot_distance <= _DOT_REACH:
            score = dot_distance / _DOT_REACH
        elif distance <= _LINE_REACH:
            score = 1 + distance
        else:
            continue
        if best is None or score < best[0]:
            best = (score, handle.index)
    return None if best is None else best[1]
