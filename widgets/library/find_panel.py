"""The Find tab: search, found repositories, their quantisations, and the downloads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtGui import QColor
from PySide6.QtWidgets import (
    QHBoxLayout,
    QHeaderView,
    QProgressBar,
    QPushButton,
    QScrollArea,
    QSplitter,
    QStackedWidget,
    QTreeWidget,
    QTreeWidgetItem,
    QVBoxLayout,
    QWidget,
)

from engine.base.language import tr
from widgets.common.boxes import h_box, v_box
from widgets.common.elided_label import ElidedLabel
from widgets.common.inputs import ComboBox
from widgets.common.painting import keep_left_to_right
from widgets.common.palette import DARK, Palette
from widgets.common.roles import plain_label, plain_tool_tip, set_role
from widgets.library.entry_parts import ROW_HEIGHT
from widgets.library.find_values import DownloadChoice, FoundRepo, JobRow, SearchRequest, ShownRepo
from widgets.library.library_filters import SearchEdit

# In pixels. More downloads scroll, so that the search results stay in sight.
MAX_HEIGHT = 220
_STEPS = 1000


class DownloadRow(QWidget):
    """The row of one download. It stays the same widget as long as the download is listed."""

    def __init__(self, rows: DownloadRows, job_id: str) -> None:
        super().__init__()
        self._job_id = job_id
        self._rows = rows
        self._restarts = False
        self.title_label = ElidedLabel("", "strong")
        self.words_label = ElidedLabel("", "dim")
        self.bar = QProgressBar()
        self.bar.setTextVisible(False)
        self.pause_button = QPushButton(tr("Pause"))
        self.resume_button = QPushButton(tr("Resume"))
        self.remove_button = QPushButton(tr("Remove"))
        self.remove_button.setProperty("role", "flat")
        self.pause_button.clicked.connect(lambda: rows.pause_requested.emit(job_id))
        self.resume_button.clicked.connect(self._resume)
        self.remove_button.clicked.connect(lambda: rows.remove_requested.emit(job_id))
        texts = QVBoxLayout()
        texts.setSpacing(2)
        for widget in (self.title_label, self.words_label, self.bar):
            texts.addWidget(widget)
        row = h_box(self)
        row.addLayout(texts, 1)
        for button in (self.pause_button, self.resume_button, self.remove_button):
            row.addWidget(button)

    def show_job(self, job: JobRow) -> None:
        """Show the state and the progress of the download."""
        self._restarts = job.must_restart
        self.title_label.setText(job.title)
        self.words_label.setText(job.words)
        set_role(self.words_label, "error" if job.is_bad else "dim")
        # A range of 0 to 0 makes Qt show a busy bar. Steps and not bytes, which overflow an int at 2 GiB.
        self.bar.setRange(0, 0 if job.fraction is None else _STEPS)
        self.bar.setValue(round((job.fraction or 0.0) * _STEPS))
        self.bar.setVisible(not job.is_done)
        self.bar.setAccessibleName(tr("Progress of {title}", title=job.title))
        self.pause_button.setVisible(job.may_pause)
        self.resume_button.setVisible(job.may_resume or job.must_restart)
        self.resume_button.setText(
            tr("Start over") if job.must_restart else tr("Retry") if job.is_bad else tr("Resume")
        )

    def _resume(self) -> None:
        signal = self._rows.restart_requested if self._restarts else self._rows.resume_requested
        signal.emit(self._job_id)


class DownloadRows(QWidget):
    """List of downloads, hidden if there are none."""

    pause_requested = Signal(str)
    resume_requested = Signal(str)
    restart_requested = Signal(str)
    remove_requested = Signal(str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.rows: dict[str, DownloadRow] = {}
        self._content = QWidget()
        self._column = v_box(self._content, margins=(0, 0, 8, 0))
        scroll = QScrollArea()
        scroll.setWidgetResizable(True)
        scroll.setWidget(self._content)
        scroll.setMaximumHeight(MAX_HEIGHT)
        scroll.setAccessibleName(tr("Downloads"))
        column = v_box(self)
        column.addWidget(plain_label(tr("Downloads"), "strong"))
        column.addWidget(scroll)
        self.hide()

    def show_jobs(self, jobs: Sequence[JobRow]) -> None:
        """Show `jobs` in this order."""
        ids = [job.id for job in jobs]
        # A list of its own, because the dict changes inside the loop.
        for removed in [job_id for job_id in self.rows if job_id not in ids]:
            self.rows.pop(removed).deleteLater()
        for index, job in enumerate(jobs):
            row = self.rows.get(job.id)
            if row is None:
                row = self.rows[job.id] = DownloadRow(self, job.id)
            # Progress comes several times a second; inserting a row again would take the focus from its buttons.
            if self._column.indexOf(row) != index:
                self._column.insertWidget(index, row)
            row.show_job(job)
        self.setVisible(bool(jobs))


_ORDERS = (
    ("trending", tr("Trending")),
    ("downloads", tr("Most downloads")),
    ("likes", tr("Most likes")),
    ("updated", tr("Latest change")),
)
_CACHE = tr("Hugging Face cache")
_TO_CARD, _TO_FILES = tr("Model card"), tr("Quantisations")


class FindPanel(QWidget):
    """Shows search results, a repository and downloads, and emits the requests of the user.

    It sends nothing to a server.
    """

    search_requested = Signal(SearchRequest)
    repo_chosen = Signal(str)
    download_requested = Signal(DownloadChoice)
    card_requested = Signal()
    more_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._repo: ShownRepo | None = None
        self._found: tuple[FoundRepo, ...] = ()
        self._palette = DARK
        self.search_edit = SearchEdit()
        self.order_box = ComboBox()
        self.search_button = QPushButton(tr("Search"))
        self.more_button = QPushButton(tr("Hub…"))
        self.message_label = plain_label("", "dim", wrap=True)
        self.results = _table(tr("Repositories"), [tr("Repository"), tr("Weights"), tr("Downloads"), tr("Changed")])
        self.repo_label = ElidedLabel("", "title")
        self.card_button = QPushButton(_TO_CARD)
        self._card: QWidget | None = None
        self.why_label = plain_label("", "dim", wrap=True)
        self.offered = _table(
            tr("Available quantisations"), [tr("Quantisation"), tr("Size"), tr("On this rig"), tr("Tokens/s")]
        )
        self._side = QStackedWidget()
        self.folder_box = ComboBox()
        self.download_button = QPushButton(tr("Download"))
        self.downloads = DownloadRows()
        self._build()
        self._connect()
        self.show_repo(None)
        self.set_folders(())

    def apply_palette(self, palette: Palette) -> None:
        """Apply the colours of `palette`."""
        self._palette = palette
        self._paint()

    def begin(self, text: str = "") -> None:
        """Focus the search field, and search for `text`.

        If `text` is empty, search only if there are no results yet.
        """
        self.search_edit.setFocus(Qt.FocusReason.OtherFocusReason)
        if text:
            self.search_edit.setText(text)
        # The first visit shows the trending models. Later ones keep the results, which may be scrolled and selected.
        if text or not self._found:
            self._search()

    def show_message(self, text: str) -> None:
        """Show a message about a request to the hub that is running or has failed; an empty text hides the message."""
        self.message_label.setText(text)
        self.message_label.setVisible(bool(text))

    def show_found(self, found: Sequence[FoundRepo]) -> None:
        """List the repositories that a search on the hub has found."""
        self._found = tuple(found)
        self.results.clear()
        for each in self._found:
            item = QTreeWidgetItem([each.repo, each.size, each.downloads, each.updated])
            item.setToolTip(0, plain_tool_tip(each.detail))
            item.setSizeHint(0, QSize(0, ROW_HEIGHT))
            self.results.addTopLevelItem(item)

    def show_repo(self, repo: ShownRepo | None) -> None:
        """Show the quantisations of a repository, or nothing if `repo` is None."""
        self._repo = repo
        self.repo_label.setText("" if repo is None else repo.repo)
        self.why_label.setText(tr("Choose a repository to see how its models fit.") if repo is None else repo.why)
        self.offered.clear()
        for each in () if repo is None else repo.rows:
            label = tr("{label}  (proposed)", label=each.label) if each.is_best else each.label
            item = QTreeWidgetItem([label, each.size, each.fit, each.speed])
            item.setToolTip(2, plain_tool_tip(each.sentence))
            item.setSizeHint(0, QSize(0, ROW_HEIGHT))
            self.offered.addTopLevelItem(item)
            if each.is_best:
                self.offered.setCurrentItem(item)
        # The card belongs to the repository before, and is fetched only on request.
        self.card_button.setChecked(False)
        self.card_button.setVisible(repo is not None)
        has_rows = repo is not None and bool(repo.rows)
        # A repository may have no proposal; "Download" still needs a row.
        if has_rows and not self.offered.currentIndex().isValid():
            self.offered.setCurrentIndex(self.offered.model().index(0, 0))
        for widget in (self.offered, self.folder_box, self.download_button):
            widget.setVisible(has_rows)
        self._paint()

    def set_card(self, card: QWidget) -> None:
        """Set the widget that shows model cards. A button shows it in place of the quantisations."""
        self._card = card
        self._side.addWidget(card)
        self._side.setCurrentIndex(self.card_button.isChecked())

    def set_folders(self, folders: Sequence[Path]) -> None:
        """Set the folders that a download can go to, in addition to the Hugging Face cache."""
        chosen = self.folder_box.currentData()
        self.folder_box.clear()
        self.folder_box.addItem(tr("Save to the {cache}", cache=_CACHE), None)
        for folder in folders:
            self.folder_box.addItem(tr("Save to {name}", name=folder.name or folder), folder)
        # Not `findData`: Qt compares Python objects by identity, and folders are other objects each time.
        self.folder_box.setCurrentIndex([None, *folders].index(chosen) if chosen in folders else 0)

    def _paint(self) -> None:
        for row, each in enumerate(() if self._repo is None else self._repo.rows):
            item = self.offered.topLevelItem(row)
            if item is not None:
                item.setForeground(2, QColor(str(getattr(self._palette, each.fit_colour))))

    def _search(self) -> None:
        order = _ORDERS[self.order_box.currentIndex()][0]
        self.search_requested.emit(SearchRequest(self.search_edit.text().strip(), order))

    def _choose(self) -> None:
        row = self.results.currentIndex().row()
        if 0 <= row < len(self._found):
            self.repo_chosen.emit(self._found[row].repo)

    def _download(self) -> None:
        row, repo = self.offered.currentIndex().row(), self._repo
        if repo is not None and 0 <= row < len(repo.rows):
            folder = self.folder_box.currentData()
            self.download_requested.emit(DownloadChoice(repo.repo, repo.rows[row].name, folder))

    def _toggle_card(self, wanted: bool) -> None:
        self.card_button.setText(_TO_FILES if wanted else _TO_CARD)
        if wanted:
            self.card_requested.emit()
        if self._card is not None:
            self._side.setCurrentIndex(wanted)

    def _connect(self) -> None:
        self.card_button.toggled.connect(self._toggle_card)
        self.search_edit.returnPressed.connect(self._search)
        self.search_edit.left_down.connect(self.results.setFocus)
        self.search_button.clicked.connect(self._search)
        # Connected after `_build` has filled the box, because `addItems` changes the index from -1 to 0.
        self.order_box.currentIndexChanged.connect(lambda _at: self._search())
        self.more_button.clicked.connect(self.more_requested.emit)
        # `clear` emits it with None, which is no choice.
        self.results.currentItemChanged.connect(lambda item, _before: self._choose() if item is not None else None)
        self.offered.itemDoubleClicked.connect(lambda _item, _column: self._download())
        self.download_button.clicked.connect(self._download)

    def _build(self) -> None:
        self.search_edit.setPlaceholderText(tr("Search, or paste an address: owner/name, owner/name:Q4_K_M, https://…"))
        self.search_edit.setClearButtonEnabled(True)
        self.search_edit.setAccessibleName(tr("Search the hub"))
        self.search_edit.setAcceptDrops(False)  # Dropped files are for the window.
        self.order_box.addItems([text for _, text in _ORDERS])
        self.order_box.setAccessibleName(tr("Sort order of the results"))
        self.folder_box.setAccessibleName(tr("Download to"))
        self.download_button.setProperty("role", "primary")
        self.card_button.setCheckable(True)
        self.card_button.setProperty("role", "flat")
        self.card_button.setToolTip(tr("Show the repository's model card"))
        self.more_button.setProperty("role", "flat")
        self.more_button.setToolTip(tr("Settings for the Hugging Face hub: work offline, access token, mirror"))
        heading = QHBoxLayout()
        heading.setSpacing(8)
        heading.addWidget(self.search_edit, 1)
        for widget in (self.order_box, self.search_button, self.more_button):
            heading.addWidget(widget)
        splitter = QSplitter(Qt.Orientation.Horizontal)
        splitter.setAccessibleName(tr("Search results and their files"))
        splitter.setChildrenCollapsible(False)
        splitter.addWidget(self.results)
        splitter.addWidget(self._build_side())
        splitter.setSizes([600, 520])
        outer = v_box(self, spacing=8)
        outer.addLayout(heading)
        outer.addWidget(self.message_label)
        outer.addWidget(splitter, 1)
        outer.addWidget(self.downloads)
        self.message_label.hide()

    def _build_side(self) -> QWidget:
        """Return the widget at the right, which shows the selected repository."""
        side = QWidget()
        column = v_box(side, spacing=8, margins=(16, 0, 0, 0))
        title = QHBoxLayout()
        title.addWidget(self.repo_label, 1)
        title.addWidget(self.card_button)
        column.addLayout(title)
        offer = QWidget()
        offered_column = v_box(offer, spacing=8)
        offered_column.addWidget(self.why_label)
        offered_column.addWidget(self.offered, 1)
        buttons = QHBoxLayout()
        buttons.addWidget(self.folder_box, 1)
        buttons.addWidget(self.download_button)
        offered_column.addLayout(buttons)
        offered_column.addStretch(0)
        self._side.addWidget(offer)
        column.addWidget(self._side, 1)
        return side


def _table(name: str, columns: list[str]) -> QTreeWidget:
    table = QTreeWidget()
    keep_left_to_right(table)
    table.setColumnCount(len(columns))
    table.setHeaderLabels(columns)
    table.setRootIsDecorated(False)
    table.setUniformRowHeights(True)
    table.setAccessibleName(name)
    table.header().setSectionResizeMode(QHeaderView.ResizeMode.ResizeToContents)
    table.header().setSectionResizeMode(0, QHeaderView.ResizeMode.Stretch)
    # Qt stretches the last column by default; here the spare width is for the names in the first one.
    table.header().setStretchLastSection(False)
    return table
