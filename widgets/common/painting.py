"""Colours and textures for painted widgets."""

from __future__ import annotations

from functools import lru_cache

from PySide6.QtCore import QLineF, QRectF, Qt
from PySide6.QtGui import QColor, QPainter, QPen
from PySide6.QtWidgets import QWidget


def keep_left_to_right(widget: QWidget) -> None:
    """Paint `widget` from left to right also in languages that are written from right to left.

    Sequences of layers, bars and graphs are read from left to right in all languages, as numbers and axes are.
    """
    widget.setLayoutDirection(Qt.LayoutDirection.LeftToRight)


@lru_cache(maxsize=256)
def colour(name: str, opacity: float = 1.0) -> QColor:
    """Return the colour `#rrggbb` with `opacity`, 0 to 1. The object is shared: do not change it."""
    result = QColor(name)
    result.setAlphaF(opacity)
    return result


def mix(below: str, above: str, share: float) -> QColor:
    """Return the colour that results if `above` is painted over `below` with the opacity `share`, 0 to 1."""
    first, second = colour(below), colour(above)
    return QColor.fromRgbF(
        first.redF() * (1 - share) + second.redF() * share,
        first.greenF() * (1 - share) + second.greenF() * share,
        first.blueF() * (1 - share) + second.blueF() * share,
    )


def paint_hatch(painter: QPainter, rect: QRectF, line: QColor, *, step: float = 5.0, width: float = 1.5) -> None:
    """Paint diagonal lines over `rect`, `step` pixels apart: the pattern for memory that does not fit or is mapped."""
    painter.save()
    painter.setClipRect(rect)
    painter.setPen(QPen(line, width))
    height = rect.height()
    # Every line meets the top at a multiple of `step`, so that hatches side by side are one pattern. Lines lean by 45
    # degrees, so the first one begins one height to the left of the rectangle.
    start = rect.left() - height - rect.left() % step
    count = int((rect.width() + 2 * height) / step) + 2
    painter.drawLines(
        [QLineF(start + i * step, rect.bottom(), start + i * step + height, rect.top()) for i in range(count)]
    )
    painter.restore()
