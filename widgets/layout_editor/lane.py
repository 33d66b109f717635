"""A lane: the name of its device, its layers and its memory bar.

The painted image is cached until its values change.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct
from PySide6.QtCore import QPointF, QRectF, Qt
from PySide6.QtGui import QFont, QPainter, QPainterPath, QPen
from PySide6.QtWidgets import QGraphicsItem, QStyleOptionGraphicsItem, QWidget

from engine.base.language import tr
from engine.devices.device import Holding
from engine.planning.memory.estimate import grade_text
from engine.planning.plan.report import DeviceRow
from widgets.common.memory_bar import (
    OVERFLOW_WIDTH,
    UNKNOWN_WEIGHTS,
    MemoryBar,
    PlacedWeights,
    SegmentRole,
    bar_of_row,
    paint_bar,
    room_text,
    segment_colour,
    segment_texts,
)
from widgets.common.painting import colour, mix
from widgets.common.palette import Palette
from widgets.common.text import Fonts, elide, fitting, text_width
from widgets.layout_editor.geometry import Columns, Lanes, Strip, Track
from widgets.layout_editor.placement import Blocks, LaneContent, SliceBlocks, StripKey
from widgets.layout_editor.texts import held_texts, is_short, lane_texts, measured_texts

_ROUND_FROM = 7.0
_RADIUS = 1.5


def strip_of(key: StripKey, lanes: Lanes) -> Strip:
    """Return the horizontal strip of a lane in which one part of the layers, such as their experts, is drawn.

    `key`: the part of the layers.
    """
    if key == "kv":
        return lanes.kv
    if key == "experts" and lanes.experts is not None:
        return lanes.experts
    half = lanes.dense.height / 2
    if key == "attention":
        # Half a pixel less on both sides leaves a gap of one pixel between the halves.
        return Strip(lanes.dense.top, half - 0.5)
    if key == "ffn":
        return Strip(lanes.dense.top + half + 0.5, half - 0.5)
    return lanes.dense


def strip_colour(key: StripKey, palette: Palette) -> str:
    """Return the colour (`#rrggbb`) in which one part of the layers, such as their experts, is drawn.

    Memory bars and the legend use the same colour.
    """
    role: SegmentRole = "kv" if key == "kv" else "experts" if key == "experts" else "weights"
    return segment_colour(palette, role)


def gap_between(width: float) -> float:
    """Return the gap in pixels after a layer that is `width` pixels wide."""
    return 1.0 if width >= 5 else 0.5


def layers_path(layers: Iterable[int], track: Track, top: float, height: float) -> QPainterPath:
    """Return one path with a rectangle for each of `layers`.

    `top`, `height`: vertical position of all rectangles in pixels. `track` has their horizontal positions.
    """
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


def slices_paths(
    slices: SliceBlocks, track: Track, lanes: Lanes, top: float
) -> tuple[tuple[StripKey, QPainterPath], ...]:
    """Return what a device's lane (its row in the editor) draws for the slices of layers that the device has.

    Devices have slices in split modes tensor and row. The result has a pair (part, path) for each part of the layers,
    such as their experts. The path has a rectangle for each slice of that part.

    `slices`: for each part, the slices that the device has.
    `track`: horizontal position of each layer.
    `lanes`: vertical position of each part in a lane.
    `top`: y coordinate of the top of the lane's track, in pixels.
    """
    found: list[tuple[StripKey, QPainterPath]] = []
    for key, layers in slices:
        strip, path = strip_of(key, lanes), QPainterPath()
        for layer, start, end in layers:
            left = track.edges[layer]
            width = track.edges[layer + 1] - left
            width -= gap_between(width)
            path.addRect(left + start * width, top + strip.top, (end - start) * width, strip.height)
        found.append((key, path))
    return tuple(found)


def blocks_paths(blocks: Blocks, track: Track, lanes: Lanes, top: float) -> tuple[tuple[StripKey, QPainterPath], ...]:
    """Return what a device's lane (its row in the editor) draws for the layers in `blocks`.

    The result has a pair (part, path) for each part of the layers, such as their experts. The path has a rectangle for
    each layer in which that part is drawn.

    `blocks`: for each part, the layers in which it is drawn.
    `track`: horizontal position of each layer.
    `lanes`: vertical position of each part in a lane.
    `top`: y coordinate of the top of the lane's track, in pixels.
    """
    result: list[tuple[StripKey, QPainterPath]] = []
    for key, layers in blocks:
        strip = strip_of(key, lanes)
        result.append((key, layers_path(layers, track, top + strip.top, strip.height)))
    return tuple(result)


_BAR_HEIGHT = 14.0


def time_beside(device_id: str, time: str, fonts: Fonts, width: float) -> str:
    """Return the text `time` if it fits beside the device id in `width` pixels; else an empty text.

    The device id is never shortened to make room, since ids often differ only at their end.
    """
    return time if text_width(device_id, fonts.bold) + 8 + text_width(time, fonts.small) <= width else ""


_LINE = 17.0
_GHOST_OPACITY = 0.22


class LaneValues(Struct, frozen=True):
    """The values that a lane (the row of one device) shows.

    row: memory that the layout needs on the device, forecast or measured by a load; None if nothing is known.
    forecast: if `row` is measured, the forecast for the same load; else None.
    room: `row` with the latest reading of the device's free memory and its cap; None: free memory and cap of `row`.
    holdings: memory of the device that other loaded models use.
    time: time that the device takes for each token, as text.
    placed: bytes of the weights that the layout places on the device.
    """

    content: LaneContent
    row: DeviceRow | None
    forecast: DeviceRow | None
    room: DeviceRow | None = None
    holdings: tuple[Holding, ...] = ()
    time: str = ""
    placed: PlacedWeights = UNKNOWN_WEIGHTS


class LaneGeometry(Struct, frozen=True):
    """Positions of a lane's columns, strips and layers, in scene pixels; the same for all lanes."""

    columns: Columns
    lanes: Lanes
    track: Track
    width: float


class LaneItem(QGraphicsItem):
    """Graphics item of one lane.

    Its origin is the lane's top left corner, at x = 0 of the scene, so x coordinates are the same as in the scene.
    """

    def __init__(self, fonts: Fonts) -> None:
        super().__init__()
        self._fonts = fonts
        self._values: LaneValues | None = None
        self._geometry: LaneGeometry | None = None
        self._palette: Palette | None = None
        self._solid: tuple[tuple[StripKey, QPainterPath], ...] = ()
        self._ghosts: tuple[tuple[StripKey, QPainterPath], ...] = ()
        self._bars: tuple[MemoryBar | None, MemoryBar | None] = (None, None)
        # In device coordinates the cached picture stays sharp at every zoom and screen scale; moving the item keeps it.
        self.setCacheMode(QGraphicsItem.CacheMode.DeviceCoordinateCache)

    def set_values(self, values: LaneValues, geometry: LaneGeometry, palette: Palette) -> bool:
        """Set values, geometry and colours; return False if all are as before, so that the cached image is used."""
        same_geometry = geometry == self._geometry
        # In a drag most lanes stay as they are; their cached pictures are drawn again without painting.
        if same_geometry and values == self._values and palette is self._palette:
            return False
        if not same_geometry:
            # Before `_geometry` changes: Qt reads the old `boundingRect` here, to repaint where the lane was.
            self.prepareGeometryChange()
        content = values.content
        # Paths of hundreds of layers cost more than the rest of a lane, so they are made only if layers moved.
        if not same_geometry or self._values is None or content != self._values.content:
            top = geometry.lanes.track_top(0)
            self._solid = (
                blocks_paths(content.blocks, geometry.track, geometry.lanes, top)
                if content.share is None
                else slices_paths(content.slices, geometry.track, geometry.lanes, top)
            )
            self._ghosts = blocks_paths(content.ghosts, geometry.track, geometry.lanes, top)
        row, forecast = values.row, values.forecast
        self._bars = (
            None if row is None else bar_of_row(row, values.room, values.placed),
            None if forecast is None else bar_of_row(forecast, values.room, values.placed),
        )
        self._values, self._geometry, self._palette = values, geometry, palette
        self.update()
        return True

    def boundingRect(self) -> QRectF:
        """Return the lane's rectangle in its own coordinates."""
        if self._geometry is None:
            return QRectF()
        return QRectF(0, 0, self._geometry.width, self._geometry.lanes.pitch)

    def paint(self, painter: QPainter, option: QStyleOptionGraphicsItem, widget: QWidget | None = None) -> None:
        """Paint the label, the track of layers and the memory bar."""
        if self._values is None or self._geometry is None or self._palette is None:
            return
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.fillRect(QRectF(0, 0, self._geometry.width, 1), colour(self._palette.line))
        self._paint_labels(painter, self._values, self._geometry, self._palette)
        self._paint_track(painter, self._values.content, self._geometry, self._palette)
        self._paint_memory(painter, self._values, self._geometry, self._palette)

    def _text(self, painter: QPainter, rect: QRectF, text: str, font: QFont, name: str, *, right: bool = False) -> None:
        painter.setFont(font)
        painter.setPen(colour(name))
        side = Qt.AlignmentFlag.AlignRight if right else Qt.AlignmentFlag.AlignLeft
        painter.drawText(rect, int(side | Qt.AlignmentFlag.AlignVCenter) | Qt.TextFlag.TextSingleLine, text)

    def _paint_labels(self, painter: QPainter, values: LaneValues, geometry: LaneGeometry, palette: Palette) -> None:
        content, fonts, width = values.content, self._fonts, geometry.columns.label_width
        top = (geometry.lanes.pitch - 3 * _LINE) / 2
        id_name = palette.text if content.device.present else palette.bad
        time = time_beside(content.device.id, values.time, fonts, width)
        sign = "" if content.group is None else "▸ " if content.group.is_folded else "▾ "
        id_text = elide(sign + content.device.id, fonts.bold, width)
        self._text(painter, QRectF(0, top, width, _LINE), id_text, fonts.bold, id_name)
        self._text(painter, QRectF(0, top, width, _LINE), time, fonts.small, palette.dim, right=True)
        name = elide(content.device.name, fonts.small, width)
        self._text(painter, QRectF(0, top + _LINE, width, _LINE), name, fonts.small, palette.dim)
        holds = fitting(lane_texts(content), fonts.small, width)
        self._text(painter, QRectF(0, top + 2 * _LINE, width, _LINE), holds, fonts.small, palette.dim)

    def _paint_track(self, painter: QPainter, content: LaneContent, geometry: LaneGeometry, palette: Palette) -> None:
        top, height = geometry.lanes.track_top(0), geometry.lanes.track_height
        track = geometry.track
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(colour(palette.background))
        # The track goes below everything, and ghosts below the parts that are really in this lane.
        painter.drawRoundedRect(QRectF(track.left, top, track.right - track.left, height), 4, 4)
        for key, path in self._ghosts:
            painter.fillPath(path, mix(palette.background, strip_colour(key, palette), _GHOST_OPACITY))
        for key, path in self._solid:
            painter.fillPath(path, colour(strip_colour(key, palette)))
        for shown, (left, right), name, word in (
            (content.has_embedding, track.embedding, palette.weights, tr("embed")),
            (content.has_output, track.output, palette.compute, tr("output")),
            (content.has_draft, track.draft or track.output, palette.draft, tr("draft")),
        ):
            if shown:
                self._paint_end(painter, QRectF(left, top + 3, right - left, height - 6), name, word)

    def _paint_end(self, painter: QPainter, rect: QRectF, name: str, word: str) -> None:
        """Paint the block of embedding, output or draft into `rect`.

        `name`: name of the block's colour. `word`: label of the block, written from bottom to top if there is room.
        """
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(colour(name))
        painter.drawRoundedRect(rect, 2, 2)
        if self._palette is None or rect.width() < _LINE or rect.height() < text_width(word, self._fonts.small):
            return
        painter.save()
        painter.translate(rect.center())
        painter.rotate(-90)
        painter.setFont(self._fonts.small)
        painter.setPen(colour(self._palette.panel))
        upright = QRectF(-rect.height() / 2, -rect.width() / 2, rect.height(), rect.width())
        painter.drawText(upright, int(Qt.AlignmentFlag.AlignCenter), word)
        painter.restore()

    def _paint_memory(self, painter: QPainter, values: LaneValues, geometry: LaneGeometry, palette: Palette) -> None:
        left, width = geometry.columns.bar_left, geometry.columns.bar_width
        fonts, row = self._fonts, values.row
        bar, forecast = self._bars
        top = (geometry.lanes.pitch - _BAR_HEIGHT - 6 - 2 * _LINE) / 2
        if row is None or bar is None:
            text = elide(tr("memory unknown"), fonts.small, width)
            self._text(painter, QRectF(left, top, width, _BAR_HEIGHT), text, fonts.small, palette.dim)
            return
        painter.save()
        paint_bar(painter, QRectF(left, top, width, _BAR_HEIGHT), bar, palette)
        painter.restore()
        if forecast is not None:
            self._paint_forecast(painter, QRectF(left, top + _BAR_HEIGHT + 2, width, 3), forecast, palette)
        line = QRectF(left, top + _BAR_HEIGHT + 5, width, _LINE)
        grade = grade_text(row.grade)
        grade_width = text_width(grade, fonts.small) + 8
        room_name = palette.bad if is_short(row, values.room) else palette.text
        state = "" if bar.parts else values.content.device.state
        room = elide(state or room_text(bar), fonts.body, width - grade_width)
        self._text(painter, line, room, fonts.body, room_name)
        self._text(painter, line, grade, fonts.small, palette.dim, right=True)
        texts = segment_texts(bar) if values.forecast is None else measured_texts(row, values.forecast)
        texts = texts or held_texts(values.holdings)
        parts = fitting(texts, fonts.small, width)
        self._text(painter, line.translated(0, _LINE - 1), parts, fonts.small, palette.dim)

    @staticmethod
    def _paint_forecast(painter: QPainter, rect: QRectF, forecast: MemoryBar, palette: Palette) -> None:
        """Paint the forecast as a thin line below the bar of the measured memory.

        The line begins where the memory of other programs ends.
        """
        # The same scale as the bar above, whose right end is kept for the overflow.
        body = rect.width() - OVERFLOW_WIDTH
        start = rect.left() + body * min((forecast.other_bytes or 0) / forecast.span_bytes, 1.0)
        end = rect.left() + body * min(forecast.used_bytes / forecast.span_bytes, 1.0)
        painter.setPen(QPen(colour(palette.dim), 1.5))
        # At least a pixel, so that a forecast of nearly nothing can still be seen.
        painter.drawLine(QPointF(start, rect.center().y()), QPointF(max(end, start + 1), rect.center().y()))
