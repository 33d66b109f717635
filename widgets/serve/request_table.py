"""The table of requests to the API server, as Qt model and view, so that only visible rows are painted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from PySide6.QtCore import QAbstractTableModel, QModelIndex, QObject, QPersistentModelIndex, Qt
from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QAbstractItemView, QHeaderView, QTableView, QWidget

from engine.base.language import tr
from widgets.common.roles import plain_tool_tip

_Index = QModelIndex | QPersistentModelIndex
HEADINGS = (
    tr("Time"),
    tr("Client"),
    tr("Model"),
    tr("Prompt"),
    tr("Answer"),
    tr("Tokens/s"),
    tr("First token"),
    tr("Status"),
)
_NUMBERS = frozenset({3, 4, 5, 6})
"""Indices of the columns with numbers, which are aligned at the right."""
_MODEL = 2
_PADDING = 13
"""Padding beside the text of a cell in pixels, a little more than in the stylesheet."""


class RequestRow(Struct, frozen=True):
    """A request in the table.

    `number`: unique number of the request.
    `texts`: one text for each of `HEADINGS`.
    `tool_tip`: the whole row as sentences; if empty, the tooltip of a cell is its text.
    """

    number: int
    texts: tuple[str, ...]
    tool_tip: str = ""


class RequestModel(QAbstractTableModel):
    """Table model of the requests to the API server, newest first."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.rows: tuple[RequestRow, ...] = ()

    def set_rows(self, rows: Sequence[RequestRow]) -> None:
        """Replace the rows.

        Requests that remain keep their selection, and are painted again only if they have changed.
        """
        fresh, before = tuple(rows), self.rows
        known = {row.number for row in before}
        # The newest request is first: new rows come at the front and old ones leave at the end. Only these changes are
        # reported to the view, since a reset would lose the selection.
        n_added = next((index for index, row in enumerate(fresh) if row.number in known), len(fresh))
        kept = fresh[n_added:]
        if tuple(row.number for row in kept) != tuple(row.number for row in before[: len(kept)]):
            self.beginResetModel()
            self.rows = fresh
            self.endResetModel()
            return
        if len(kept) < len(before):
            self.beginRemoveRows(QModelIndex(), len(kept), len(before) - 1)
            self.rows = before[: len(kept)]
            self.endRemoveRows()
        if n_added:
            self.beginInsertRows(QModelIndex(), 0, n_added - 1)
            self.rows = (*fresh[:n_added], *self.rows)
            self.endInsertRows()
        changed = [index for index, row in enumerate(fresh) if row != self.rows[index]]
        self.rows = fresh
        for index in changed:
            self.dataChanged.emit(self.index(index, 0), self.index(index, len(HEADINGS) - 1))

    def rowCount(self, parent: _Index = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else len(self.rows)

    def columnCount(self, parent: _Index = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else len(HEADINGS)

    def data(self, index: _Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        """Return the text of a cell, its tooltip or its alignment."""
        if not index.isValid():
            return None
        row, column = self.rows[index.row()], index.column()
        if role == Qt.ItemDataRole.DisplayRole:
            return row.texts[column]
        if role == Qt.ItemDataRole.ToolTipRole:
            return plain_tool_tip(row.tool_tip or row.texts[column])
        if role == Qt.ItemDataRole.TextAlignmentRole:
            side = Qt.AlignmentFlag.AlignRight if column in _NUMBERS else Qt.AlignmentFlag.AlignLeft
            return side | Qt.AlignmentFlag.AlignVCenter
        return None

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        """Return the heading of a column."""
        if orientation is not Qt.Orientation.Horizontal:
            return None
        if role == Qt.ItemDataRole.DisplayRole:
            return HEADINGS[section]
        if role == Qt.ItemDataRole.TextAlignmentRole:
            side = Qt.AlignmentFlag.AlignRight if section in _NUMBERS else Qt.AlignmentFlag.AlignLeft
            return side | Qt.AlignmentFlag.AlignVCenter
        return None


class RequestTable(QTableView):
    """Table of the requests to the API server. Tab leaves it; the arrow keys move through the rows."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.requests = RequestModel(self)
        self.setModel(self.requests)
        self.setAccessibleName(tr("Requests to the API server"))
        self.verticalHeader().hide()
        self.setShowGrid(False)
        self.setWordWrap(False)
        self.setEditTriggers(QAbstractItemView.EditTrigger.NoEditTriggers)
        self.setSelectionBehavior(QAbstractItemView.SelectionBehavior.SelectRows)
        self.setSelectionMode(QAbstractItemView.SelectionMode.SingleSelection)
        self.setTabKeyNavigation(False)
        header = self.horizontalHeader()
        header.setHighlightSections(False)
        # Fixed widths from the headings: widths by content are measured anew with every change of a row.
        for column in range(len(HEADINGS)):
            header.setSectionResizeMode(column, QHeaderView.ResizeMode.Interactive)
        header.setSectionResizeMode(_MODEL, QHeaderView.ResizeMode.Stretch)
        header.setMinimumSectionSize(24)

    def showEvent(self, event: QShowEvent) -> None:
        """Fit the widths of the columns, now that the stylesheet has set the fonts."""
        super().showEvent(event)
        self._fit()

    def _fit(self) -> None:
        metrics, header = self.fontMetrics(), self.horizontalHeader()
        samples = ("00:00:00", "192.0.2.100", "", "00 000", "00000", "0000.0", "00.00 s", tr("in progress"))
        for column, sample in enumerate(samples):
            if column != _MODEL:
                width = metrics.horizontalAdvance(sample) + 2 * _PADDING
                self.setColumnWidth(column, max(width, header.sectionSizeHint(column)))
        self.verticalHeader().setDefaultSectionSize(metrics.height() + 6)

    @property
    def chosen(self) -> int | None:
        """Number of the selected request; None if none is selected."""
        rows = self.selectionModel().selectedRows()
        return self.requests.rows[rows[0].row()].number if rows else None
