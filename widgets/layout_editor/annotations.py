"""Around the lanes: the ruler with layer numbers above, notes and the legend below."""

from __future__ import annotations

from dataclasses import dataclass

from PySide6.QtCore import QPointF, QRectF, QSize, Qt
from PySide6.QtGui import QPainter, QPaintEvent, QPen, QResizeEvent
from PySide6.QtWidgets import QSizePolicy, QVBoxLayout, QWidget

from engine.base.language import tr
from widgets.common.elided_label import ElidedLabel
from widgets.common.painting import colour, keep_left_to_right
from widgets.common.palette import DARK, Palette
from widgets.common.roles import set_role
from widgets.common.text import Fonts, text_width
from widgets.layout_editor.geometry import Track

RULER_HEIGHT = 24
_MIN_DISTANCE = 44.0


def ruler_step(n_layers: int, width: float, min_distance: float = _MIN_DISTANCE) -> int:
    """Return the power of two between numbered layers that keeps numbers `min_distance` pixels apart on average."""
    step = 1
    while step < n_layers and width / max(n_layers, 1) * step < min_distance:
        step *= 2
    return step


class Ruler(QWidget):
    """Numbers over the left ends of the layers."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self._fonts = Fonts()
        self._track: Track | None = None
        self._palette = DARK

    def set_track(self, track: Track | None, palette: Palette) -> None:
        """Number the layers of `track`."""
        if track != self._track or palette is not self._palette:
            self._track, self._palette = track, palette
            self.update()

    def sizeHint(self) -> QSize:
        """One line of small text."""
        return QSize(0, RULER_HEIGHT)

    def paintEvent(self, event: QPaintEvent) -> None:
        """Paint numbers and ticks; a number that would touch the one before is left out."""
        track = self._track
        if track is None or track.n_layers == 0:
            return
        painter = QPainter(self)
        painter.setFont(self._fonts.small)
        painter.setPen(colour(self._palette.dim))
        step = ruler_step(track.n_layers, track.edges[-1] - track.edges[0])
        free_from = -1.0
        for layer in range(0, track.n_layers, step):
            centre = round((track.edges[layer] + track.edges[layer + 1] - 1) / 2) + 0.5
            width = text_width(str(layer), self._fonts.small)
            if centre - width / 2 < free_from:
                continue
            free_from = centre + width / 2 + 8
            rect = QRectF(centre - width / 2 - 2, 0, width + 4, RULER_HEIGHT - 7)
            painter.drawText(rect, int(Qt.AlignmentFlag.AlignCenter), str(layer))
            painter.drawLine(QPointF(centre, RULER_HEIGHT - 5), QPointF(centre, RULER_HEIGHT - 2))
        painter.end()


_MAX_LINES = 3


class Notes(QWidget):
    """Up to three lines, each elided with its whole text as tooltip; the last one counts what is left."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._lines: tuple[tuple[str, bool], ...] = ()
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(4)
        self._labels = [ElidedLabel() for _ in range(_MAX_LINES)]
        for label in self._labels:
            column.addWidget(label)
        self.hide()

    def set_lines(self, lines: tuple[tuple[str, bool], ...]) -> None:
        """Show `lines`, each with whether it is bad."""
        if lines == self._lines:
            return
        self._lines = lines
        for index, label in enumerate(self._labels):
            label.setVisible(index < len(lines))
            if index >= len(lines):
                continue
            text, is_bad = lines[index]
            more = len(lines) - _MAX_LINES
            suffix = tr("  (and {more} more)", more=more) if more > 0 and index == _MAX_LINES - 1 else ""
            set_role(label, "error" if is_bad else "dim")
            label.setText(f"\N{WARNING SIGN} {text}{suffix}" if is_bad else text + suffix)
        self.setVisible(bool(lines))


_LEGEND_LINE = 20
_SWATCH = 10.0
_GAP = 20.0


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """An entry of the legend.

    colour_name: the name of a field of the palette.
    dashed: the swatch is a dashed line, not a block.
    """

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
        LegendEntry(tr("limit (margin subtracted)"), "text", dashed=True),
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
        self.setFixedHeight(_LEGEND_LINE)

    def set_parts(self, *, experts: bool, pipeline: bool) -> None:
        """Include or leave out the entries for experts and for copies of a pipeline."""
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
        """Wrap the entries to the new width."""
        self._fit_height()

    def _places(self) -> list[tuple[LegendEntry, float, float]]:
        places = []
        x = y = 0.0
        for entry in self._entries:
            width = _SWATCH + 6 + text_width(entry.text, self._fonts.small)
            if x and x + width > self.width():
                x, y = 0.0, y + _LEGEND_LINE
            places.append((entry, x, y))
            x += width + _GAP
        return places

    def _fit_height(self) -> None:
        self.setFixedHeight(int(self._places()[-1][2]) + _LEGEND_LINE)

    def paintEvent(self, event: QPaintEvent) -> None:
        """Paint swatches and words."""
        painter = QPainter(self)
        painter.setLayoutDirection(self.layoutDirection())
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setFont(self._fonts.small)
        for entry, x, y in self._places():
            self._paint_swatch(painter, entry, QRectF(x, y + (_LEGEND_LINE - _SWATCH) / 2, _SWATCH, _SWATCH))
            painter.setPen(colour(self._palette.dim))
            rect = QRectF(x + _SWATCH + 6, y, self.width(), _LEGEND_LINE)
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
