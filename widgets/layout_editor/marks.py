"""From what the user is doing to what is marked over the lanes, and to the words of the pill and the tooltips."""

from __future__ import annotations

from PySide6.QtCore import QRectF, Qt

from engine.language import tr
from widgets.common.holdings import holdings_text
from widgets.common.memory_bar import bar_tooltip
from widgets.layout_editor.drag import BoundaryDrag, Drag, LaneDrag
from widgets.layout_editor.focus import Focus, LayerFocus, OutputFocus
from widgets.layout_editor.overlay import Marks
from widgets.layout_editor.pins import NO_PINS, Pins, pin_rects, pin_text
from widgets.layout_editor.shown import (
    BarTarget,
    EmptyTarget,
    HandleTarget,
    LayerTarget,
    OutputTarget,
    Shown,
    Target,
)
from widgets.layout_editor.texts import (
    boundary_text,
    embedding_tooltip,
    layer_tooltip,
    layers_text,
    output_tooltip,
    range_text,
)


def marks_of(
    shown: Shown,
    focus: Focus | None,
    drag: Drag | None,
    hover: Target | None,
    pins: Pins = NO_PINS,
    *,
    has_keyboard: bool,
) -> Marks:
    """Return what is marked; the focus ring only while the editor has the keyboard."""
    ring: QRectF | None = None
    if has_keyboard and drag is None:
        if isinstance(focus, OutputFocus):
            ring = shown.output_rect()
        elif isinstance(focus, LayerFocus):
            ring = shown.block_rect(shown.lane_of_layer(focus.layer), focus.layer, focus.layer)
    return Marks(
        selected=shown.span_rects(*focus.span) if isinstance(focus, LayerFocus) else (),
        hovered=_hovered_rect(shown, hover) if drag is None else None,
        focused=ring,
        target=shown.track_rect(drag.lane) if isinstance(drag, LaneDrag) and drag.begun else None,
        pinned=pin_rects(shown, pins),
    )


def _hovered_rect(shown: Shown, hover: Target | None) -> QRectF | None:
    if isinstance(hover, LayerTarget):
        return shown.block_rect(hover.lane, hover.layer, hover.layer)
    return shown.output_rect() if isinstance(hover, OutputTarget) else None


def pill_text(drag: Drag | None) -> str:
    """Return what a drag would do as it is now, "" where there is nothing to say."""
    if isinstance(drag, BoundaryDrag):
        left, right = drag.layout.runs[drag.index], drag.layout.runs[drag.index + 1]
        texts = [
            f"{device} {range_text(first, last)}"
            for device, first, last in (
                (left.device, left.first, drag.layer - 1),
                (right.device, drag.layer, right.last),
            )
        ]
        return "  |  ".join(texts)
    if isinstance(drag, LaneDrag) and drag.begun:
        what = tr("output") if drag.span is None else layers_text(*drag.span)
        return f"{what} → {drag.devices[drag.lane]}"
    return ""


def cursor_of(drag: Drag | None, hover: Target | None) -> Qt.CursorShape:
    """Return the pointer's shape."""
    if isinstance(drag, BoundaryDrag) or (drag is None and isinstance(hover, HandleTarget)):
        return Qt.CursorShape.SplitHCursor
    if isinstance(drag, LaneDrag):
        return Qt.CursorShape.ClosedHandCursor
    if drag is None and isinstance(hover, LayerTarget | OutputTarget):
        return Qt.CursorShape.OpenHandCursor
    return Qt.CursorShape.ArrowCursor


def tooltip_of(shown: Shown, target: Target | None, pins: Pins = NO_PINS) -> str:
    """Return the numbers of what is under the pointer, in lines of plain text, and whether it is pinned."""
    return "\n".join(filter(None, (_numbers_of(shown, target), pin_text(pins, target))))


def _numbers_of(shown: Shown, target: Target | None) -> str:
    preview = shown.preview
    match target:
        case HandleTarget(index):
            return tr("{boundary}\nDrag to move the boundary.", boundary=boundary_text(preview.layout, index))
        case OutputTarget():
            return output_tooltip(preview)
        case LayerTarget(layer, _) | EmptyTarget(_, int(layer), _):
            return layer_tooltip(preview.layers[layer], preview.layout)
        case EmptyTarget(_, _, True):
            return embedding_tooltip(preview)
        case BarTarget(lane):
            values = shown.values[lane]
            numbers = "" if values.row is None else bar_tooltip(values.row, values.room)
            return "\n".join(filter(None, (values.content.device.name, numbers, holdings_text(values.holdings))))
    return ""
