"""Chart of measured layouts: bars with confidence intervals, or lines of speed over context depth."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np
import pyqtgraph as pg
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QSizePolicy, QWidget

from engine.base.language import tr
from engine.machines.bench.results import Measure
from engine.machines.bench.tables import MEASURE_TEXTS, Row
from widgets.common.palette import DARK, Palette

_BAR = 0.6
"""Width of a bar, as a share of the distance from one bar to the next."""
_MAX_LABEL = 22
"""Maximum number of characters of a layout's name below its bar."""


class BenchChart(pg.PlotWidget):  # type: ignore[misc]
    """Chart that compares layouts by one measured quantity, such as the speed of generation.

    It ignores the mouse, since the table beside it has the numbers.
    """

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent, background=None, enableMenu=False)
        self.setMouseEnabled(x=False, y=False)
        self.hideButtons()
        self.enableMouse(False)
        self.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        for widget in (self, self.viewport()):
            widget.setAccessibleName(tr("Chart of the measured layouts"))
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)
        self.setMinimumHeight(160)
        self._palette = DARK
        self._rows: tuple[Row, ...] = ()
        self._measure: Measure = "generation"
        self._legend = self.addLegend(offset=(-8, 8))
        self.bars: tuple[tuple[str, float], ...] = ()
        """Name and height of each drawn bar, for tests; empty if lines are drawn."""
        self.lines: tuple[str, ...] = ()
        """Name of the layout of each drawn line, for tests; empty if bars are drawn."""
        self.apply_palette(DARK)

    def show_rows(self, rows: Sequence[Row], measure: Measure) -> None:
        """Draw the results of the layouts for one quantity: as bars, or as lines if there are several context depths.

        `rows`: results of all quantities; only those of the quantity `measure` are drawn.
        """
        self._rows, self._measure = tuple(rows), measure
        self._draw()

    def apply_palette(self, palette: Palette) -> None:
        """Use the colours of `palette`."""
        self._palette = palette
        self.setBackground(palette.background)
        for name in ("left", "bottom"):
            axis = self.getAxis(name)
            axis.setPen(pg.mkPen(palette.line))
            axis.setTextPen(pg.mkPen(palette.dim))
        self._draw()

    def _draw(self) -> None:
        self.clear()
        self._legend.clear()
        self.bars, self.lines = (), ()
        rows = [row for row in self._rows if row.measure == self._measure]
        for name in ("left", "bottom"):
            # Axes without anything drawn would show numbers that mean nothing.
            self.showAxis(name, bool(rows))
        if not rows:
            return
        self.setLabel("left", f"{MEASURE_TEXTS[self._measure]} ({rows[0].unit})")
        if len({row.depth for row in rows}) > 1:
            self._draw_lines(rows)
        else:
            self._draw_bars(rows)
        # Bars begin at 0: a cut axis exaggerates differences.
        top = max(row.high or row.value for row in rows)
        self.setYRange(0, top * 1.08, padding=0)

    def _colour(self, at: int) -> str:
        palette = self._palette
        colours = (palette.other, palette.weights, palette.kv, palette.experts, palette.compute, palette.pipeline)
        return colours[at % len(colours)]

    def _draw_bars(self, rows: Sequence[Row]) -> None:
        for at, row in enumerate(rows):
            colour = self._colour(0 if row.comparison is None else 1)
            self.addItem(pg.BarGraphItem(x=[at], height=[row.value], width=_BAR, brush=colour, pen=pg.mkPen(colour)))
        self._draw_intervals([(float(at), row) for at, row in enumerate(rows)])
        names = [row.layout if len(row.layout) <= _MAX_LABEL else row.layout[: _MAX_LABEL - 1] + "…" for row in rows]
        self.getAxis("bottom").setTicks([list(enumerate(names))])
        self.setLabel("bottom", "")
        self.setXRange(-0.6, max(1, len(rows)) - 0.4, padding=0)
        self.bars = tuple((row.layout, row.value) for row in rows)

    def _draw_lines(self, rows: Sequence[Row]) -> None:
        self.getAxis("bottom").setTicks(None)
        self.setLabel("bottom", tr("tokens already in the context"))
        names = list(dict.fromkeys(row.layout for row in rows))
        for at, name in enumerate(names):
            own = [row for row in rows if row.layout == name]
            colour = self._colour(at)
            self.plot(
                [row.depth for row in own],
                [row.value for row in own],
                pen=pg.mkPen(colour, width=2),
                symbol="o",
                symbolBrush=colour,
                symbolPen=pg.mkPen(colour),
                # pyqtgraph shows names as HTML, and those of a file may be anything.
                name=escape(name),
            )
        self._draw_intervals([(float(row.depth), row) for row in rows])
        deepest = max(row.depth for row in rows)
        self.setXRange(-0.03 * deepest, 1.05 * deepest, padding=0)
        self.lines = tuple(names)

    def _draw_intervals(self, placed: Sequence[tuple[float, Row]]) -> None:
        known = [(x, row, row.low, row.high) for x, row in placed if row.low is not None and row.high is not None]
        if not known:
            return
        self.addItem(
            pg.ErrorBarItem(
                x=np.array([x for x, *_ in known]),
                y=np.array([row.value for _, row, *_ in known]),
                top=np.array([max(0.0, high - row.value) for _, row, _, high in known]),
                bottom=np.array([max(0.0, row.value - low) for _, row, low, _ in known]),
                beam=0.0,
                pen=pg.mkPen(self._palette.text, width=2),
            )
        )
