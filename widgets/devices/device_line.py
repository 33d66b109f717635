"""All devices in one line: a live bar each, and in words what is wrong with one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from PySide6.QtCore import QRectF, QSize, Qt
from PySide6.QtGui import QColor, QPainter, QPaintEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from engine.language import tr
from engine.units import format_bytes, format_share
from widgets.common.painting import keep_left_to_right
from widgets.common.palette import DARK, Palette
from widgets.common.text import elide, text_width, ui_font
from widgets.common.tool_tips import plain_tool_tip

if TYPE_CHECKING:
    from widgets.devices.device_card import DeviceCard

HEIGHT_PX = 26
GAP_PX = 20.0
BAR_WIDTH_PX, BAR_HEIGHT_PX = 72.0, 6.0


class DeviceLine(QWidget):
    """Painted from the cards, which go on reading while they are out of sight."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._palette = DARK
        keep_left_to_right(self)
        self._cards: tuple[DeviceCard, ...] = ()
        self._font, self._bold = ui_font(12), ui_font(12, bold=True)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setAccessibleName(tr("Devices"))

    def apply_palette(self, palette: Palette) -> None:
        """Use the colours of `palette`."""
        self._palette = palette
        self.update()

    def show_cards(self, cards: Iterable[DeviceCard]) -> None:
        """Show what these cards say now."""
        self._cards = tuple(cards)
        lines = [" ".join(filter(None, (card.device.id, _numbers(card), card.alert.words))) for card in self._cards]
        self.setAccessibleDescription("; ".join(lines))
        sentences = [card.alert.sentence for card in self._cards]
        self.setToolTip(plain_tool_tip("\n".join(filter(None, [*lines, *sentences]))))
        self.update()

    def sizeHint(self) -> QSize:
        return QSize(200, HEIGHT_PX)

    def paintEvent(self, _event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setLayoutDirection(self.layoutDirection())
        left = 4.0
        # What is wrong is never what does not fit.
        for card in sorted(self._cards, key=lambda card: not card.alert.words):
            if left > self.width() - BAR_WIDTH_PX:
                break
            left = self._paint_device(painter, card, left) + GAP_PX
        painter.end()

    def _paint_device(self, painter: QPainter, card: DeviceCard, left: float) -> float:
        palette, alert = self._palette, card.alert.words
        left = self._paint_words(painter, card.device.id, left, palette.bad if alert else palette.text, bold=True) + 8
        bar = QRectF(left, (self.height() - BAR_HEIGHT_PX) / 2, BAR_WIDTH_PX, BAR_HEIGHT_PX)
        painter.fillRect(bar, QColor(palette.line))
        share = card.used_share
        if share is not None:
            bar.setWidth(BAR_WIDTH_PX * min(share, 1.0))
            painter.fillRect(bar, QColor(palette.bad if alert else palette.weights))
        left += BAR_WIDTH_PX + 8
        return self._paint_words(painter, alert or _numbers(card), left, palette.bad if alert else palette.dim)

    def _paint_words(self, painter: QPainter, words: str, left: float, colour: str, *, bold: bool = False) -> float:
        font = self._bold if bold else self._font
        words = elide(words, font, self.width() - left)
        width = text_width(words, font)
        painter.setFont(font)
        painter.setPen(QColor(colour))
        painter.drawText(QRectF(left, 0, width + 2, self.height()), Qt.AlignmentFlag.AlignVCenter.value, words)
        return left + width


def _numbers(card: DeviceCard) -> str:
    used, total = card.used_bytes, card.total_bytes
    return f"– / {format_bytes(total)}" if used is None else f"{format_share(used, total)} / {format_bytes(total)}"
