"""What lies over the lanes: the selection, the focus ring, the lane that would take a drop, and the words of a drag."""

from __future__ import annotations

from dataclasses import dataclass

from PySide6.QtCore import QPointF, QRectF, Qt
from PySide6.QtGui import QPainter, QPen
from PySide6.QtWidgets import QGraphicsItem, QStyleOptionGraphicsItem, QWidget

from widgets.common.painting import colour
from widgets.common.palette import DARK, Palette
from widgets.common.text import Fonts, text_width

_PILL_HEIGHT = 22.0


@dataclass(frozen=True, slots=True)
class Marks:
    """Rectangles in scene coordinates; `pill_at` is the point that the pill's words are about."""

    selected: tuple[QRectF, ...] = ()
    hovered: QRectF | None = None
    focused: QRectF | None = None
    target: QRectF | None = None
    pill: str = ""
    pill_at: tuple[float, float] = (0.0, 0.0)


class OverlayItem(QGraphicsItem):
    """Paints `Marks` above everything else."""

    def __init__(self, fonts: Fonts) -> None:
        super().__init__()
        self._fonts = fonts
        self._marks = Marks()
        self._palette = DARK
        self._bounds = QRectF()
        self.setZValue(5)
        self.setAcceptedMouseButtons(Qt.MouseButton.NoButton)

    def set_marks(self, marks: Marks, bounds: QRectF, palette: Palette) -> None:
        """Show `marks` inside the scene's `bounds`."""
        if bounds != self._bounds:
            self.prepareGeometryChange()
            self._bounds = bounds
        if marks != self._marks or palette is not self._palette:
            self._marks, self._palette = marks, palette
            self.update()

    def boundingRect(self) -> QRectF:
        """Return the whole scene."""
        return self._bounds

    def paint(self, painter: QPainter, option: QStyleOptionGraphicsItem, widget: QWidget | None = None) -> None:
        """Paint what is there."""
        marks, palette = self._marks, self._palette
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        if marks.target is not None:
            painter.setPen(QPen(colour(palette.accent), 1.5, Qt.PenStyle.DashLine))
            painter.setBrush(colour(palette.accent, 0.10))
            painter.drawRoundedRect(marks.target, 4, 4)
        if marks.hovered is not None:
            painter.setPen(QPen(colour(palette.text, 0.35), 1.0))
            painter.setBrush(colour(palette.text, 0.10))
            painter.drawRoundedRect(marks.hovered, 2, 2)
        painter.setPen(QPen(colour(palette.text), 1.5))
        painter.setBrush(colour(palette.text, 0.14))
        for rect in marks.selected:
            painter.drawRoundedRect(rect, 3, 3)
        if marks.focused is not None:
            painter.setBrush(Qt.BrushStyle.NoBrush)
            painter.setPen(QPen(colour(palette.accent), 2.0))
            painter.drawRoundedRect(marks.focused.adjusted(-2, -2, 2, 2), 4, 4)
        if marks.pill:
            self._paint_pill(painter, marks, palette)

    def _paint_pill(self, painter: QPainter, marks: Marks, palette: Palette) -> None:
        width = text_width(marks.pill, self._fonts.small) + 16
        x, y = marks.pill_at
        left = max(self._bounds.left() + 2, min(x - width / 2, self._bounds.right() - width - 2))
        above = y - _PILL_HEIGHT - 12
        top = above if above > self._bounds.top() + 2 else y + 16
        rect = QRectF(QPointF(left, top), QPointF(left + width, top + _PILL_HEIGHT))
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(colour(palette.text))
        painter.drawRoundedRect(rect, _PILL_HEIGHT / 2, _PILL_HEIGHT / 2)
        painter.setPen(colour(palette.panel))
        painter.setFont(self._fonts.small)
        painter.drawText(rect, int(Qt.AlignmentFlag.AlignCenter), marks.pill)
