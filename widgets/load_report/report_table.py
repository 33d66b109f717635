"""The table of a load report, as widget and as text: a row for each device, a column for each part of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct
from PySide6.QtCore import Qt
from PySide6.QtGui import QColor, QPixmap
from PySide6.QtWidgets import QGridLayout, QLabel, QWidget

from engine.base.language import tr
from engine.base.units import format_bytes
from engine.planning.plan.report import DeviceRow
from widgets.common.boxes import h_box
from widgets.common.memory_bar import SegmentRole, segment_colour
from widgets.common.painting import keep_left_to_right
from widgets.common.palette import DARK, Palette
from widgets.common.roles import plain_label
from widgets.load_report.outcome import Outcome, ProposalText, format_difference


class Column(Struct, frozen=True):
    """A column of the table: one part of the memory, or the total.

    `size_bytes`: returns the size from the row of a device.
    `role`: the part of memory whose colour the heading has; None for the total.
    """

    title: str
    size_bytes: Callable[[DeviceRow], int]
    role: SegmentRole | None = None


ALL_COLUMNS = (
    Column(tr("Weights"), lambda row: row.weights_bytes, "weights"),
    Column(tr("Mapped"), lambda row: row.mapped_bytes, "other"),
    Column(tr("KV cache"), lambda row: row.kv_cache_bytes, "kv"),
    Column(tr("State"), lambda row: row.recurrent_bytes, "kv"),
    Column(tr("Compute"), lambda row: row.compute_bytes, "compute"),
    Column(tr("Output"), lambda row: row.output_bytes, "compute"),
    Column(tr("Draft"), lambda row: row.draft_bytes, "draft"),
    Column(tr("Overhead"), lambda row: row.overhead_bytes + row.answering_bytes, "other"),
    Column(tr("Total"), lambda row: row.need_bytes),
)
# Compared by translated titles: the language does not change while the process runs.
OPTIONAL_TITLES = frozenset({tr("Mapped"), tr("State"), tr("Draft"), tr("Overhead")})
DIFFERENCE_TITLE = tr("Difference")


class TableLine(Struct, frozen=True):
    """The texts of one device in the table.

    `measured`, `forecast`: measured and forecast memory, one text for each column. `forecast` is empty if unknown.
    `difference`: total of the measured memory minus that of the forecast.
    """

    device: str
    measured: tuple[str, ...]
    forecast: tuple[str, ...]
    difference: str


def visible_columns(rows: Sequence[DeviceRow]) -> tuple[Column, ...]:
    """Return the columns to show. Those of rare parts, such as a draft, are shown only if a device has such memory."""
    return tuple(
        column
        for column in ALL_COLUMNS
        if column.title not in OPTIONAL_TITLES or any(column.size_bytes(row) for row in rows)
    )


def table_lines(outcome: Outcome) -> tuple[TableLine, ...]:
    """Return the texts of a load report's memory table, one line for each device."""
    columns = visible_columns(outcome.rows)
    forecast = {row.id: row for row in outcome.forecast}
    return tuple(_line(row, forecast.get(row.id), columns) for row in outcome.rows)


def _line(row: DeviceRow, expected: DeviceRow | None, columns: Sequence[Column]) -> TableLine:
    return TableLine(
        device=row.id,
        measured=tuple(_cell(column.size_bytes(row)) for column in columns),
        forecast=() if expected is None else tuple(_cell(column.size_bytes(expected)) for column in columns),
        difference="" if expected is None else format_difference(row.need_bytes - expected.need_bytes),
    )


def _cell(size_bytes: int) -> str:
    return format_bytes(size_bytes) if size_bytes else "–"


SWATCH_PX = 9


class ReportTable(QWidget):
    """The memory table of one load report. Its contents do not change: each report gets a new table."""

    def __init__(self, outcome: Outcome, palette: Palette = DARK, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._swatches: list[tuple[QLabel, Column]] = []
        keep_left_to_right(self)
        self._grid = QGridLayout(self)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setHorizontalSpacing(20)
        self._grid.setVerticalSpacing(0)
        columns = visible_columns(outcome.rows)
        lines = table_lines(outcome)
        for position, column in enumerate(columns, start=1):
            self._grid.addWidget(self._header(column), 0, position, Qt.AlignmentFlag.AlignRight)
        if any(line.difference for line in lines):
            self._grid.addWidget(plain_label(DIFFERENCE_TITLE, "dim"), 0, len(columns) + 1, Qt.AlignmentFlag.AlignRight)
        for index, line in enumerate(lines):
            # Two rows of the grid for each device: measured, and the forecast below.
            self._add_line(1 + 2 * index, line)
        # An empty last column takes the spare width, so that the numbers stay together.
        self._grid.setColumnStretch(len(columns) + 2, 1)
        self.apply_palette(palette)

    def apply_palette(self, palette: Palette) -> None:
        """Use the colours that `palette` has for the parts of memory."""
        for label, column in self._swatches:
            if column.role is None:
                continue
            swatch = QPixmap(SWATCH_PX, SWATCH_PX)
            swatch.fill(QColor(segment_colour(palette, column.role)))
            label.setPixmap(swatch)

    def _header(self, column: Column) -> QWidget:
        header = QWidget()
        row = h_box(header, spacing=6)
        if column.role is not None:
            swatch = QLabel()
            self._swatches.append((swatch, column))
            row.addWidget(swatch)
        row.addWidget(plain_label(column.title, "dim"))
        return header

    def _add_line(self, at: int, line: TableLine) -> None:
        self._grid.addWidget(plain_label(line.device, "strong"), at, 0)
        for position, text in enumerate(line.measured, start=1):
            self._grid.addWidget(plain_label(text), at, position, Qt.AlignmentFlag.AlignRight)
        self._grid.addWidget(plain_label(line.difference), at, len(line.measured) + 1, Qt.AlignmentFlag.AlignRight)
        self._grid.setRowMinimumHeight(at, self.fontMetrics().lineSpacing() + 6)
        for position, text in enumerate(line.forecast, start=1):
            self._grid.addWidget(plain_label(text, "dim"), at + 1, position, Qt.AlignmentFlag.AlignRight)
        if line.forecast:
            self._grid.addWidget(plain_label(tr("forecast"), "dim"), at + 1, 0)


ATTEMPTS_TITLE = tr("Layouts tried")


def plain_report(outcome: Outcome) -> str:
    """Return the whole report as plain text, with the table aligned by spaces."""
    paragraphs = [f"{outcome.badge}: {outcome.sentence}"]
    if outcome.rows:
        paragraphs.append("\n".join(line for line in (outcome.rows_title, _table(outcome)) if line))
    paragraphs += [text for text in (outcome.detail, "\n".join(map(_proposal, outcome.proposals))) if text]
    if outcome.attempts:
        paragraphs.append("\n".join((ATTEMPTS_TITLE, *outcome.attempts)))
    return "\n\n".join(paragraphs) + "\n"


def _proposal(words: ProposalText) -> str:
    return f"{words.text} ({words.detail})" if words.detail else words.text


def _table(outcome: Outcome) -> str:
    head = [tr("device"), *(column.title for column in visible_columns(outcome.rows))]
    lines = table_lines(outcome)
    has_forecast = any(line.forecast for line in lines)
    cells = [[*head, DIFFERENCE_TITLE] if has_forecast else head]
    for line in lines:
        cells.append([line.device, *line.measured, line.difference] if has_forecast else [line.device, *line.measured])
        if line.forecast:
            cells.append([f"  {tr('forecast')}", *line.forecast, ""])
    # Counted in characters, for a fixed font: the text is pasted into issues and terminals.
    widths = [max(len(row[position]) for row in cells) for position in range(len(cells[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if position == 0 else cell.rjust(width)
            for position, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )
