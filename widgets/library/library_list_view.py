"""The library's list: Enter and a double click open, Space marks a favourite, Delete asks for the trash."""

from __future__ import annotations

from PySide6.QtCore import QItemSelectionModel, QModelIndex, Qt, Signal
from PySide6.QtGui import QKeyEvent
from PySide6.QtWidgets import QListView, QWidget

from engine.language import tr
from engine.library.listed import Listed
from widgets.common.painting import keep_left_to_right
from widgets.library.entry_delegate import EntryDelegate
from widgets.library.library_list_model import LibraryListModel


class LibraryListView(QListView):
    """Keeps what is selected while the list changes under it."""

    selected = Signal(object)  # Listed | None
    open_requested = Signal()
    favourite_requested = Signal()
    removal_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.rows = LibraryListModel(self)
        keep_left_to_right(self)
        self.delegate = EntryDelegate(self)
        self.setModel(self.rows)
        self.setItemDelegate(self.delegate)
        self.setMouseTracking(True)
        self.setUniformItemSizes(True)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setVerticalScrollMode(QListView.ScrollMode.ScrollPerPixel)
        self.setAccessibleName(tr("Models"))
        self.doubleClicked.connect(lambda _index: self.open_requested.emit())
        self._key = ""

    @property
    def current(self) -> Listed | None:
        return self.rows.model_at(self.currentIndex())

    def show_models(self, models: tuple[Listed, ...]) -> None:
        """List `models`; what was selected stays so, where it is still there, else the first one is."""
        offset = self.verticalScrollBar().value()
        if self.rows.set_models(models):
            row = self.rows.row_of(self._key)
            self.setCurrentIndex(self.rows.index(0 if row is None else row))
            if row is not None:
                self.verticalScrollBar().setValue(offset)
        self._tell()

    def select(self, row: int) -> None:
        """Make a row the current one."""
        self.selectionModel().setCurrentIndex(self.rows.index(row), QItemSelectionModel.SelectionFlag.ClearAndSelect)

    def currentChanged(self, current: QModelIndex, previous: QModelIndex) -> None:  # type: ignore[override]
        super().currentChanged(current, previous)
        if current.isValid():
            self._tell()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if self.current is not None:
            match event.key():
                case Qt.Key.Key_Return | Qt.Key.Key_Enter:
                    self.open_requested.emit()
                    return
                case Qt.Key.Key_Space:
                    self.favourite_requested.emit()
                    return
                case Qt.Key.Key_Delete:
                    self.removal_requested.emit()
                    return
        super().keyPressEvent(event)

    def _tell(self) -> None:
        current = self.current
        if current is not None:
            self._key = current.entry.key
        self.selected.emit(current)
