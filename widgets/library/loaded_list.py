"""The loaded models, above the recent ones."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QEvent, QObject, Qt, Signal
from PySide6.QtWidgets import QScrollArea, QSizePolicy, QVBoxLayout, QWidget

from engine.language import tr
from widgets.common.roles import plain_label
from widgets.library.loaded_entry import KeepAliveChoice, LoadedEntry
from widgets.library.loaded_row import LoadedRow

MAX_SHOWN = 3
"""More than this is scrolled: the recent models keep their place."""
SPACING = 4


class LoadedList(QWidget):
    """Hidden while nothing is loaded."""

    chosen = Signal(int)  # an entry's number
    end_requested = Signal(int)
    keep_alive_chosen = Signal(KeepAliveChoice)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._rows: dict[int, LoadedRow] = {}
        self._content = QWidget()
        self._content.installEventFilter(self)
        self._column = QVBoxLayout(self._content)
        self._column.setContentsMargins(0, 0, 0, 0)
        self._column.setSpacing(SPACING)
        self._scroll = QScrollArea()
        self._scroll.setWidgetResizable(True)
        self._scroll.setWidget(self._content)
        self._scroll.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self._scroll.setAccessibleName(tr("Loaded models"))
        self._scroll.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(SPACING)
        layout.addWidget(plain_label(tr("Loaded"), "dim"))
        layout.addWidget(self._scroll)
        layout.addWidget(plain_label(tr("Recent"), "dim"))
        self.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Fixed)
        self.hide()

    def rows(self) -> tuple[LoadedRow, ...]:
        """Return the rows from top to bottom."""
        return tuple(self._rows.values())

    def set_entries(self, entries: Sequence[LoadedEntry]) -> None:
        """Show `entries` in this order; a row stays while its number does, and so does the focus in it."""
        for number in set(self._rows) - {entry.number for entry in entries}:
            row = self._rows.pop(number)
            self._column.removeWidget(row)
            row.hide()
            row.deleteLater()
        ordered: dict[int, LoadedRow] = {}
        for position, entry in enumerate(entries):
            row = self._rows.get(entry.number) or self._make_row(entry)
            if row.entry != entry:
                row.set_entry(entry)
            if self._column.indexOf(row) != position:
                self._column.insertWidget(position, row)
            ordered[entry.number] = row
        self._rows = ordered
        self.setVisible(bool(entries))
        self._fit_height()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() is QEvent.Type.LayoutRequest:
            self._fit_height()
        return super().eventFilter(watched, event)

    def _make_row(self, entry: LoadedEntry) -> LoadedRow:
        row = LoadedRow(entry)
        row.clicked.connect(lambda: self.chosen.emit(entry.number))
        row.end_requested.connect(self.end_requested)
        row.keep_alive_chosen.connect(self.keep_alive_chosen)
        return row

    def _fit_height(self) -> None:
        heights = [row.sizeHint().height() for row in self.rows()]
        # A stylesheet lets buttons be squeezed; these are scrolled instead.
        self._content.setMinimumHeight(_stacked(heights))
        self._scroll.setFixedHeight(_stacked(heights[:MAX_SHOWN]))


def _stacked(heights: Sequence[int]) -> int:
    return sum(heights) + SPACING * max(0, len(heights) - 1)
