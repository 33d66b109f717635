"""Rows of the list of conversations: a sign on the one that is pointed at or open, for what can be done with it."""

from __future__ import annotations

from PySide6.QtCore import QModelIndex, QPersistentModelIndex, QRect, Qt
from PySide6.QtGui import QPainter, QPalette
from PySide6.QtWidgets import QStyle, QStyledItemDelegate, QStyleOptionViewItem

SIGN = "⋯"
SIGN_PX = 28
"""How wide the place of the sign is."""
_PADDING_PX = 8
"""Beside a title, as of the stylesheet."""


def sign_place(row: QRect, direction: Qt.LayoutDirection) -> QRect:
    """Return where in a row the sign is."""
    place = QRect(row.right() - SIGN_PX + 1, row.top(), SIGN_PX, row.height())
    return QStyle.visualRect(direction, row, place)


class ChatRows(QStyledItemDelegate):
    """Paints rows as the style does; titles end before the sign."""

    def paint(
        self, painter: QPainter, option: QStyleOptionViewItem, index: QModelIndex | QPersistentModelIndex
    ) -> None:
        state = option.state
        is_marked = bool(state & (QStyle.StateFlag.State_MouseOver | QStyle.StateFlag.State_Selected))
        if not is_marked or not index.flags() & Qt.ItemFlag.ItemIsEditable:
            super().paint(painter, option, index)
            return
        self._paint_with_sign(painter, option, index)

    def _paint_with_sign(
        self, painter: QPainter, option: QStyleOptionViewItem, index: QModelIndex | QPersistentModelIndex
    ) -> None:
        shown = QStyleOptionViewItem(option)
        self.initStyleOption(shown, index)
        words = shown.text
        room = shown.rect.width() - SIGN_PX - 2 * _PADDING_PX
        shown.text = shown.fontMetrics.elidedText(words, Qt.TextElideMode.ElideRight, room)
        style = shown.widget.style()
        style.drawControl(QStyle.ControlElement.CE_ItemViewItem, shown, painter, shown.widget)
        painter.save()
        painter.setPen(shown.palette.color(QPalette.ColorRole.Text))
        place = sign_place(shown.rect, shown.direction)
        painter.drawText(place, int(Qt.AlignmentFlag.AlignCenter), SIGN)
        painter.restore()
