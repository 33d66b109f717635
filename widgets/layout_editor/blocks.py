"""Shapes of the layers' parts: one painter path per strip of a lane, built when the lane changes and filled at once."""

from __future__ import annotations

from collections.abc import Iterable

from PySide6.QtCore import QRectF
from PySide6.QtGui import QPainterPath

from widgets.common.palette import Palette
from widgets.layout_editor.geometry import Lanes, Strip, Track
from widgets.layout_editor.placement import Blocks, StripKey

_ROUND_FROM = 7.0
_RADIUS = 1.5


def strip_of(key: StripKey, lanes: Lanes) -> Strip:
    """Return the strip that parts named `key` are drawn in."""
    if key == "kv":
        return lanes.kv
    if key == "experts" and lanes.experts is not None:
        return lanes.experts
    half = lanes.dense.height / 2
    if key == "attention":
        return Strip(lanes.dense.top, half - 0.5)
    if key == "ffn":
        return Strip(lanes.dense.top + half + 0.5, half - 0.5)
    return lanes.dense


def strip_colour(key: StripKey, palette: Palette) -> str:
    """Return the part's colour, the same one that the bars use."""
    return {"kv": palette.kv, "experts": palette.experts}.get(key, palette.weights)


def gap_between(width: float) -> float:
    """Return the gap left after a layer that is `width` pixels wide."""
    return 1.0 if width >= 5 else 0.5


def layers_path(layers: Iterable[int], track: Track, top: float, height: float) -> QPainterPath:
    """Return the rectangles of `layers` as one path."""
    path = QPainterPath()
    edges = track.edges
    for layer in layers:
        left = edges[layer]
        width = edges[layer + 1] - left
        width -= gap_between(width)
        if width >= _ROUND_FROM:
            path.addRoundedRect(QRectF(left, top, width, height), _RADIUS, _RADIUS)
        else:
            path.addRect(left, top, width, height)
    return path


def blocks_paths(blocks: Blocks, track: Track, lanes: Lanes, top: float) -> tuple[tuple[StripKey, QPainterPath], ...]:
    """Return a path per strip; `top` is the top of the lane's track."""
    result: list[tuple[StripKey, QPainterPath]] = []
    for key, layers in blocks:
        strip = strip_of(key, lanes)
        result.append((key, layers_path(layers, track, top + strip.top, strip.height)))
    return tuple(result)
