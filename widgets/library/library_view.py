"""The library page: filters, list and details; for an empty library, suggestions of models to download."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QKeyEvent
from PySide6.QtWidgets import (
    QButtonGroup,
    QFrame,
    QHBoxLayout,
    QPushButton,
    QSplitter,
    QStackedWidget,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from engine.base.language import tr, tr_count
from engine.base.units import format_bytes
from engine.library.listed import Listed, arrange
from engine.library.starters import Starter
from widgets.common.boxes import v_box
from widgets.common.elided_label import ElidedLabel
from widgets.common.palette import Palette
from widgets.common.roles import plain_label
from widgets.library.entry_details import EntryDetails
from widgets.library.find_panel import FindPanel
from widgets.library.library_filters import LibraryFilters
from widgets.library.library_list import LibraryListView

_WIDTH = 760
PURPOSE_LINES = 3


class StarterPanel(QWidget):
    """Page of an empty library: buttons to add models, and cards of small models to download."""

    starter_chosen = Signal(Starter)
    add_folder_requested = Signal()
    open_requested = Signal()
    try_demo_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.cards: list[QPushButton] = []
        self._row = QHBoxLayout()
        self._row.setSpacing(12)
        self.folder_button = QPushButton(tr("Add a folder…"))
        self.open_button = QPushButton(tr("Open a file…"))
        self.demo_button = QPushButton(tr("Try the demo model"))
        self.folder_button.clicked.connect(self.add_folder_requested.emit)
        self.open_button.clicked.connect(self.open_requested.emit)
        self.demo_button.clicked.connect(self.try_demo_requested.emit)
        buttons = QHBoxLayout()
        buttons.setSpacing(8)
        for button in (self.folder_button, self.open_button, self.demo_button):
            buttons.addWidget(button)
        buttons.addStretch(1)
        middle = QWidget()
        middle.setMaximumWidth(_WIDTH)
        column = QVBoxLayout(middle)
        column.setSpacing(12)
        column.addWidget(plain_label(tr("No models yet"), "title"))
        folders_text = tr(
            "The library shows models in the folders that you add and in the folders of Hugging Face, LM Studio, "
            "Ollama and llama.cpp."
        )
        column.addWidget(plain_label(folders_text, "dim", wrap=True))
        column.addLayout(buttons)
        column.addSpacing(12)
        self._heading = plain_label(tr("Small models that fit this computer"), "strong")
        column.addWidget(self._heading)
        column.addLayout(self._row)
        across = QHBoxLayout()
        across.addStretch(1)
        across.addWidget(middle, 8)
        across.addStretch(1)
        outer = QVBoxLayout(self)
        outer.addStretch(1)
        outer.addLayout(across)
        outer.addStretch(2)

    def show_starters(self, starters: Sequence[Starter]) -> None:
        """Show a card for each of `starters`, the small models that are suggested for download."""
        # `takeAt` leaves the widgets to their parent; deleted later, because a click on one may have led here.
        while (item := self._row.takeAt(0)) is not None:
            widget = item.widget()
            if widget is not None:
                widget.deleteLater()
        self.cards = []
        for starter in starters:
            self._row.addWidget(self._card(starter), 1)
        self._heading.setVisible(bool(starters))

    def _card(self, starter: Starter) -> QFrame:
        card = QFrame()
        card.setProperty("role", "card")
        button = QPushButton(tr("Download"))
        button.setAccessibleName(tr("Download {name}", name=starter.name))
        button.setToolTip(starter.address)
        button.clicked.connect(lambda: self.starter_chosen.emit(starter))
        self.cards.append(button)
        column = QVBoxLayout(card)
        column.addWidget(plain_label(starter.name, "strong"))
        purpose = plain_label(starter.purpose, "dim", wrap=True)
        purpose.setAlignment(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignTop)
        # All cards have the same lines, so that their buttons are in one row.
        purpose.setMinimumHeight(PURPOSE_LINES * purpose.fontMetrics().lineSpacing())
        column.addWidget(purpose, 1)
        column.addWidget(plain_label(tr("{size} to download", size=format_bytes(starter.size_bytes)), "dim"))
        column.addWidget(button)
        return card


DETAILS_WIDTH = 420


class LibraryView(QWidget):
    """The library page with its two tabs, Models and Find. It shows given values only, and reads no files."""

    closed = Signal()
    add_folder_requested = Signal()
    folders_requested = Signal()
    duplicates_requested = Signal()
    model_shown = Signal(object)  # Listed | None

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._models: tuple[Listed, ...] = ()
        self._is_scanned = False
        self.filters = LibraryFilters()
        self.list_view = LibraryListView()
        self.details = EntryDetails()
        self.starters = StarterPanel()
        self.count_label = plain_label("", "dim")
        self.progress_label = ElidedLabel("", "dim")
        self.problem_label = plain_label("", "error", wrap=True)
        self.folder_button = QPushButton(tr("Add folder…"))
        self.folders_button = QPushButton(tr("Folders…"))
        self.duplicates_button = QPushButton(tr("Duplicates…"))
        self.close_button = QPushButton(tr("Close"))
        self.nothing_label = plain_label(tr("No models match the filters."), "dim")
        self.clear_button = QPushButton(tr("Show all models"))
        self.find_panel = FindPanel()
        self.models_tab = _tab(tr("Models"))
        self.find_tab = _tab(tr("Find"))
        self.pages = QStackedWidget()
        self._tabs = QStackedWidget()
        self._lists = QStackedWidget()
        self._build()
        self._connect()

    def apply_palette(self, palette: Palette) -> None:
        """Apply the colours of `palette`."""
        self.list_view.delegate.set_palette(palette)
        self.list_view.viewport().update()
        self.details.quantisations.apply_palette(palette)
        self.find_panel.apply_palette(palette)

    def show_models(self, models: Sequence[Listed], problems: Sequence[str] = (), *, is_scanned: bool = True) -> None:
        """Show the models of the library.

        `problems`: sentences that are shown as errors.
        `is_scanned`: whether all folders were scanned. Only then an empty list means an empty library.
        """
        self._models = tuple(models)
        self._is_scanned = is_scanned
        # Before `_arrange`: a tag that no model has any more is taken out of the filter here.
        self.filters.set_tags(tuple(sorted({tag for model in models for tag in model.notes.tags}, key=str.casefold)))
        self.problem_label.setText("\n".join(problems))
        self.problem_label.setVisible(bool(problems))
        self._arrange()

    def show_progress(self, text: str) -> None:
        """Show a text on the progress of a scan or other work of the library; an empty text hides it."""
        self.progress_label.setText(text)

    def show_starters(self, starters: Sequence[Starter]) -> None:
        """Set the models that an empty library suggests to download."""
        self.starters.show_starters(starters)

    def begin(self) -> None:
        """Focus the search field of the visible tab."""
        if self._tabs.currentWidget() is self.find_panel:
            self.find_panel.search_edit.setFocus(Qt.FocusReason.OtherFocusReason)
            return
        self.filters.search_edit.setFocus(Qt.FocusReason.OtherFocusReason)
        self.filters.search_edit.selectAll()

    def show_find(self, text: str = "") -> None:
        """Show the Find tab, and search for `text` if it is not empty."""
        self._tabs.setCurrentWidget(self.find_panel)
        self.find_tab.setChecked(True)
        self.find_panel.begin(text)

    def show_list(self) -> None:
        """Show the Models tab."""
        self._tabs.setCurrentWidget(self.pages)
        self.models_tab.setChecked(True)
        self.begin()

    def visible_titles(self) -> tuple[str, ...]:
        """Return the titles of the listed models, from top to bottom."""
        return tuple(model.entry.title for model in self.list_view.rows.models)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        """Emit `closed` if Escape is pressed."""
        if event.key() == Qt.Key.Key_Escape:
            self.closed.emit()
            return
        super().keyPressEvent(event)

    def _arrange(self) -> None:
        shown = arrange(self._models, self.filters.filter)
        self.list_view.show_models(shown, self.filters.filter.words)
        n_all = len(self._models)
        models = tr_count("{count} model", "{count} models", n_all)
        self.count_label.setText(
            models if len(shown) == n_all else tr("{count} of {models}", count=len(shown), models=models)
        )
        self._lists.setCurrentIndex(0 if shown or not n_all else 1)
        # Before the first scan has ended, an empty list is not "No models yet".
        self.pages.setCurrentIndex(0 if n_all or not self._is_scanned else 1)

    def _on_selected(self, model: Listed | None) -> None:
        self.details.show_model(model)
        self.model_shown.emit(model)

    def _connect(self) -> None:
        self.filters.filter_changed.connect(lambda _wanted: self._arrange())
        search = self.filters.search_edit
        search.left_down.connect(self.list_view.setFocus)
        search.left.connect(self.closed.emit)
        # Every search leaves a model selected, the first one if no other is, so Enter opens it.
        search.returnPressed.connect(self.details.open)
        self.list_view.selected.connect(self._on_selected)
        self.list_view.open_requested.connect(self.details.open)
        self.list_view.favourite_requested.connect(self.details.toggle_favourite)
        self.list_view.removal_requested.connect(self.details.remove)
        self.folder_button.clicked.connect(self.add_folder_requested.emit)
        self.folders_button.clicked.connect(self.folders_requested.emit)
        self.duplicates_button.clicked.connect(self.duplicates_requested.emit)
        self.close_button.clicked.connect(self.closed.emit)
        self.clear_button.clicked.connect(self.filters.clear)
        self.models_tab.clicked.connect(self.show_list)
        self.find_tab.clicked.connect(partial(self.show_find, ""))
        self.find_panel.search_edit.left.connect(self.closed.emit)
        self.starters.add_folder_requested.connect(self.add_folder_requested)

    def _build(self) -> None:
        for button in (self.folders_button, self.duplicates_button, self.close_button):
            button.setProperty("role", "flat")
        self.close_button.setToolTip(tr("Back to the layout (Escape)"))
        self.duplicates_button.setToolTip(tr("Find duplicate files. Files of the same size are read in full."))
        heading = QHBoxLayout()
        heading.setSpacing(8)
        heading.addWidget(self.models_tab)
        heading.addWidget(self.find_tab)
        heading.addWidget(self.count_label)
        heading.addWidget(self.progress_label, 1)
        for button in (self.duplicates_button, self.folders_button, self.folder_button, self.close_button):
            heading.addWidget(button)
        nothing = QWidget()
        nothing_column = QVBoxLayout(nothing)
        nothing_column.addStretch(1)
        nothing_column.addWidget(self.nothing_label, 0, Qt.AlignmentFlag.AlignHCenter)
        nothing_column.addWidget(self.clear_button, 0, Qt.AlignmentFlag.AlignHCenter)
        nothing_column.addStretch(2)
        self._lists.addWidget(self.list_view)
        self._lists.addWidget(nothing)
        splitter = QSplitter(Qt.Orientation.Horizontal)
        splitter.setAccessibleName(tr("Models and details"))
        splitter.setChildrenCollapsible(False)
        splitter.addWidget(self._lists)
        splitter.addWidget(self.details)
        splitter.setStretchFactor(0, 1)
        # Proportions: Qt scales them to the width that the splitter gets.
        splitter.setSizes([3 * DETAILS_WIDTH, DETAILS_WIDTH])
        self.details.setMinimumWidth(320)
        tabs = QButtonGroup(self)
        for tab in (self.models_tab, self.find_tab):
            tabs.addButton(tab)
        self.models_tab.setChecked(True)
        listing = QWidget()
        column = v_box(listing, spacing=8)
        column.addWidget(self.filters)
        column.addWidget(splitter, 1)
        self.pages.addWidget(listing)
        self.pages.addWidget(self.starters)
        outer = v_box(self, spacing=8, margins=(12, 8, 12, 8))
        outer.addLayout(heading)
        outer.addWidget(self.problem_label)
        self._tabs.addWidget(self.pages)
        self._tabs.addWidget(self.find_panel)
        outer.addWidget(self._tabs, 1)
        self.problem_label.hide()


def _tab(text: str) -> QToolButton:
    tab = QToolButton()
    tab.setText(text)
    tab.setCheckable(True)
    tab.setProperty("role", "segment")
    return tab
