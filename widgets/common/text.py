"""Fonts and text of what we paint ourselves: fixed sizes, figures of one width, and text that fits its place."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt
from PySide6.QtGui import QFont, QFontMetricsF, QGuiApplication

BODY_PX = 13
SMALL_PX = 11


def tabular(font: QFont) -> QFont:
    """Return `font` with figures of one width, for numbers that change in place."""
    result = QFont(font)
    result.setFeature(QFont.Tag("tnum"), 1)
    return result


def ui_font(size_px: int = BODY_PX, *, bold: bool = False) -> QFont:
    """Return the application's font in `size_px` pixels, with tabular figures."""
    font = tabular(QGuiApplication.font())
    font.setPixelSize(size_px)
    font.setWeight(QFont.Weight.DemiBold if bold else QFont.Weight.Normal)
    return font


def text_width(text: str, font: QFont) -> float:
    """Return the width of `text` in pixels."""
    return QFontMetricsF(font).horizontalAdvance(text)


def elide(text: str, font: QFont, width: float) -> str:
    """Return `text`, cut at its end with an ellipsis where it is wider than `width` pixels."""
    return QFontMetricsF(font).elidedText(text, Qt.TextElideMode.ElideRight, max(width, 0.0))


def fitting(variants: Sequence[str], font: QFont, width: float) -> str:
    """Return the first of `variants` (longest first) that fits in `width` pixels, else the last one elided."""
    metrics = QFontMetricsF(font)
    for text in variants:
        if metrics.horizontalAdvance(text) <= width:
            return text
    return elide(variants[-1], font, width) if variants else ""


class Fonts:
    """The fonts of one painted widget, made once."""

    def __init__(self) -> None:
        self.body = ui_font(BODY_PX)
        self.bold = ui_font(BODY_PX, bold=True)
        self.small = ui_font(SMALL_PX)
