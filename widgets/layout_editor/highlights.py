"""Graphics items over the lanes: boundary handles, selection, focus ring, pins, drop target, the label of a drag."""

from __future__ import annotations

from msgspec import Struct
from PySide6.QtCore import QPointF, QRectF, Qt
from PySide6.QtGui import QBrush, QPainter, QPen
from PySide6.QtWidgets import QGraphicsItem, QStyleOptionGraphicsItem, QWidget

from engine.base.language import tr
from engine.devices.device import CPU_ID
from engine.planning.layout.layout import Layout
from engine.planning.layout.parts import part_text
from engine.planning.plan.placement_check import DeviceDifference, difference_text
from widgets.common.memory_bar import bar_tooltip, holdings_text
from widgets.common.painting import colour
from widgets.common.palette import DARK, Palette
from widgets.common.text import Fonts, text_width
from widgets.layout_editor.drag import BoundaryDrag, Drag, LaneDrag
from widgets.layout_editor.geometry import HandleGeometry, Lanes, Track
from widgets.layout_editor.keyboard import DraftFocus, EmbeddingFocus, Focus, LayerFocus, OutputFocus
from widgets.layout_editor.placement import NO_PINS, Pins
from widgets.layout_editor.preview_geometry import (
    BarTarget,
    DraftTarget,
    EmbeddingTarget,
    EmptyTarget,
    HandleTarget,
    LayerTarget,
    OutputTarget,
    PartTarget,
    PreviewGeometry,
    Target,
)
from widgets.layout_editor.texts import (
    boundary_cost,
    boundary_text,
    draft_tooltip,
    embedding_tooltip,
    layer_tooltip,
    layers_text,
    output_tooltip,
    part_tooltip,
    range_text,
)

_PILL_HEIGHT = 22.0
_PIN_BAR = 3.0
_PIN_HEAD = 4.0


class Highlights(Struct, frozen=True):
    """Rectangles to highlight over the lanes, in scene coordinates.

    `hovered`: the part under the pointer.
    `target`: the lane into which the dragged object would be dropped.
    `elsewhere`: layers, KV caches and output that are not on the device that the layout requests.
    """

    selected: tuple[QRectF, ...] = ()
    hovered: QRectF | None = None
    focused: QRectF | None = None
    target: QRectF | None = None
    pinned: tuple[QRectF, ...] = ()
    elsewhere: tuple[QRectF, ...] = ()


class OverlayItem(QGraphicsItem):
    """Graphics item that paints `Highlights`, such as the selection, above the lanes and below the handles."""

    def __init__(self) -> None:
        super().__init__()
        self._highlights = Highlights()
        self._palette = DARK
        self._bounds = QRectF()
        self.setZValue(1)

    def set_highlights(self, highlights: Highlights, bounds: QRectF, palette: Palette) -> None:
        """Set the rectangles to highlight. `bounds`: rectangle of the scene."""
        if bounds != self._bounds:
            self.prepareGeometryChange()
            self._bounds = bounds
        if highlights != self._highlights or palette is not self._palette:
            self._highlights, self._palette = highlights, palette
            self.update()

    def boundingRect(self) -> QRectF:
        """Return the rectangle of the whole scene."""
        return self._bounds

    def paint(self, painter: QPainter, option: QStyleOptionGraphicsItem, widget: QWidget | None = None) -> None:
        """Paint the highlights, from the drop target at the bottom to the focus ring on top."""
        highlights, palette = self._highlights, self._palette
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        if highlights.target is not None:
            # Dashed, because the layers are not there yet: a solid frame is the selection.
            painter.setPen(QPen(colour(palette.accent), 1.5, Qt.PenStyle.DashLine))
            painter.setBrush(colour(palette.accent, 0.10))
            painter.drawRoundedRect(highlights.target, 4, 4)
        if highlights.hovered is not None:
            painter.setPen(QPen(colour(palette.text, 0.35), 1.0))
            painter.setBrush(colour(palette.text, 0.10))
            painter.drawRoundedRect(highlights.hovered, 2, 2)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(colour(palette.text))
        for rect in highlights.pinned:
            painter.drawRect(QRectF(rect.left(), rect.top(), rect.width(), _PIN_BAR))
            painter.drawEllipse(QPointF(rect.left() + _PIN_HEAD, rect.top() + _PIN_BAR), _PIN_HEAD, _PIN_HEAD)
        painter.setBrush(QBrush(colour(palette.bad), Qt.BrushStyle.BDiagPattern))
        painter.setPen(QPen(colour(palette.bad), 1.5))
        for rect in highlights.elsewhere:
            painter.drawRect(rect)
        painter.setPen(QPen(colour(palette.text), 1.5))
        painter.setBrush(colour(palette.text, 0.14))
        for rect in highlights.selected:
            painter.drawRoundedRect(rect, 3, 3)
        if highlights.focused is not None:
            painter.setBrush(Qt.BrushStyle.NoBrush)
            painter.setPen(QPen(colour(palette.accent), 2.0))
            painter.drawRoundedRect(highlights.focused.adjusted(-2, -2, 2, 2), 4, 4)


class PillItem(QGraphicsItem):
    """Label near the pointer, above all other items, that says what the drag would do if it ended now."""

    def __init__(self, fonts: Fonts) -> None:
        super().__init__()
        self._font = fonts.small
        self._text = ""
        self._palette = DARK
        self._rect = QRectF()
        self.setZValue(5)
        self.hide()

    def set_text(self, text: str, at: QPointF, bounds: QRectF, palette: Palette) -> None:
        """Show `text` above the point `at`, or below it if there is no room inside `bounds`.

        An empty text hides the label.
        """
        self.setVisible(bool(text))
        if not text:
            return
        width = text_width(text, self._font) + 16
        left = max(bounds.left() + 2, min(at.x() - width / 2, bounds.right() - width - 2))
        above = at.y() - _PILL_HEIGHT - 12
        top = above if above > bounds.top() + 2 else at.y() + 20
        self.prepareGeometryChange()
        self._rect = QRectF(left, top, width, _PILL_HEIGHT)
        self._text, self._palette = text, palette
        self.update()

    def boundingRect(self) -> QRectF:
        """Return the rectangle of the label in scene coordinates."""
        # Antialiased edges reach into the pixels around the rectangle.
        return self._rect.adjusted(-1, -1, 1, 1)

    def paint(self, painter: QPainter, option: QStyleOptionGraphicsItem, widget: QWidget | None = None) -> None:
        """Paint the label inverted: on the palette's text colour, in the colour of panels."""
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(colour(self._palette.text))
        painter.drawRoundedRect(self._rect, _PILL_HEIGHT / 2, _PILL_HEIGHT / 2)
        painter.setPen(colour(self._palette.panel))
        painter.setFont(self._font)
        painter.drawText(self._rect, int(Qt.AlignmentFlag.AlignCenter), self._text)


_HANDLE_RADIUS = 5.0
# The largest dot is the ring of the keyboard: a radius of 5 + 3.5 pixels and half a pen of 2, 9.5 in all.
_HANDLE_REACH = 10.0
_HANDLE_OVERHANG = 5.0


def handle_geometries(
    layout: Layout, lane_of: dict[str, int], track: Track, lanes: Lanes
) -> tuple[HandleGeometry, ...]:
    """Return the drag handle of each boundary between the layers of two devices.

    The line of a handle spans the lanes of both devices; its dot is in the lane of the device left of the boundary.

    In split modes tensor and row each device has a slice of every split layer. If the first layers are on the CPU, the
    only boundary is after them; otherwise there is none.

    `lane_of`: maps the id of a device to the index of its lane.
    """
    handles = []
    inside = layout.split_mode in ("tensor", "row")
    for index, (left, right) in enumerate(zip(layout.runs, layout.runs[1:], strict=False)):
        if inside and left.device != CPU_ID:
            break
        upper, lower = sorted((lane_of[left.device], lane_of[right.device]))
        handles.append(
            HandleGeometry(
                index=index,
                layer=right.first,
                # The gap between two layers is the last pixel before the edge (`lane.gap_between`); the line goes
                # through its middle.
                x=track.edges[right.first] - 0.5,
                top=lanes.track_top(upper) - _HANDLE_OVERHANG,
                bottom=lanes.track_top(lower) + lanes.track_height + _HANDLE_OVERHANG,
                dot_y=lanes.track_top(lane_of[left.device]) + lanes.track_height / 2,
            )
        )
    return tuple(handles)


class HandleItem(QGraphicsItem):
    """Graphics item of one boundary's handle, drawn larger while it is hovered, dragged or focused."""

    def __init__(self) -> None:
        super().__init__()
        self._handle: HandleGeometry | None = None
        self._palette = DARK
        self._active = False
        self._focused = False
        self.setZValue(2)

    def set_handle(self, handle: HandleGeometry, palette: Palette) -> None:
        """Move the item to the position of `handle`."""
        if handle == self._handle and palette is self._palette:
            return
        self.prepareGeometryChange()
        self._handle, self._palette = handle, palette
        self.update()

    def set_state(self, *, active: bool, focused: bool) -> None:
        """Set whether the handle is hovered or dragged (`active`), or has the keyboard focus (`focused`)."""
        if (active, focused) != (self._active, self._focused):
            self._active, self._focused = active, focused
            # Above its neighbours: with narrow runs the dots of handles overlap.
            self.setZValue(3 if active or focused else 2)
            self.update()

    def boundingRect(self) -> QRectF:
        """Return the rectangle of the handle (its line, and its dot at the largest size), in scene coordinates."""
        if self._handle is None:
            return QRectF()
        handle = self._handle
        return QRectF(handle.x - _HANDLE_REACH, handle.top, 2 * _HANDLE_REACH, handle.bottom - handle.top)

    def paint(self, painter: QPainter, option: QStyleOptionGraphicsItem, widget: QWidget | None = None) -> None:
        """Paint the line and the dot, with a ring if the handle has the keyboard focus."""
        if self._handle is None:
            return
        handle, palette = self._handle, self._palette
        strong = self._active or self._focused
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(QPen(colour(palette.accent), 2.0 if strong else 1.5))
        painter.drawLine(QPointF(handle.x, handle.top), QPointF(handle.x, handle.bottom))
        centre = QPointF(handle.x, handle.dot_y)
        if self._focused:
            painter.setPen(QPen(colour(palette.text), 2.0))
            painter.setBrush(colour(palette.background))
            painter.drawEllipse(centre, _HANDLE_RADIUS + 3.5, _HANDLE_RADIUS + 3.5)
        painter.setPen(QPen(colour(palette.background), 1.5))
        painter.setBrush(colour(palette.accent))
        radius = _HANDLE_RADIUS + (1.0 if strong else 0.0)
        painter.drawEllipse(centre, radius, radius)


def highlights_of(
    geometry: PreviewGeometry,
    focus: Focus | None,
    drag: Drag | None,
    hover: Target | None,
    pins: Pins = NO_PINS,
    *,
    has_keyboard: bool,
) -> Highlights:
    """Return the rectangles to highlight for focus, drag, hover and pins.

    `has_keyboard`: whether the editor has the keyboard focus. Without it there is no focus ring.
    """
    ring: QRectF | None = None
    if has_keyboard and drag is None:
        if isinstance(focus, OutputFocus):
            ring = geometry.output_rect()
        elif isinstance(focus, EmbeddingFocus):
            ring = geometry.embedding_rect()
        elif isinstance(focus, DraftFocus) and geometry.draft_lane is not None:
            ring = geometry.draft_rect(geometry.draft_lane)
        elif isinstance(focus, LayerFocus):
            ring = geometry.block_rect(geometry.lane_of_layer(focus.layer), focus.layer, focus.layer)
    return Highlights(
        selected=geometry.span_rects(*focus.span) if isinstance(focus, LayerFocus) else (),
        hovered=_hovered_rect(geometry, hover) if drag is None else None,
        focused=ring,
        target=geometry.track_rect(drag.lane) if isinstance(drag, LaneDrag) and drag.begun else None,
        pinned=pin_rects(geometry, pins),
        elsewhere=tuple(elsewhere_rect(geometry, each) for each in geometry.elsewhere),
    )


def elsewhere_rect(geometry: PreviewGeometry, difference: DeviceDifference) -> QRectF:
    """Return the rectangle that marks a layer, KV cache or output which llama.cpp did not place as requested.

    The rectangle is in the lane of the requested device, in scene coordinates.
    """
    if difference.part == "output":
        return geometry.output_rect()
    lane, layer = geometry.lane_of_layer(difference.layer), difference.layer
    rect = geometry.block_rect(lane, layer, layer)
    if difference.part == "layer":
        return rect
    strip = geometry.lanes.kv
    return QRectF(rect.left(), geometry.lanes.track_top(lane) + strip.top, rect.width(), strip.height)


def _hovered_rect(geometry: PreviewGeometry, hover: Target | None) -> QRectF | None:
    if isinstance(hover, LayerTarget):
        return geometry.block_rect(hover.lane, hover.layer, hover.layer)
    if isinstance(hover, PartTarget):
        return geometry.part_rect(hover.lane, hover.part, hover.layer)
    if isinstance(hover, EmbeddingTarget):
        return geometry.embedding_rect()
    if isinstance(hover, DraftTarget):
        return geometry.draft_rect(hover.lane)
    return geometry.output_rect() if isinstance(hover, OutputTarget) else None


def pill_text(drag: Drag | None) -> str:
    """Return text that says what the drag would do if it ended now; empty if there is no drag."""
    if isinstance(drag, BoundaryDrag):
        # The layout at the start of the drag, cut at the layer where the boundary is now. The preview may be a frame
        # late.
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
        if drag.span is None:
            what = {"embedding": tr("embedding"), "draft": tr("draft")}.get(drag.part or "", tr("output"))
        elif drag.part is None or drag.part in ("embedding", "draft"):
            what = layers_text(*drag.span)
        else:
            what = tr("{part} of {layers}", part=part_text(drag.part), layers=layers_text(*drag.span))
        return f"{what} → {drag.devices[drag.lane]}"
    return ""


def cursor_of(drag: Drag | None, hover: Target | None) -> Qt.CursorShape:
    """Return the shape of the mouse cursor during `drag`, or over the part `hover`."""
    if isinstance(drag, BoundaryDrag) or (drag is None and isinstance(hover, HandleTarget)):
        return Qt.CursorShape.SplitHCursor
    if isinstance(drag, LaneDrag):
        return Qt.CursorShape.ClosedHandCursor
    if drag is None and isinstance(hover, LayerTarget | PartTarget | OutputTarget | EmbeddingTarget | DraftTarget):
        return Qt.CursorShape.OpenHandCursor
    return Qt.CursorShape.ArrowCursor


def tooltip_of(geometry: PreviewGeometry, target: Target | None, pins: Pins = NO_PINS) -> str:
    """Return as plain text the tooltip of `target`, the part under the pointer: its sizes, and its pin if it has one.

    The tooltip also says if llama.cpp did not place the part on the device that the layout requests.
    """
    return "\n".join(
        filter(
            None,
            (_numbers_of(geometry, target), difference_text(_elsewhere_at(geometry, target)), pin_text(pins, target)),
        )
    )


def _elsewhere_at(geometry: PreviewGeometry, target: Target | None) -> tuple[DeviceDifference, ...]:
    match target:
        case LayerTarget(layer, _) | PartTarget(layer, _, _):
            return elsewhere_of(geometry, layer)
        case OutputTarget():
            return elsewhere_of(geometry, geometry.preview.layout.n_layers)
    return ()


def elsewhere_of(geometry: PreviewGeometry, layer: int) -> tuple[DeviceDifference, ...]:
    """Return the parts of a layer that llama.cpp did not place on the device that the layout requests.

    `layer` is `n_layers` for the output layer.
    """
    return tuple(each for each in geometry.elsewhere if each.layer == layer)


def _numbers_of(geometry: PreviewGeometry, target: Target | None) -> str:
    preview = geometry.preview
    match target:
        case HandleTarget(index):
            words = tr("{boundary}\nDrag to move the boundary.", boundary=boundary_text(preview.layout, index))
            return "\n".join(filter(None, (words, boundary_cost(preview, index))))
        case OutputTarget():
            return output_tooltip(preview)
        case LayerTarget(layer, _) | EmptyTarget(_, int(layer), _):
            return layer_tooltip(preview.layers[layer], preview.layout)
        case PartTarget(layer, _, part):
            return part_tooltip(preview, layer, part)
        case EmbeddingTarget() | EmptyTarget(_, _, True):
            return embedding_tooltip(preview)
        case DraftTarget():
            return draft_tooltip(preview)
        case BarTarget(lane):
            values = geometry.values[lane]
            numbers = "" if values.row is None else bar_tooltip(values.row, values.room, values.placed)
            fold = (
                ""
                if values.content.group is None
                else tr("Click here, or press F on a layer, to fold or unfold the devices of this computer.")
            )
            lines = (values.content.device.name, numbers, holdings_text(values.holdings), fold)
            return "\n".join(filter(None, lines))
    return ""


def pin_rects(geometry: PreviewGeometry, pins: Pins) -> tuple[QRectF, ...]:
    """Return the rectangles of all pinned layers, parts and output, in scene coordinates.

    Each rectangle is in the lane of the device that the pin names.
    """
    lane_of = geometry.lane_of
    last = len(geometry.preview.layers) - 1
    # A pin may name a device that the rig no longer has: it is kept, but there is no lane to paint it in.
    rects = [
        geometry.block_rect(lane_of[pin.device], pin.first, min(pin.last, last))
        for pin in pins.layers
        if pin.device in lane_of and pin.first <= last
    ]
    for pin in pins.parts:
        if pin.device in lane_of and pin.first <= last:
            lane = lane_of[pin.device]
            ends = (geometry.part_rect(lane, pin.part, layer) for layer in (pin.first, min(pin.last, last)))
            rects.append(next(ends).united(next(ends)))
    if pins.output in lane_of:
        left, right = geometry.track.output
        top = geometry.lanes.track_top(lane_of[pins.output])
        rects.append(QRectF(left, top + 1, right - left, geometry.lanes.track_height - 2))
    return tuple(rects)


def focus_device(pins: Pins, focus: Focus | None) -> str | None:
    """Return the device to which the focused layer or output is pinned; None if it is not pinned."""
    if isinstance(focus, LayerFocus):
        return pins.device_of(focus.layer)
    return pins.output if isinstance(focus, OutputFocus) else None


def pin_text(pins: Pins, target: Target | None) -> str:
    """Return a sentence that names the device to which a part is pinned; empty if it is not pinned.

    `target`: the part, which is under the pointer.
    """
    match target:
        case LayerTarget(layer, _):
            device = pins.device_of(layer)
        case PartTarget(layer, _, part):
            device = pins.part_device_of(part, layer)
        case OutputTarget():
            device = pins.output
        case _:
            device = None
    return tr("Pinned to {device}: automatic layouts do not move what is pinned.", device=device) if device else ""
