"""Lanes of two layouts of a model: a lane shows the layers of one device in both layouts, with hatched differences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct
from PySide6.QtCore import QEvent, QRectF, QSize, Qt
from PySide6.QtGui import QHelpEvent, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QFrame, QScrollArea, QToolTip, QWidget

from engine.base.language import tr
from engine.planning.plan.preview import Preview
from widgets.common.memory_bar import bar_of_row, bar_tooltip, paint_bar
from widgets.common.painting import colour, keep_left_to_right, paint_hatch
from widgets.common.palette import DARK, Palette
from widgets.common.roles import plain_tool_tip
from widgets.common.text import Fonts, elide, zoom, zoomed
from widgets.layout_editor.geometry import Lanes, Strip, Track, make_track
from widgets.layout_editor.lane import blocks_paths, slices_paths, strip_colour, strip_of
from widgets.layout_editor.placement import LaneContent, StripKey, lane_contents, placed_weights
from widgets.layout_editor.texts import ranges_text

LETTERS = ("A", "B")
"""Names of the two sides, in the lanes and in the tables."""
_PITCH = 56.0
_STRIP_TOP = (5.0, 30.0)
_STRIP_HEIGHT = 21.0
_LABEL_WIDTH = 128.0
_LETTER_WIDTH = 14.0
_BAR_WIDTH = 168.0
_BAR_HEIGHT = 11.0
_GAP = 12.0
_LEAST_WIDTH = 480
_LEAST_LANES = 2

Layers = dict[StripKey, frozenset[int]]


class ComparedLane(Struct, frozen=True):
    """One device in two compared layouts. Each of the fields below has one value for each layout.

    `contents`: what the layout places on the device; None if the layout's rig lacks the device.
    `only`: what only this layout places there: a mapping from the part (dense, experts, KV cache) to indices of layers.
    `ends`: two flags: whether only this layout places the token embedding there, and whether only it places the output.
    """

    id: str
    name: str
    contents: tuple[LaneContent | None, LaneContent | None]
    only: tuple[Layers, Layers]
    ends: tuple[tuple[bool, bool], tuple[bool, bool]]

    @property
    def differs(self) -> bool:
        """Whether the two layouts differ in what they place on the device: parts of layers, embedding or output."""
        return any(self.only) or any(map(any, self.ends))


def compared_lanes(one: Preview | None, other: Preview | None) -> tuple[ComparedLane, ...]:
    """Return a lane for each device of the two rigs; devices that neither layout uses come last.

    `one`, `other`: the previews of the two layouts. If a preview is None, no differences are marked.
    """
    sides = [{} if each is None else {lane.device.id: lane for lane in lane_contents(each)} for each in (one, other)]
    # A dict and not a set, because it keeps the order of the lanes.
    ids = dict.fromkeys((*sides[0], *sides[1]))
    lanes = []
    for device in ids:
        a, b = (side.get(device) for side in sides)
        known = a or b
        if known is None:
            continue
        nothing: tuple[Layers, ...] = ({}, {})
        only = nothing if one is None or other is None else (_only(a, b), _only(b, a))
        ends = [(False, False), (False, False)] if one is None or other is None else [_ends(a, b), _ends(b, a)]
        lanes.append(ComparedLane(device, known.device.name, (a, b), (only[0], only[1]), (ends[0], ends[1])))
    # Of 64 devices a layout may use three, which should be seen without scrolling.
    return tuple(sorted(lanes, key=lambda lane: all(each is None or each.is_empty for each in lane.contents)))


def _layers(content: LaneContent | None) -> dict[StripKey, frozenset[int]]:
    if content is None:
        return {}
    if content.share is not None:
        # In modes tensor and row a layer is a slice on each device; those of another width differ.
        return {}
    return {key: frozenset(layers) for key, layers in content.blocks}


def _only(content: LaneContent | None, there: LaneContent | None) -> Layers:
    if content is None:
        return {}
    if content.share is not None:
        same = there is not None and there.slices == content.slices
        return {} if same else {key: frozenset(each[0] for each in slices) for key, slices in content.slices}
    known = _layers(there)
    # A layer whose dense part is whole here and in halves there has it in both.
    whole = known.get("dense", frozenset()) | (known.get("attention", frozenset()) & known.get("ffn", frozenset()))
    found = {}
    for key, layers in _layers(content).items():
        other = whole if key == "dense" else known.get(key, frozenset())
        if key in ("attention", "ffn"):
            other |= known.get("dense", frozenset())
        if layers - other:
            found[key] = layers - other
    return found


def _ends(content: LaneContent | None, there: LaneContent | None) -> tuple[bool, bool]:
    if content is None:
        return False, False
    return (
        content.has_embedding and (there is None or not there.has_embedding),
        content.has_output and (there is None or not there.has_output),
    )


class ComparedLanes(QScrollArea):
    """Scroll area with the lanes of two layouts. The same differences are in the dialog's tables, as text."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._canvas = _Canvas()
        self.setWidget(self._canvas)
        self.setWidgetResizable(True)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setAccessibleName(tr("Lanes of both layouts"))
        self.setMinimumSize(_LEAST_WIDTH, zoomed(round(_LEAST_LANES * _PITCH)))
        self.verticalScrollBar().setSingleStep(24)
        keep_left_to_right(self)

    @property
    def lanes(self) -> tuple[ComparedLane, ...]:
        """The lanes that are shown, from top to bottom."""
        return self._canvas.lanes

    def show_sides(self, one: Preview | None, other: Preview | None) -> None:
        """Show the previews of the two layouts; a side without a layout is None."""
        self._canvas.show_sides((one, other))
        differing = [lane.id for lane in self._canvas.lanes if lane.differs]
        words = tr("The layouts differ on {devices}.", devices=", ".join(differing)) if differing else ""
        self.setAccessibleDescription(words)

    def apply_palette(self, palette: Palette) -> None:
        """Use the colours of `palette`."""
        self._canvas.apply_palette(palette)


class _Canvas(QWidget):
    """Widget that paints the compared lanes, at the zoom of the interface."""

    def __init__(self) -> None:
        super().__init__()
        self._sides: tuple[Preview | None, Preview | None] = (None, None)
        self._palette = DARK
        self._fonts = Fonts()
        self.lanes: tuple[ComparedLane, ...] = ()

    def show_sides(self, sides: tuple[Preview | None, Preview | None]) -> None:
        self._sides = sides
        self.lanes = compared_lanes(*sides)
        self.setMinimumHeight(self.sizeHint().height())
        self.update()

    def apply_palette(self, palette: Palette) -> None:
        self._palette, self._fonts = palette, Fonts()
        self.setMinimumHeight(self.sizeHint().height())
        self.update()

    def sizeHint(self) -> QSize:
        """Return a size with room for all lanes."""
        return QSize(_LEAST_WIDTH, zoomed(round(len(self.lanes) * _PITCH)))

    def _track(self) -> Track | None:
        # Both layouts are of one model, so the layers have the same sizes in both previews.
        preview = self._sides[0] or self._sides[1]
        if preview is None:
            return None
        left = _LABEL_WIDTH + _LETTER_WIDTH
        width = max(self.width() / zoom() - left - _BAR_WIDTH - _GAP, 40.0)
        sizes = [layer.weights_bytes for layer in preview.layers]
        return make_track(sizes, preview.token_embedding_bytes, preview.output_weights_bytes, left, width)

    def paintEvent(self, event: QPaintEvent) -> None:
        """Paint those lanes that overlap the rectangle of the event."""
        track = self._track()
        if track is None:
            return
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.scale(zoom(), zoom())
        strips = self._strips()
        for index, lane in enumerate(self.lanes):
            top = index * _PITCH
            seen = event.rect()
            if top * zoom() > seen.bottom() or (top + _PITCH) * zoom() < seen.top():
                continue
            self._paint_lane(painter, lane, top, track, strips)
        painter.end()

    def _strips(self) -> Lanes:
        """Return the vertical positions of the strips (dense part, experts, KV cache) within the row of one layout."""
        experts = any(layer.expert_bytes for each in self._sides if each is not None for layer in each.layers)
        if experts:
            return Lanes(1, _PITCH, Strip(2, 6), Strip(9, 6), Strip(16, 3))
        return Lanes(1, _PITCH, Strip(2, 12), None, Strip(15, 4))

    def _paint_lane(self, painter: QPainter, lane: ComparedLane, top: float, track: Track, strips: Lanes) -> None:
        palette, fonts = self._palette, self._fonts
        painter.fillRect(QRectF(0, top, self.width() / zoom(), 1), colour(palette.line))
        self._text(painter, QRectF(0, top + 10, _LABEL_WIDTH - 6, 18), lane.id, bold=True)
        self._text(painter, QRectF(0, top + 28, _LABEL_WIDTH - 6, 16), lane.name, bold=False)
        for side, (preview, content) in enumerate(zip(self._sides, lane.contents, strict=True)):
            y = top + _STRIP_TOP[side]
            painter.setFont(fonts.small)
            painter.setPen(colour(palette.dim))
            painter.drawText(
                QRectF(_LABEL_WIDTH - 2, y, _LETTER_WIDTH, _STRIP_HEIGHT), Qt.AlignmentFlag.AlignCenter, LETTERS[side]
            )
            rect = QRectF(track.left, y, track.right - track.left, _STRIP_HEIGHT)
            painter.setPen(Qt.PenStyle.NoPen)
            painter.setBrush(colour(palette.card))
            painter.drawRoundedRect(rect, 3, 3)
            if content is None or preview is None:
                if preview is not None:
                    self._text(painter, rect.adjusted(6, 0, 0, 0), tr("not in this rig"), bold=False)
                continue
            self._paint_strip(painter, content, y, track, strips)
            self._paint_difference(painter, lane, side, y, track, strips)
            self._paint_memory(painter, preview, content, track.right + _GAP, y)

    def _text(self, painter: QPainter, rect: QRectF, text: str, *, bold: bool) -> None:
        font = self._fonts.bold if bold else self._fonts.small
        painter.setFont(font)
        painter.setPen(colour(self._palette.text if bold else self._palette.dim))
        flags = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter
        painter.drawText(rect, int(flags) | Qt.TextFlag.TextSingleLine, elide(text, font, rect.width()))

    def _paint_strip(self, painter: QPainter, content: LaneContent, y: float, track: Track, strips: Lanes) -> None:
        paths = (
            blocks_paths(content.blocks, track, strips, y)
            if content.share is None
            else slices_paths(content.slices, track, strips, y)
        )
        for key, path in paths:
            painter.fillPath(path, colour(strip_colour(key, self._palette)))
        for shown, (left, right), name in (
            (content.has_embedding, track.embedding, self._palette.weights),
            (content.has_output, track.output, self._palette.compute),
        ):
            if shown:
                painter.fillRect(QRectF(left, y + 2, right - left, _STRIP_HEIGHT - 4), colour(name))

    def _paint_difference(
        self, painter: QPainter, lane: ComparedLane, side: int, y: float, track: Track, strips: Lanes
    ) -> None:
        """Hatch and frame the parts that only the layout of `side` (0 or 1) places on the device of `lane`.

        `y`: top of the track in which this layout is drawn.
        """
        palette = self._palette
        rects = [
            QRectF(track.edges[first], y + strip.top, track.edges[last + 1] - track.edges[first], strip.height)
            for key, layers in lane.only[side].items()
            for strip in (strip_of(key, strips),)
            for first, last in _spans(layers)
        ]
        for shown, (left, right) in zip(lane.ends[side], (track.embedding, track.output), strict=True):
            if shown:
                rects.append(QRectF(left, y + 2, right - left, _STRIP_HEIGHT - 4))
        for rect in rects:
            paint_hatch(painter, rect, colour(palette.panel), step=6.0, width=2.0)
            painter.setBrush(Qt.BrushStyle.NoBrush)
            painter.setPen(QPen(colour(palette.text), 1.0))
            painter.drawRect(rect)

    def _paint_memory(self, painter: QPainter, preview: Preview, content: LaneContent, left: float, y: float) -> None:
        row = next((each for each in preview.report.rows if each.id == content.device.id), None)
        if row is not None:
            bar = bar_of_row(row, None, placed_weights(preview, content, row))
            middle = y + (_STRIP_HEIGHT - _BAR_HEIGHT) / 2
            paint_bar(painter, QRectF(left, middle, _BAR_WIDTH - 6, _BAR_HEIGHT), bar, self._palette)

    def event(self, event: QEvent) -> bool:
        """Show the tooltip of the layer or of the memory bar under the pointer."""
        if isinstance(event, QHelpEvent) and event.type() is QEvent.Type.ToolTip:
            text = self._tip_at(event.pos().x() / zoom(), event.pos().y() / zoom())
            QToolTip.showText(event.globalPos(), plain_tool_tip(text), self)
            return True
        return super().event(event)

    def _tip_at(self, x: float, y: float) -> str:
        track, index = self._track(), int(y // _PITCH)
        if track is None or not 0 <= index < len(self.lanes):
            return ""
        lane = self.lanes[index]
        if x > track.right:
            side = 0 if y - index * _PITCH < _STRIP_TOP[1] else 1
            preview, content = self._sides[side], lane.contents[side]
            row = next((each for each in preview.report.rows if each.id == lane.id), None) if preview else None
            if preview is None or content is None or row is None:
                return ""
            return bar_tooltip(row, None, placed_weights(preview, content, row))
        lines = [f"{lane.id}: {lane.name}"]
        for letter, content in zip(LETTERS, lane.contents, strict=True):
            held = tr("no layers") if content is None or not content.ranges else ranges_text(content.ranges)
            lines.append(f"{letter}: {held}")
        return "\n".join(lines)


def _spans(layers: Iterable[int]) -> Sequence[tuple[int, int]]:
    """Return ranges of neighbouring layers, both ends included."""
    spans: list[tuple[int, int]] = []
    for layer in sorted(layers):
        if spans and spans[-1][1] == layer - 1:
            spans[-1] = spans[-1][0], layer
        else:
            spans.append((layer, layer))
    return spans
