"""The table of a report: a line per device, the forecast dim below what was measured."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtGui import QColor, QPixmap
from PySide6.QtWidgets import QGridLayout, QHBoxLayout, QLabel, QWidget

from engine.language import tr
from widgets.common.painting import keep_left_to_right
from widgets.common.palette import DARK, Palette
from widgets.common.roles import plain_label
from widgets.load_report.columns import DIFFERENCE_TITLE, Column, TableLine, table_lines, visible_columns
from widgets.load_report.outcome import Outcome

SWATCH_PX = 9


class ReportTable(QWidget):
    """Shows one outcome's rows; built once per outcome."""

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
            self._add_line(1 + 2 * index, line)
        self._grid.setColumnStretch(len(columns) + 2, 1)
        self.apply_palette(palette)

    def apply_palette(self, palette: Palette) -> None:
        """Use the part colours of `palette`."""
        for label, column in self._swatches:
            if column.color is None:
                continue
            swatch = QPixmap(SWATCH_PX, SWATCH_PX)
            swatch.fill(QColor(column.color(palette)))
            label.setPixmap(swatch)

    def _header(self, column: Column) -> QWidget:
        header = QWidget()
        row = QHBoxLayout(header)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(6)
        if column.color is not None:
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
