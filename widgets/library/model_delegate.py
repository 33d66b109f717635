"""Paints a model as two lines: title and dim detail, the open one on a card."""

from __future__ import annotations

from PySide6.QtCore import QObject, QRect, QSize, Qt
from PySide6.QtGui import QColor, QFont, QPainter
from PySide6.QtWidgets import QStyle, QStyledItemDelegate, QStyleOptionViewItem

from widgets.common.palette import DARK, Palette
from widgets.library.recent_list_model import CURRENT_ROLE, DETAIL_ROLE, AnyIndex

PADDING_X = 10
PADDING_Y = 7
RADIUS = 6


class ModelDelegate(QStyledItemDelegate):
    """Two elided lines in the colours of the palette."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._palette = DARK

    def set_palette(self, palette: Palette) -> None:
        """Use the colours of `palette` from the next paint on."""
        self._palette = palette

    def sizeHint(self, option: QStyleOptionViewItem, index: AnyIndex) -> QSize:
        return QSize(120, 2 * option.fontMetrics.lineSpacing() + 2 * PADDING_Y)

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: AnyIndex) -> None:
        is_current = bool(index.data(CURRENT_ROLE))
        is_hot = bool(option.state & (QStyle.StateFlag.State_MouseOver | QStyle.StateFlag.State_HasFocus))
        painter.save()
        painter.setLayoutDirection(option.direction)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        if is_current or is_hot:
            painter.setPen(QColor(self._palette.accent) if is_hot and not is_current else Qt.PenStyle.NoPen)
            painter.setBrush(QColor(self._palette.card))
            painter.drawRoundedRect(option.rect.adjusted(1, 1, -1, -1), RADIUS, RADIUS)
        font = QFont(option.font)
        font.setBold(is_current)
        line = option.fontMetrics.lineSpacing()
        place = option.rect.adjusted(PADDING_X, PADDING_Y, -PADDING_X, -PADDING_Y)
        title, detail = str(index.data()), str(index.data(DETAIL_ROLE))
        self._draw(painter, QRect(place.left(), place.top(), place.width(), line), title, font, self._palette.text)
        below = QRect(place.left(), place.top() + line, place.width(), line)
        self._draw(painter, below, detail, option.font, self._palette.dim)
        painter.restore()

    def _draw(self, painter: QPainter, place: QRect, text: str, font: QFont, color: str) -> None:
        painter.setFont(font)
        painter.setPen(QColor(color))
        shown = painter.fontMetrics().elidedText(text, Qt.TextElideMode.ElideRight, place.width())
        painter.drawText(place, Qt.AlignmentFlag.AlignLeft.value | Qt.AlignmentFlag.AlignVCenter.value, shown)
