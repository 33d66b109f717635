"""What lies over the lanes: the selection, the focus ring, the lane that would take a drop, the words of a drag."""

from __future__ import annotations

from dataclasses import dataclass

from PySide6.QtCore import QPointF, QRectF, Qt
from PySide6.QtGui import QPainter, QPen
from PySide6.QtWidgets import QGraphicsItem, QStyleOptionGraphicsItem, QWidget

from widgets.common.painting import colour
from widgets.common.palette import DARK, Palette
from widgets.common.text import Fonts, text_width

_PILL_HEIGHT = 22.0
_PIN_BAR = 3.0
_PIN_HEAD = 4.0


@dataclass(frozen=True, slots=True)
class Marks:
    """Rectangles in scene coordinates."""

    selected: tuple[QRectF, ...] = ()
    hovered: QRectF | None = None
    focused: QRectF | None = None
    target: QRectF | None = None
    pinned: tuple[QRectF, ...] = ()


class OverlayItem(QGraphicsItem):
    """Paints `Marks` above the lanes and below the handles."""

    def __init__(self) -> None:
        super().__init__()
        self._marks = Marks()
        self._palette = DARK
        self._bounds = QRectF()
        self.setZValue(1)

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
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(colour(palette.text))
        for rect in marks.pinned:
            painter.drawRect(QRectF(rect.left(), rect.top(), rect.width(), _PIN_BAR))
            painter.drawEllipse(QPointF(rect.left() + _PIN_HEAD, rect.top() + _PIN_BAR), _PIN_HEAD, _PIN_HEAD)
        painter.setPen(QPen(colour(palette.text), 1.5))
        painter.setBrush(colour(palette.text, 0.14))
        for rect in marks.selected:
            painter.drawRoundedRect(rect, 3, 3)
        if marks.focused is not None:
            painter.setBrush(Qt.BrushStyle.NoBrush)
            painter.setPen(QPen(colour(palette.accent), 2.0))
            painter.drawRoundedRect(marks.focused.adjusted(-2, -2, 2, 2), 4, 4)


class PillItem(QGraphicsItem):
    """A few words near the pointer, above everything else: what the drag would do."""

    def __init__(self, fonts: Fonts) -> None:
        super().__init__()
        self._font = fonts.small
        self._text = ""
        self._palette = DARK
        self._rect = QRectF()
        self.setZValue(5)
        self.hide()

    def set_text(self, text: str, at: QPointF, bounds: QRectF, palette: Palette) -> None:
        """Show `text` above the point `at`, or below it where there is no room inside `bounds`; "" hides it."""
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
        """Return the pill's rectangle in scene coordinates."""
        return self._rect.adjusted(-1, -1, 1, 1)

    def paint(self, painter: QPainter, option: QStyleOptionGraphicsItem, widget: QWidget | None = None) -> None:
        """Paint the pill in the colours of text, turned round."""
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(colour(self._palette.text))
        painter.drawRoundedRect(self._rect, _PILL_HEIGHT / 2, _PILL_HEIGHT / 2)
        painter.setPen(colour(self._palette.panel))
        painter.setFont(self._font)
        painter.drawText(self._rect, int(Qt.AlignmentFlag.AlignCenter), self._text)
