"""The legend under the lanes: which colour and texture stands for what. It wraps where it does not fit."""

from __future__ import annotations

from dataclasses import dataclass

from PySide6.QtCore import QPointF, QRectF, QSize, Qt
from PySide6.QtGui import QPainter, QPaintEvent, QPen, QResizeEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from engine.language import tr
from widgets.common.painting import colour, keep_left_to_right
from widgets.common.palette import DARK, Palette
from widgets.common.text import Fonts, text_width

_LINE = 20
_SWATCH = 10.0
_GAP = 20.0


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """`colour_name` is a field of the palette; `dashed` entries are a line, others a block."""

    text: str
    colour_name: str
    dashed: bool = False


def legend_entries(*, experts: bool, pipeline: bool = False) -> tuple[LegendEntry, ...]:
    """Return the entries for a model with or without experts, on devices that run as a pipeline or do not."""
    return (
        LegendEntry(tr("other programs"), "other"),
        LegendEntry(tr("attention + dense"), "weights"),
        *((LegendEntry(tr("experts"), "experts"),) if experts else ()),
        LegendEntry(tr("KV cache"), "kv"),
        LegendEntry(tr("compute, output"), "compute"),
        *((LegendEntry(tr("copies for a pipeline"), "pipeline"),) if pipeline else ()),
        LegendEntry(tr("limit less margin"), "text", dashed=True),
    )


class Legend(QWidget):
    """Swatches with their words."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._fonts = Fonts()
        keep_left_to_right(self)
        self._palette = DARK
        self._entries = legend_entries(experts=False)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setFixedHeight(_LINE)

    def set_parts(self, *, experts: bool, pipeline: bool) -> None:
        """Name experts and the copies for a pipeline, or leave them out."""
        entries = legend_entries(experts=experts, pipeline=pipeline)
        if entries != self._entries:
            self._entries = entries
            self._fit_height()
            self.update()

    def apply_palette(self, palette: Palette) -> None:
        """Use the colours of `palette`."""
        self._palette = palette
        self.update()

    def sizeHint(self) -> QSize:
        """As many lines as the width needs."""
        return QSize(320, self.height())

    def resizeEvent(self, event: QResizeEvent) -> None:
        """Wrap anew."""
        self._fit_height()

    def _places(self) -> list[tuple[LegendEntry, float, float]]:
        places = []
        x = y = 0.0
        for entry in self._entries:
            width = _SWATCH + 6 + text_width(entry.text, self._fonts.small)
            if x and x + width > self.width():
                x, y = 0.0, y + _LINE
            places.append((entry, x, y))
            x += width + _GAP
        return places

    def _fit_height(self) -> None:
        self.setFixedHeight(int(self._places()[-1][2]) + _LINE)

    def paintEvent(self, event: QPaintEvent) -> None:
        """Paint swatches and words."""
        painter = QPainter(self)
        painter.setLayoutDirection(self.layoutDirection())
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setFont(self._fonts.small)
        for entry, x, y in self._places():
            self._paint_swatch(painter, entry, QRectF(x, y + (_LINE - _SWATCH) / 2, _SWATCH, _SWATCH))
            painter.setPen(colour(self._palette.dim))
            rect = QRectF(x + _SWATCH + 6, y, self.width(), _LINE)
            painter.drawText(rect, int(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter), entry.text)
        painter.end()

    def _paint_swatch(self, painter: QPainter, entry: LegendEntry, rect: QRectF) -> None:
        name: str = getattr(self._palette, entry.colour_name)
        if entry.dashed:
            pen = QPen(colour(name, 0.75), 1.5)
            pen.setDashPattern([2.0, 1.5])
            pen.setCapStyle(Qt.PenCapStyle.FlatCap)
            painter.setPen(pen)
            painter.drawLine(QPointF(rect.center().x(), rect.top() - 2), QPointF(rect.center().x(), rect.bottom() + 2))
            return
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(colour(name))
        painter.drawRoundedRect(rect, 2, 2)
