"""The graph of a device's memory over the last minutes, as a filled area; a missing reading is a gap."""

from __future__ import annotations

from collections import deque
from math import nan

import pyqtgraph as pg
from PySide6.QtCore import QRectF, QSize, Qt
from PySide6.QtGui import QColor
from PySide6.QtWidgets import QSizePolicy, QWidget

from engine.base.language import tr
from engine.devices.telemetry.sample import Sample
from widgets.common.palette import DARK, Palette

WINDOW_S = 120.0
"""Time span of the graph in seconds."""
MAX_POINTS = 1200
"""Maximum number of stored samples, in case they come much more often than once a second."""


class _Curve(pg.PlotCurveItem):  # type: ignore[misc]
    """A filled curve with fixed bounds. pyqtgraph would compute them from the points, three times for each sample."""

    bounds = QRectF()

    def boundingRect(self) -> QRectF:
        return self.bounds

    def set_bounds(self, bounds: QRectF) -> None:
        self.prepareGeometryChange()
        self.bounds = bounds


class MemoryPlot(pg.GraphicsView):  # type: ignore[misc]
    """Memory over the last `WINDOW_S` seconds in two areas: other programs, and above them Layerdeck's child processes.

    A bare `ViewBox` with curves is made in milliseconds. A `PlotWidget` would add axes, menus and mouse handling.
    """

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent, useOpenGL=False, background=None)
        self._points: deque[tuple[float, float, float]] = deque(maxlen=MAX_POINTS)
        self._top_bytes: int | None = None
        self._box = pg.ViewBox(enableMouse=False, enableMenu=False, defaultPadding=0.0)
        self.setCentralItem(self._box)
        self._all = _Curve(connect="finite", fillLevel=0.0, antialias=False)
        self._others = _Curve(connect="finite", fillLevel=0.0, antialias=False)
        self._limit = pg.InfiniteLine(angle=0, movable=False)
        self._limit.hide()
        for item in (self._all, self._others, self._limit):
            # Bounds are for auto-range, which is off: `add_sample` sets the range.
            self._box.addItem(item, ignoreBounds=True)
        self.enableMouse(False)
        self.setAcceptDrops(False)
        # The card below gets the mouse, for its tooltip and its menu, and the strip gets the wheel.
        self.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)
        self.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        for widget in (self, self.viewport()):
            widget.setAccessibleName(tr("Memory in the last minutes"))
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setFixedHeight(40)
        self.apply_palette(DARK)

    def sizeHint(self) -> QSize:
        return QSize(160, 40)

    def apply_palette(self, palette: Palette) -> None:
        """Use the colours of `palette`."""
        for curve, color in ((self._all, palette.weights), (self._others, palette.other)):
            curve.setPen(pg.mkPen(color, width=1))
            fill = QColor(color)
            fill.setAlphaF(0.55)
            curve.setBrush(fill)
        self._limit.setPen(pg.mkPen(palette.dim, width=1, style=Qt.PenStyle.DashLine))
        self.setBackground(palette.background)

    def set_limit(self, limit_bytes: int | None) -> None:
        """Draw a dashed line at `limit_bytes`; None removes the line."""
        self._limit.setVisible(limit_bytes is not None)
        if limit_bytes is not None:
            self._limit.setValue(float(limit_bytes))

    def add_sample(self, sample: Sample, total_bytes: int) -> None:
        """Append a reading. `total_bytes`: memory that the full height of the graph stands for."""
        if sample.used_bytes is None:
            # A missing reading is a gap: pyqtgraph draws no line to NaN with `connect="finite"`.
            self._points.append((sample.time_s, nan, nan))
        else:
            # Both come from different readings, so their difference can be slightly below 0.
            others_bytes = max(sample.used_bytes - (sample.own_bytes or 0), 0)
            self._points.append((sample.time_s, float(sample.used_bytes), float(others_bytes)))
        while self._points and self._points[0][0] < sample.time_s - WINDOW_S:
            self._points.popleft()
        # The newest sample is at 0 and the window at -120 s, so the curve moves and the range does not. Setting the
        # same range again would cost a tenth of what the window takes at rest.
        times = [point[0] - sample.time_s for point in self._points]
        self._all.setData(times, [point[1] for point in self._points])
        self._others.setData(times, [point[2] for point in self._points])
        if self._top_bytes != (top_bytes := max(total_bytes, 1)):
            self._top_bytes = top_bytes
            shown = QRectF(-WINDOW_S, 0.0, WINDOW_S, float(top_bytes))
            self._box.setRange(shown, padding=0, disableAutoRange=True)
            self._all.set_bounds(shown)
            self._others.set_bounds(shown)

    def points(self) -> tuple[tuple[float, float, float], ...]:
        """Return the readings as (time, used bytes, bytes of other programs). A missing reading has NaN as bytes.

        The time is on the monotonic clock, in seconds.
        """
        return tuple(self._points)
