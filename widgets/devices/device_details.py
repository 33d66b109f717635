"""The details of one device: its readings, the holders of its memory, and graphs of up to an hour."""

from __future__ import annotations

import csv
import io
from bisect import bisect_left
from collections.abc import Callable, Sequence
from math import inf, nan

import pyqtgraph as pg
import pyqtgraph.exporters
from msgspec import Struct
from PySide6.QtCore import QBuffer, QPointF, Qt, Signal
from PySide6.QtWidgets import QGridLayout, QHBoxLayout, QLabel, QPushButton, QWidget

from engine.base.language import tr
from engine.base.units import GIB, format_bytes
from engine.devices.device import Device, node_lines
from engine.devices.telemetry.sample import Sample
from widgets.common.dialog import Dialog
from widgets.common.inputs import ComboBox
from widgets.common.palette import Palette
from widgets.common.roles import plain_label
from widgets.common.row_table import RowTable
from widgets.devices.readings import NO_READING, HolderLine, PlotEvent, device_subtitle

SPANS_MIN = (1, 5, 15, 60)
"""Time spans that can be shown, in minutes."""
WIDTH_PX, HEIGHT_PX = 760, 640
_LABEL_SHARE = 0.2
"""Width of the label of a mark (an event such as a load), as a share of the time span.
If the next mark is closer than this, its label is drawn one line lower."""
_LABEL_LINES, _LABEL_STEP = 5, 0.16
"""Number of lines for the labels of marks (events such as a load), and distance of two lines as a share of the
graph's height.
"""


class _Graph(Struct, frozen=True):
    """A graph of one reading over time. `title`, `unit`: heading, and unit of the axis.

    `value`: returns the reading from a sample.
    `color`: name of a colour of the palette.
    `top`: upper end of the axis; None if it follows the values.
    """

    title: str
    unit: str
    value: Callable[[Sample], float | None]
    color: str
    top: float | None = None


def _gib(size_bytes: int | None) -> float | None:
    return None if size_bytes is None else size_bytes / GIB


_GRAPHS = (
    _Graph(tr("Memory"), "GiB", lambda sample: _gib(sample.used_bytes), "weights"),
    _Graph(tr("Utilisation"), "%", lambda sample: sample.utilization_percent, "kv", top=100.0),
    _Graph(tr("Temperature"), "°C", lambda sample: sample.temperature_c, "experts"),
    _Graph(tr("Power"), "W", lambda sample: sample.power_w, "compute"),
)


_COLUMNS = (
    "seconds", "used_bytes", "own_bytes", "utilization_percent", "temperature_c", "power_w", "core_clock_mhz",
    "memory_clock_mhz", "throttled_by", "mark",
)  # fmt: skip


def csv_text(samples: Sequence[Sample], marks: Sequence[PlotEvent] = ()) -> str:
    """Return readings and marks (events such as a load) as CSV, in the order of time.

    An empty field is a value that was not read.
    """
    first_s = min([each.time_s for each in samples[:1]] + [each.time_s for each in marks[:1]], default=0.0)
    # `DictWriter` leaves fields empty that a line does not have.
    lines: list[tuple[float, dict[str, object]]] = [(each.time_s, {"mark": each.text}) for each in marks]
    for each in samples:
        line: dict[str, object] = {name: getattr(each, name) for name in _COLUMNS[1:6]}
        if each.card is not None:
            line |= {name: getattr(each.card, name) for name in _COLUMNS[6:8]}
            line["throttled_by"] = "; ".join(each.card.throttled_by)
        lines.append((each.time_s, line))
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    for time_s, line in sorted(lines, key=lambda pair: pair[0]):
        writer.writerow({"seconds": f"{time_s - first_s:.1f}", **line})
    return text.getvalue()


def reading_lines(device: Device, sample: Sample | None) -> tuple[tuple[str, str], ...]:
    """Return the readings in `sample` as texts (name, value). Values that were not read are left out."""
    if sample is None or sample.used_bytes is None:
        return ((tr("Readings"), (sample.note if sample is not None else "") or NO_READING),)
    total_bytes = sample.total_bytes or device.total_bytes
    nodes = [(tr("NUMA"), line) for line in node_lines(device)]
    lines = [
        (tr("Memory"), tr("{used} of {total}", used=format_bytes(sample.used_bytes), total=format_bytes(total_bytes)))
    ]
    if sample.own_bytes is not None:
        lines.append((tr("Used by Layerdeck"), format_bytes(sample.own_bytes)))
    if sample.utilization_percent is not None:
        lines.append((tr("Utilisation"), f"{sample.utilization_percent:.0f} %"))
    if sample.temperature_c is not None:
        lines.append((tr("Temperature"), f"{sample.temperature_c:.0f} °C"))
    card = sample.card
    if sample.power_w is not None:
        limit = "" if card is None or card.power_limit_w is None else f" / {card.power_limit_w:.0f} W"
        lines.append((tr("Power"), f"{sample.power_w:.0f} W{limit}"))
    if card is not None:
        clocks = [f"{mhz:.0f} MHz" for mhz in (card.core_clock_mhz, card.memory_clock_mhz) if mhz is not None]
        if clocks:
            lines.append((tr("Clocks (core, memory)"), ", ".join(clocks)))
        if card.pcie_generation is not None and card.pcie_lanes is not None:
            lines.append(
                (
                    "PCIe",
                    tr(
                        "generation {generation}, {lanes} lanes", generation=card.pcie_generation, lanes=card.pcie_lanes
                    ),
                )
            )
        lines.append((tr("Clocks reduced because of"), ", ".join(card.throttled_by) or tr("nothing")))
    return (*lines, *nodes)


class DeviceDetails(Dialog):
    """Window with readings and graphs of one device. It is not modal, so it can stay open beside the main window.

    The owner calls `set_history` once, and then `add_sample` for each new sample.
    """

    csv_requested = Signal()
    picture_requested = Signal()

    def __init__(self, device: Device, palette: Palette, parent: QWidget | None = None) -> None:
        super().__init__(tr("{device}: details", device=device.id), parent, once=True)
        self._device, self._palette = device, palette
        self._samples: list[Sample] = []
        self._marks: list[PlotEvent] = []
        self._lines: list[pg.InfiniteLine] = []
        self.is_paused = False
        self._heading = plain_label(" · ".join(filter(None, (device.id, device_subtitle(device)))), "strong")
        self._readings = QGridLayout()
        self._readings.setHorizontalSpacing(16)
        self._readings.setColumnStretch(4, 1)
        self._labels: list[tuple[QLabel, QLabel]] = []
        self.holders = RowTable((tr("Program or model"), tr("Memory")), tr("Programs that use the memory"), wide=0)
        self.holders.setMinimumHeight(120)
        self.holders.setMaximumHeight(150)
        self.span_box = ComboBox()
        self.span_box.setAccessibleDescription(tr("Time span"))
        for minutes in SPANS_MIN:
            self.span_box.addItem(tr("{minutes} min", minutes=minutes), minutes)
        self.span_box.setCurrentIndex(1)
        self.span_box.currentIndexChanged.connect(lambda _index: self._draw())
        self.pause_button = QPushButton(tr("Pause"))
        self.pause_button.setCheckable(True)
        self.pause_button.toggled.connect(self._on_paused)
        self._pointed = plain_label("", "dim")
        self._plots = self._make_plots()
        controls = QHBoxLayout()
        for widget in (self.span_box, self.pause_button):
            controls.addWidget(widget)
        controls.addWidget(self._pointed, 1)
        self.add_button(tr("Save picture…"), self.picture_requested.emit)
        self.add_button(tr("Save CSV…"), self.csv_requested.emit)
        self.lay_out(self._heading, self._readings, self.holders, controls, self._view)
        self.resize(WIDTH_PX, HEIGHT_PX)

    @property
    def device(self) -> Device:
        return self._device

    @property
    def reading_text(self) -> str:
        """The present readings as text, one on each line."""
        return "\n".join(f"{name.text()}: {value.text()}" for name, value in self._labels if name.isVisibleTo(self))

    @property
    def pointed_text(self) -> str:
        """The values at the pointer as text; empty if the pointer is not over a graph."""
        return self._pointed.text()

    @property
    def shown_graphs(self) -> tuple[str, ...]:
        """Titles of the graphs that have values."""
        return tuple(graph.title for graph, plot, _curve in self._plots if plot.isVisible())

    def set_history(self, samples: Sequence[Sample], marks: Sequence[PlotEvent]) -> None:
        """Replace all readings and marks (events such as a load), and draw the graphs."""
        self._samples, self._marks = list(samples), list(marks)
        self._show_readings()
        self._draw()

    def add_sample(self, sample: Sample) -> None:
        """Append a reading. If the graphs are paused, only the texts above them are updated."""
        self._samples.append(sample)
        # Nothing older than the longest span can be shown.
        oldest_s = sample.time_s - 60.0 * SPANS_MIN[-1]
        del self._samples[: bisect_left(self._samples, oldest_s, key=lambda each: each.time_s)]
        self._marks = [mark for mark in self._marks if mark.time_s >= oldest_s]
        self._show_readings()
        if not self.is_paused:
            self._draw()

    def add_event(self, mark: PlotEvent) -> None:
        """Append a mark (an event such as a load). It is drawn with the next reading."""
        self._marks.append(mark)

    def set_holders(self, holders: Sequence[HolderLine]) -> None:
        """Show the programs and models that use memory of the device, with their bytes."""
        self.holders.show_rows(
            [(each.name, NO_READING if each.held_bytes is None else format_bytes(each.held_bytes)) for each in holders],
            chosen=self.holders.chosen_row,
        )

    def csv_text(self) -> str:
        """Return all readings and marks (events such as a load) as CSV."""
        return csv_text(self._samples, self._marks)

    def picture(self) -> bytes:
        """Return an image of the graphs as the bytes of a PNG file."""
        image = pg.exporters.ImageExporter(self._view.scene()).export(toBytes=True)
        data = QBuffer()
        data.open(QBuffer.OpenModeFlag.WriteOnly)
        image.save(data, "PNG")
        return bytes(data.data().data())

    def point_at(self, seconds_ago: float | None) -> None:
        """Show the values of the reading nearest to `seconds_ago` before the last reading; None hides the values."""
        for line in self._lines:
            line.setVisible(seconds_ago is not None)
        if seconds_ago is None or not self._samples:
            self._pointed.setText("")
            return
        wanted_s = self._samples[-1].time_s - seconds_ago
        nearest = min(self._samples, key=lambda each: abs(each.time_s - wanted_s))
        for line in self._lines:
            line.setValue(nearest.time_s - self._samples[-1].time_s)
        values = [
            f"{value:.2f} {graph.unit}" if graph.unit == "GiB" else f"{value:.0f} {graph.unit}"
            for graph in _GRAPHS
            if (value := graph.value(nearest)) is not None
        ]
        happened = [mark.text for mark in self._marks if abs(mark.time_s - nearest.time_s) <= 1.0]
        ago = tr("{seconds} s ago", seconds=round(self._samples[-1].time_s - nearest.time_s))
        self._pointed.setText("  ".join((ago, *values, *happened)))

    def _make_plots(self) -> tuple[tuple[_Graph, pg.PlotItem, pg.PlotDataItem], ...]:
        self._view = pg.GraphicsLayoutWidget()
        self._view.setBackground(self._palette.panel)
        # The viewport has the focus of a graphics view.
        for widget in (self._view, self._view.viewport()):
            widget.setAccessibleName(tr("Graphs of the readings"))
        self._view.scene().sigMouseMoved.connect(self._on_pointer)
        found = []
        for row, graph in enumerate(_GRAPHS):
            plot = self._view.addPlot(row=row, col=0)
            color = getattr(self._palette, graph.color)
            curve = plot.plot(pen=pg.mkPen(color, width=2), connect="finite")
            line = pg.InfiniteLine(angle=90, movable=False, pen=pg.mkPen(self._palette.dim))
            line.hide()
            plot.addItem(line, ignoreBounds=True)
            self._lines.append(line)
            plot.setLabel("left", f"{graph.title}, {graph.unit}")
            plot.getAxis("left").setWidth(64)
            # The unit is part of the title: a scaled axis would say "GiB (x0.001)" for small devices.
            plot.getAxis("left").enableAutoSIPrefix(False)
            # Ticks would have to say "minutes ago" for each graph; the span above and the pointer tell the time.
            plot.getAxis("bottom").setStyle(showValues=False)
            plot.showGrid(x=True, y=True, alpha=0.15)
            for name in ("left", "bottom"):
                axis = plot.getAxis(name)
                axis.setPen(self._palette.line)
                axis.setTextPen(self._palette.dim)
            plot.setMenuEnabled(False)
            plot.setMouseEnabled(x=False, y=False)
            plot.hideButtons()
            found.append((graph, plot, curve))
        return tuple(found)

    def _draw(self) -> None:
        span_s = 60.0 * int(self.span_box.currentData())
        newest_s = self._samples[-1].time_s if self._samples else 0.0
        first = bisect_left(self._samples, newest_s - span_s, key=lambda each: each.time_s)
        shown = self._samples[first:]
        times = [each.time_s - newest_s for each in shown]
        total_bytes = (shown[-1].total_bytes if shown else None) or self._device.total_bytes
        marks = [mark for mark in self._marks if mark.time_s >= newest_s - span_s]
        for number, (graph, plot, curve) in enumerate(self._plots):
            values = [graph.value(each) for each in shown]
            known = [value for value in values if value is not None]
            plot.setVisible(bool(known) or number == 0)
            curve.setData(times, [nan if value is None else value for value in values])
            top = total_bytes / GIB if number == 0 else graph.top or 1.2 * max(known, default=1.0)
            plot.setRange(xRange=(-span_s, 0.0), yRange=(0.0, max(top, 1e-3)), padding=0, disableAutoRange=True)
            self._draw_marks(plot, marks if number == 0 else (), newest_s)

    def _draw_marks(self, plot: pg.PlotItem, marks: Sequence[PlotEvent], newest_s: float) -> None:
        for old in [item for item in plot.items if getattr(item, "is_mark", False)]:
            plot.removeItem(old)
        level, before_s = 0, -inf
        near_s = _LABEL_SHARE * 60.0 * int(self.span_box.currentData())
        for mark in marks:
            # Labels of marks that are close go below each other; after the last line they begin at the top again.
            level = (level + 1) % _LABEL_LINES if mark.time_s - before_s < near_s else 0
            before_s = mark.time_s
            line = pg.InfiniteLine(
                pos=mark.time_s - newest_s,
                angle=90,
                movable=False,
                pen=pg.mkPen(self._palette.dim, style=Qt.PenStyle.DashLine),
                # pyqtgraph takes a label for a format string, and names of models come from files.
                label=mark.text.replace("{", "{{").replace("}", "}}"),
                labelOpts={
                    "color": self._palette.dim,
                    "position": 0.95 - _LABEL_STEP * level,
                    "anchors": [(0, 0), (0, 0)],
                },
            )
            line.is_mark = True
            plot.addItem(line, ignoreBounds=True)

    def _on_pointer(self, position: QPointF) -> None:
        for _graph, plot, _curve in self._plots:
            if plot.isVisible() and plot.sceneBoundingRect().contains(position):
                self.point_at(-plot.vb.mapSceneToView(position).x())
                return
        self.point_at(None)

    def _on_paused(self, paused: bool) -> None:
        self.is_paused = paused
        if not paused:
            self._draw()

    def _show_readings(self) -> None:
        lines = reading_lines(self._device, self._samples[-1] if self._samples else None)
        while len(self._labels) < len(lines):
            name, value = plain_label("", "dim"), plain_label("")
            row = len(self._labels)
            # Two columns of pairs: the graphs below need the height.
            self._readings.addWidget(name, row // 2, 2 * (row % 2))
            self._readings.addWidget(value, row // 2, 2 * (row % 2) + 1)
            self._labels.append((name, value))
        for number, (name, value) in enumerate(self._labels):
            is_used = number < len(lines)
            name.setVisible(is_used)
            value.setVisible(is_used)
            if is_used:
                name.setText(lines[number][0])
                value.setText(lines[number][1])
