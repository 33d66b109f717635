"""A read-only table of texts with one selected row."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QAbstractItemView, QHeaderView, QTableWidget, QTableWidgetItem, QWidget

from widgets.common.roles import plain_tool_tip


class RowTable(QTableWidget):
    """Table whose columns are as wide as their texts; the column with the index `wide` gets the remaining width.

    `name`: accessible name. Tab leaves the table; the arrow keys move through the rows.
    """

    def __init__(self, headings: Sequence[str], name: str, parent: QWidget | None = None, *, wide: int = -1) -> None:
        super().__init__(0, len(headings), parent)
        self.setHorizontalHeaderLabels(list(headings))
        self.setAccessibleName(name)
        self.verticalHeader().hide()
        self.setEditTriggers(QAbstractItemView.EditTrigger.NoEditTriggers)
        self.setSelectionBehavior(QAbstractItemView.SelectionBehavior.SelectRows)
        self.setSelectionMode(QAbstractItemView.SelectionMode.SingleSelection)
        # By default Tab goes through the cells of a table, and the keyboard never leaves a long one.
        self.setTabKeyNavigation(False)
        self.setWordWrap(True)
        header = self.horizontalHeader()
        header.setSectionResizeMode(QHeaderView.ResizeMode.ResizeToContents)
        # The remainder makes -1 the last column.
        header.setSectionResizeMode(wide % len(headings), QHeaderView.ResizeMode.Stretch)

    @property
    def chosen_row(self) -> int | None:
        """Index of the selected row; None if no row is selected."""
        rows = self.selectionModel().selectedRows()
        return rows[0].row() if rows else None

    def show_rows(
        self, rows: Sequence[Sequence[str]], tips: Sequence[Sequence[str]] | None = None, *, chosen: int | None = None
    ) -> None:
        """Replace the rows. `tips`: the tooltip of each cell; if it is None, the cell's text is the tooltip.

        `chosen`: index of the new row to select; None to select no row. The selection emits no signal.
        """
        # Selecting a row again would emit `itemSelectionChanged`, which its listener takes for a choice of the user.
        blocked = self.blockSignals(True)
        scroll_value = self.verticalScrollBar().value()
        self.clearSelection()
        self.setCurrentCell(-1, -1)
        self.setRowCount(0)
        self.add_rows(rows, tips)
        if chosen is not None:
            self.selectRow(chosen)
        self.verticalScrollBar().setValue(scroll_value)
        self.blockSignals(blocked)

    def add_rows(self, rows: Sequence[Sequence[str]], tips: Sequence[Sequence[str]] | None = None) -> None:
        """Append rows. `tips`: the tooltip of each cell; if it is None, the cell's text is the tooltip."""
        first = self.rowCount()
        self.setRowCount(first + len(rows))
        for row, texts in enumerate(rows):
            for column, text in enumerate(texts):
                item = QTableWidgetItem(text)
                item.setFlags(Qt.ItemFlag.ItemIsSelectable | Qt.ItemFlag.ItemIsEnabled)
                item.setToolTip(plain_tool_tip(text if tips is None else tips[row][column]))
                self.setItem(first + row, column, item)
        self.resizeRowsToContents()
