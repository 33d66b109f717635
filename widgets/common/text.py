"""Fonts and measuring of text for painted widgets: fixed sizes, tabular figures, and elided text."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt
from PySide6.QtGui import QFont, QFontMetricsF, QGuiApplication

BODY_PX = 13
SMALL_PX = 11


class _Zoom:
    """The zoom factor of the interface, which the whole application shares."""

    factor = 1.0


def set_zoom(factor: float) -> None:
    """Set the zoom factor of the interface. It applies to fonts and lengths that are computed after this call."""
    _Zoom.factor = factor


def zoom() -> float:
    """Return the zoom factor of the interface; 1.0 is the normal size."""
    return _Zoom.factor


def zoomed(length_px: float) -> int:
    """Return `length_px`, a length at a zoom of 1, in pixels at the present zoom."""
    return round(length_px * _Zoom.factor)


def tabular(font: QFont) -> QFont:
    """Return `font` with digits of equal width, so that a number does not move when it changes."""
    result = QFont(font)
    # Proportional figures would make a line of numbers tremble with each reading.
    result.setFeature(QFont.Tag("tnum"), 1)
    return result


def ui_font(size_px: int = BODY_PX, *, bold: bool = False) -> QFont:
    """Return the application's font with tabular figures. `size_px`: size in pixels at a zoom of 1."""
    return _font(zoomed(size_px), bold=bold)


def _font(size_px: int, *, bold: bool) -> QFont:
    font = tabular(QGuiApplication.font())
    # Pixels and not points, because painted widgets have fixed heights in pixels.
    font.setPixelSize(size_px)
    font.setWeight(QFont.Weight.DemiBold if bold else QFont.Weight.Normal)
    return font


def text_width(text: str, font: QFont) -> float:
    """Return the width of `text` in pixels if it is written in `font`."""
    return QFontMetricsF(font).horizontalAdvance(text)


def elide(text: str, font: QFont, width: float) -> str:
    """Return `text`, cut at its end with an ellipsis if it is wider than `width` pixels."""
    return QFontMetricsF(font).elidedText(text, Qt.TextElideMode.ElideRight, max(width, 0.0))


def fitting(variants: Sequence[str], font: QFont, width: float) -> str:
    """Return the first of `variants` (longest first) that fits in `width` pixels; if none fits, the last one elided."""
    metrics = QFontMetricsF(font)
    for text in variants:
        if metrics.horizontalAdvance(text) <= width:
            return text
    return elide(variants[-1], font, width) if variants else ""


class Fonts:
    """The fonts of one painted widget, made once.

    They are not zoomed, because a painted widget scales its painter instead.
    """

    def __init__(self) -> None:
        self.body = _font(BODY_PX, bold=False)
        self.bold = _font(BODY_PX, bold=True)
        self.small = _font(SMALL_PX, bold=False)
