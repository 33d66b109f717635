"""Boundary handles: a line through the lanes of two neighbouring runs, with a dot to take it by."""

from __future__ import annotations

from PySide6.QtCore import QPointF, QRectF
from PySide6.QtGui import QPainter, QPen
from PySide6.QtWidgets import QGraphicsItem, QStyleOptionGraphicsItem, QWidget

from engine.layout.layout import Layout
from widgets.common.painting import colour
from widgets.common.palette import DARK, Palette
from widgets.layout_editor.geometry import HandlePlace, Lanes, Track

_RADIUS = 5.0
_REACH = 10.0
_OVERHANG = 5.0


def handle_places(layout: Layout, lane_of: dict[str, int], track: Track, lanes: Lanes) -> tuple[HandlePlace, ...]:
    """Return the handle of every boundary: its line spans the lanes of both runs, its dot is in the left run's lane."""
    places = []
    for index, (left, right) in enumerate(zip(layout.runs, layout.runs[1:], strict=False)):
        upper, lower = sorted((lane_of[left.device], lane_of[right.device]))
        places.append(
            HandlePlace(
                index=index,
                layer=right.first,
                x=track.edges[right.first] - 0.5,
                top=lanes.track_top(upper) - _OVERHANG,
                bottom=lanes.track_top(lower) + lanes.track_height + _OVERHANG,
                dot_y=lanes.track_top(lane_of[left.device]) + lanes.track_height / 2,
            )
        )
    return tuple(places)


class HandleItem(QGraphicsItem):
    """One handle. `active` while it is hovered, dragged or has the keyboard."""

    def __init__(self) -> None:
        super().__init__()
        self._place: HandlePlace | None = None
        self._palette = DARK
        self._active = False
        self._focused = False
        self.setZValue(2)

    def set_place(self, place: HandlePlace, palette: Palette) -> None:
        """Move to `place`."""
        if place == self._place and palette is self._palette:
            return
        self.prepareGeometryChange()
        self._place, self._palette = place, palette
        self.update()

    def set_marks(self, *, active: bool, focused: bool) -> None:
        """Show that the pointer (`active`) or the keyboard (`focused`) has it."""
        if (active, focused) != (self._active, self._focused):
            self._active, self._focused = active, focused
            self.setZValue(3 if active or focused else 2)
            self.update()

    def boundingRect(self) -> QRectF:
        """Return the line and the largest dot, in scene coordinates."""
        if self._place is None:
            return QRectF()
        place = self._place
        return QRectF(place.x - _REACH, place.top, 2 * _REACH, place.bottom - place.top)

    def paint(self, painter: QPainter, option: QStyleOptionGraphicsItem, widget: QWidget | None = None) -> None:
        """Paint line and dot; the ring is for the keyboard."""
        if self._place is None:
            return
        place, palette = self._place, self._palette
        strong = self._active or self._focused
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(QPen(colour(palette.accent), 2.0 if strong else 1.5))
        painter.drawLine(QPointF(place.x, place.top), QPointF(place.x, place.bottom))
        centre = QPointF(place.x, place.dot_y)
        if self._focused:
            painter.setPen(QPen(colour(palette.text), 2.0))
            painter.setBrush(colour(palette.background))
            painter.drawEllipse(centre, _RADIUS + 3.5, _RADIUS + 3.5)
        painter.setPen(QPen(colour(palette.background), 1.5))
        painter.setBrush(colour(palette.accent))
        radius = _RADIUS + (1.0 if strong else 0.0)
        painter.drawEllipse(centre, radius, radius)
