"""The model panel: loaded models, recent models with a search, and buttons for a file, the demo model and a lab rig."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PySide6.QtCore import QModelIndex, QSortFilterProxyModel, Qt, Signal
from PySide6.QtWidgets import QHBoxLayout, QLineEdit, QPushButton, QStackedWidget, QWidget

from engine.base.language import tr
from widgets.common.boxes import v_box
from widgets.common.palette import Palette
from widgets.library.loaded_models import LoadedList
from widgets.library.recent_models import (
    SEARCH_ROLE,
    ModelChoice,
    ModelDelegate,
    RecentListModel,
    RecentListView,
    RecentModel,
)
from widgets.library.welcome_panel import StartPanel


class ModelPanel(QWidget):
    """Lists loaded and recent models, and emits a request to open one. It reads no files."""

    model_chosen = Signal(ModelChoice)
    open_requested = Signal()
    demo_requested = Signal()
    lab_requested = Signal()
    try_demo_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._model = RecentListModel(self)
        self._filtered = QSortFilterProxyModel(self)
        self._filtered.setSourceModel(self._model)
        # Search also finds file names, which the rows do not show.
        self._filtered.setFilterRole(SEARCH_ROLE)
        self._filtered.setFilterCaseSensitivity(Qt.CaseSensitivity.CaseInsensitive)
        self._delegate = ModelDelegate(self)
        self.search_edit = QLineEdit()
        self.loaded_list = LoadedList()
        self.list_view = RecentListView()
        self.start_panel = StartPanel()
        self.open_button = QPushButton(tr("Open…"))
        self.demo_button = QPushButton(tr("Demo model"))
        self.lab_button = QPushButton(tr("Lab rig…"))
        self._pages = QStackedWidget()
        self._build()
        self._connect()
        self.set_recent(())

    def apply_palette(self, palette: Palette) -> None:
        """Apply the colours of `palette`."""
        self._delegate.set_palette(palette)
        self.list_view.viewport().update()

    def set_recent(self, models: Sequence[RecentModel]) -> None:
        """List the recent models in this order; if there are none, show `StartPanel` instead."""
        self._model.set_models(models)
        self._pages.setCurrentIndex(0 if models else 1)
        for widget in (self.search_edit, self.open_button, self.demo_button):
            widget.setVisible(bool(models))

    def set_current(self, path: Path | None) -> None:
        """Mark the model at `path` as the open one."""
        self._model.set_current(path)

    def visible_titles(self) -> tuple[str, ...]:
        """Return the titles of the listed recent models, from top to bottom."""
        return tuple(str(self._filtered.index(row, 0).data()) for row in range(self._filtered.rowCount()))

    def _build(self) -> None:
        self.search_edit.setPlaceholderText(tr("Search…"))
        self.search_edit.setClearButtonEnabled(True)
        self.search_edit.setAcceptDrops(False)  # Dropped files are for the window.
        self.search_edit.setAccessibleName(tr("Search models"))
        self.list_view.setModel(self._filtered)
        self.list_view.setItemDelegate(self._delegate)
        self.list_view.setMouseTracking(True)
        self.list_view.setUniformItemSizes(True)
        self.list_view.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.list_view.setAccessibleName(tr("Recent models"))
        self.open_button.setToolTip(tr("Open a GGUF file"))
        self.demo_button.setToolTip(tr("Create the demo model if needed, and open the model"))
        self.lab_button.setToolTip(tr("Simulate devices with local RPC workers of limited memory"))
        for button in (self.demo_button, self.lab_button):
            button.setProperty("role", "flat")
        self._pages.addWidget(self.list_view)
        self._pages.addWidget(self.start_panel)
        heading = QHBoxLayout()
        heading.setSpacing(8)
        heading.addWidget(self.search_edit, 1)
        heading.addWidget(self.open_button)
        below = QHBoxLayout()
        below.setSpacing(4)
        below.addWidget(self.demo_button)
        below.addWidget(self.lab_button)
        below.addStretch(1)
        layout = v_box(self, spacing=8, margins=(8, 4, 8, 8))
        layout.addLayout(heading)
        layout.addWidget(self.loaded_list)
        layout.addWidget(self._pages, 1)
        layout.addLayout(below)

    def _connect(self) -> None:
        # A fixed string: "(" or "+" in a name is no regular expression.
        self.search_edit.textChanged.connect(self._filtered.setFilterFixedString)
        self.search_edit.returnPressed.connect(self._on_search_entered)
        self.list_view.clicked.connect(self._on_index_chosen)
        self.open_button.clicked.connect(self.open_requested.emit)
        self.demo_button.clicked.connect(self.demo_requested.emit)
        self.lab_button.clicked.connect(self.lab_requested.emit)
        self.start_panel.try_demo_requested.connect(self.try_demo_requested)

    def _on_index_chosen(self, index: QModelIndex) -> None:
        recent = self._model.model_at(self._filtered.mapToSource(index))
        self.model_chosen.emit(ModelChoice(recent.path))

    def _on_search_entered(self) -> None:
        # With several matches Enter would open one that the user did not choose.
        if self._filtered.rowCount() == 1:
            self._on_index_chosen(self._filtered.index(0, 0))
