"""Paints a model of the library: name and badges over a dim line, how it fits at the right."""

from __future__ import annotations

from PySide6.QtCore import QObject, QRect, QSize, Qt
from PySide6.QtGui import QColor, QFont, QFontMetrics, QPainter
from PySide6.QtWidgets import QStyle, QStyledItemDelegate, QStyleOptionViewItem

from widgets.common.palette import DARK, Palette
from widgets.library.entry_words import RowWords
from widgets.library.library_list_model import WORDS_ROLE
from widgets.library.recent_list_model import AnyIndex

PADDING_X = 12
PADDING_Y = 8
RADIUS = 6
FIT_SHARE = 0.34
"""Of the row's width, for how it fits, at most `MAX_FIT`."""
MAX_FIT = 240
_BADGE_PADDING = 6
_GAP = 6
_FAVOURITE = "★"


class EntryDelegate(QStyledItemDelegate):
    """All rows are equally high."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._palette = DARK

    def set_palette(self, palette: Palette) -> None:
        """Use the colours of `palette` from the next paint on."""
        self._palette = palette

    def sizeHint(self, option: QStyleOptionViewItem, index: AnyIndex) -> QSize:
        return QSize(240, 2 * option.fontMetrics.lineSpacing() + 2 * PADDING_Y + 4)

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: AnyIndex) -> None:
        words = index.data(WORDS_ROLE)
        if not isinstance(words, RowWords):
            return
        painter.save()
        painter.setLayoutDirection(option.direction)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        self._draw_ground(painter, option)
        line = option.fontMetrics.lineSpacing()
        place = option.rect.adjusted(PADDING_X, PADDING_Y, -PADDING_X, -PADDING_Y)
        fit_width = min(MAX_FIT, round(place.width() * FIT_SHARE))
        left = QRect(place.left(), place.top(), place.width() - fit_width - 2 * _GAP, line)
        right = QRect(place.right() - fit_width, place.top(), fit_width, line)
        below = line + 4
        self._draw_title(painter, left, option.font, words)
        self._draw(painter, left.translated(0, below), words.detail, option.font, self._palette.dim)
        colour = str(getattr(self._palette, words.fit_colour))
        self._draw(painter, right, words.fit, option.font, colour, right=True)
        self._draw(painter, right.translated(0, below), words.speed, option.font, self._palette.dim, right=True)
        painter.restore()

    def _draw_ground(self, painter: QPainter, option: QStyleOptionViewItem) -> None:
        is_chosen = bool(option.state & QStyle.StateFlag.State_Selected)
        is_hot = bool(option.state & QStyle.StateFlag.State_MouseOver)
        if not is_chosen and not is_hot:
            return
        has_focus = is_chosen and bool(option.state & QStyle.StateFlag.State_HasFocus)
        painter.setPen(QColor(self._palette.accent) if has_focus else Qt.PenStyle.NoPen)
        painter.setBrush(QColor(self._palette.line if is_chosen else self._palette.card))
        painter.drawRoundedRect(option.rect.adjusted(1, 1, -1, -1), RADIUS, RADIUS)

    def _draw_title(self, painter: QPainter, place: QRect, font: QFont, words: RowWords) -> None:
        """Draw the name and, as far as there is room, its badges."""
        bold = QFont(font)
        bold.setBold(True)
        left = place.left()
        if words.is_favourite:
            self._draw(painter, place, _FAVOURITE, bold, self._palette.experts)
            left += QFontMetrics(bold).horizontalAdvance(_FAVOURITE) + _GAP
        small = QFont(font)
        small.setPixelSize(11)
        metrics = QFontMetrics(small)
        widths = [metrics.horizontalAdvance(badge) + 2 * _BADGE_PADDING for badge in words.badges]
        name_width = QFontMetrics(bold).horizontalAdvance(words.title)
        room = place.right() - left
        shown = min(name_width, max(room - sum(widths) - _GAP * len(widths), room // 2))
        self._draw(painter, QRect(left, place.top(), shown + 1, place.height()), words.title, bold, self._palette.text)
        left += shown + _GAP + 2
        for badge, width in zip(words.badges, widths, strict=True):
            if left + width > place.right():
                break
            self._draw_badge(painter, QRect(left, place.top(), width, place.height()), badge, small)
            left += width + _GAP

    def _draw_badge(self, painter: QPainter, place: QRect, text: str, font: QFont) -> None:
        painter.setPen(QColor(self._palette.line))
        painter.setBrush(QColor(self._palette.background))
        painter.drawRoundedRect(place.adjusted(0, 0, -1, -1), place.height() / 2, place.height() / 2)
        painter.setFont(font)
        painter.setPen(QColor(self._palette.dim))
        painter.drawText(place, Qt.AlignmentFlag.AlignCenter, text)

    def _draw(
        self, painter: QPainter, place: QRect, text: str, font: QFont, colour: str, *, right: bool = False
    ) -> None:
        painter.setFont(font)
        painter.setPen(QColor(colour))
        shown = painter.fontMetrics().elidedText(text, Qt.TextElideMode.ElideRight, place.width())
        side = Qt.AlignmentFlag.AlignRight if right else Qt.AlignmentFlag.AlignLeft
        painter.drawText(place, side.value | Qt.AlignmentFlag.AlignVCenter.value, shown)
