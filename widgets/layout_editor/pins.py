"""Layers that automatic layouts leave where they are, and the marks that say so."""

from __future__ import annotations

from dataclasses import dataclass

from PySide6.QtCore import QRectF

from engine.language import tr
from widgets.layout_editor.shown import LayerTarget, OutputTarget, Shown, Target


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


def pin_rects(shown: Shown, pins: Pins) -> tuple[QRectF, ...]:
    """Return a rectangle for each pinned range in the lane that it is pinned to, in scene coordinates."""
    lane_of = shown.lane_of
    last = len(shown.preview.layers) - 1
    rects = [
        shown.block_rect(lane_of[pin.device], pin.first, min(pin.last, last))
        for pin in pins.layers
        if pin.device in lane_of and pin.first <= last
    ]
    if pins.output in lane_of:
        left, right = shown.track.output
        top = shown.lanes.track_top(lane_of[pins.output])
        rects.append(QRectF(left, top + 1, right - left, shown.lanes.track_height - 2))
    return tuple(rects)


def pin_text(pins: Pins, target: Target | None) -> str:
    """Return what is said of a pin under the pointer, "" where there is none."""
    match target:
        case LayerTarget(layer, _):
            device = pins.device_of(layer)
        case OutputTarget():
            device = pins.output
        case _:
            device = None
    return tr("Pinned to {device}: automatic layouts leave it there.", device=device) if device else ""
