"""The graph of a device's memory over the last minutes, as a filled area; a missing reading is a gap.

It is painted by this module, not by pyqtgraph. The import of pyqtgraph and numpy took a sixth of the application's
start time, and 20 MB. Drawing with pyqtgraph took a third of the GUI thread's time while nothing else happened.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import groupby
from math import isnan, nan

from PySide6.QtCore import QPointF, QSize, Qt
from PySide6.QtGui import QBrush, QColor, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QSizePolicy, QWidget

from engine.base.language import tr
from engine.devices.telemetry.sample import Sample
from widgets.common.painting import keep_left_to_right
from widgets.common.palette import DARK, Palette

WINDOW_S = 120.0
"""Time span of the graph in seconds."""
MAX_POINTS = 1200
"""Maximum number of stored samples, in case they come much more often than once a second."""
FILL_ALPHA = 0.55
Point = tuple[float, float, float]
"""A reading: time in seconds, used bytes, bytes used by other programs; NaN for a missing reading."""


class MemoryPlot(QWidget):
    """Memory over the last `WINDOW_S` seconds in two areas: other programs, and above them Layerdeck's child processes.

    The newest sample is at the right edge. Mouse events pass through to the device card, which shows the tooltip and
    the menu. Wheel events scroll the strip of cards.
    """

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._points: deque[Point] = deque(maxlen=MAX_POINTS)
        self._top_bytes = 1
        self._limit_bytes: int | None = None
        self._palette = DARK
        self.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)
        # Time goes from left to right in all languages.
        keep_left_to_right(self)
        self.setAccessibleName(tr("Memory in the last minutes"))
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setFixedHeight(40)

    def sizeHint(self) -> QSize:
        return QSize(160, 40)

    def apply_palette(self, palette: Palette) -> None:
        """Use the colours of `palette`."""
        self._palette = palette
        self.update()

    def set_limit(self, limit_bytes: int | None) -> None:
        """Draw a dashed line at `limit_bytes`; None removes the line."""
        if limit_bytes != self._limit_bytes:
            self._limit_bytes = limit_bytes
            self.update()

    def add_sample(self, sample: Sample, total_bytes: int) -> None:
        """Append a reading. `total_bytes`: memory that the full height of the graph stands for."""
        if sample.used_bytes is None:
            self._points.append((sample.time_s, nan, nan))
        else:
            # Both come from different readings, so their difference can be slightly below 0.
            others_bytes = max(sample.used_bytes - (sample.own_bytes or 0), 0)
            self._points.append((sample.time_s, float(sample.used_bytes), float(others_bytes)))
        while self._points and self._points[0][0] < sample.time_s - WINDOW_S:
            self._points.popleft()
        self._top_bytes = max(total_bytes, 1)
        self.update()

    def points(self) -> tuple[Point, ...]:
        """Return the points as (seconds, used bytes, bytes of other programs); a gap has NaN."""
        return tuple(self._points)

    def paintEvent(self, _event: QPaintEvent) -> None:
        painter = QPainter(self)
        palette = self._palette
        painter.fillRect(self.rect(), QColor(palette.background))
        for series, color in ((1, palette.weights), (2, palette.other)):
            fill = QColor(color)
            fill.setAlphaF(FILL_ALPHA)
            for line in self._lines(series):
                painter.setPen(Qt.PenStyle.NoPen)
                painter.setBrush(QBrush(fill))
                bottom = float(self.height())
                painter.drawPolygon([QPointF(line[0].x(), bottom), *line, QPointF(line[-1].x(), bottom)])
                painter.setPen(QPen(QColor(color), 1))
                painter.drawPolyline(line)
        # Before the first sample it is not known what the height stands for.
        if self._limit_bytes is not None and self._points:
            y = round(self._y(self._limit_bytes))
            painter.setPen(QPen(QColor(palette.dim), 1, Qt.PenStyle.DashLine))
            painter.drawLine(0, y, self.width(), y)
        painter.end()

    def _lines(self, series: int) -> Iterator[list[QPointF]]:
        """Yield the points of the graph in pixels, one list for each part between gaps.

        `series`: index of the drawn value in a `Point`.
        """
        if not self._points:
            return
        now_s, width = self._points[-1][0], self.width()
        for is_gap, stretch in groupby(self._points, lambda point: isnan(point[series])):
            if not is_gap:
                yield [
                    QPointF(width * (1 + (point[0] - now_s) / WINDOW_S), self._y(point[series])) for point in stretch
                ]

    def _y(self, size_bytes: float) -> float:
        return self.height() * (1 - size_bytes / self._top_bytes)
