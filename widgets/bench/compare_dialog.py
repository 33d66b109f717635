"""The dialog of Layout > Compare Speed: choice of layouts, progress, and results as chart and table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import (
    QCheckBox,
    QHBoxLayout,
    QLabel,
    QListWidget,
    QListWidgetItem,
    QPlainTextEdit,
    QProgressBar,
    QPushButton,
    QSplitter,
    QVBoxLayout,
    QWidget,
)

from engine.base.language import tr
from engine.machines.bench.results import BenchResults, Measure
from engine.machines.bench.tables import (
    MEASURE_TEXTS,
    closing_lines,
    machine_text,
    number,
    rows_of,
    side_lines,
    verdict_text,
    with_titles,
)
from widgets.common.dialog import Dialog
from widgets.common.inputs import ComboBox
from widgets.common.palette import Palette
from widgets.common.roles import plain_label, plain_tool_tip, set_role
from widgets.common.row_table import RowTable

PRESET_TEXTS = (
    ("quick", tr("Quick (5 rounds, short prompts)")),
    ("normal", tr("Normal (7 rounds)")),
    ("long", tr("Long context (4k, 16k and full)")),
)
_COLUMNS = (tr("Layout"), tr("Measurement"), tr("Median"), tr("95 % interval"), tr("Speed ratio"))


class CompareDialog(Dialog):
    """Dialog for speed comparisons of layouts. It only emits requests; the presenter starts and stops comparisons."""

    compare_requested = Signal()
    cancel_requested = Signal()
    unload_requested = Signal()
    add_requested = Signal()
    keep_requested = Signal()
    export_requested = Signal()
    import_requested = Signal()

    def __init__(self, parent: QWidget | None = None, titles: Mapping[str, str] | None = None) -> None:
        """Make the dialog. `titles`: maps the name of a strategy to the title that the results show instead."""
        super().__init__(tr("Compare Speed"), parent)
        self._titles = titles or {}
        self._results: BenchResults | None = None
        self._running = False
        self._is_kept = False
        self.layout_list = QListWidget()
        self.layout_list.setAccessibleName(tr("Layouts to compare"))
        self.layout_list.setMaximumHeight(96)
        self.add_layout_button = QPushButton(tr("Add Layout File…"))
        self.automatic_box = QCheckBox(tr("Also try automatic layouts and settings"))
        self.preset_combo = ComboBox()
        self.preset_combo.setAccessibleDescription(tr("How long the comparison measures"))
        for key, words in PRESET_TEXTS:
            self.preset_combo.addItem(words, key)
        self.start_button = QPushButton(tr("Compare"))
        # Return would press the first button of the dialog, which adds a file.
        self.start_button.setDefault(True)
        self.cancel_button = QPushButton(tr("Cancel"))
        self.progress_bar = QProgressBar()
        self.progress_bar.setTextVisible(False)
        self.progress_bar.setAccessibleName(tr("Progress of the comparison"))
        self.status_label = plain_label("", wrap=True)
        self.unload_button = QPushButton(tr("Unload and Compare"))
        self.unload_button.setToolTip(plain_tool_tip(tr("The next question loads the model again.")))
        self.unload_button.hide()
        self.measure_combo = ComboBox()
        self.measure_combo.setAccessibleDescription(tr("What the chart shows"))
        for measure, words in MEASURE_TEXTS.items():
            self.measure_combo.addItem(words[:1].upper() + words[1:], measure)
        self.measure_combo.setCurrentIndex(self.measure_combo.findData("generation"))
        # Imported with the first dialog: importing pyqtgraph and numpy takes 0.2 s and 20 MB.
        from widgets.bench.bench_chart import BenchChart

        self.chart = BenchChart()
        self.table = RowTable(_COLUMNS, tr("Measured speeds"), wide=4)
        self.notes = QPlainTextEdit()
        self.notes.setReadOnly(True)
        self.notes.setTabChangesFocus(True)
        self.notes.setAccessibleName(tr("Details of the comparison"))
        self.machine_label = plain_label("", "dim", wrap=True)
        self._lay_out_parts()
        self.keep_button = self.add_button(tr("Keep the Winner"), self.keep_requested.emit)
        self.export_button = self.add_button(tr("Export…"), self.export_requested.emit)
        self.import_button = self.add_button(tr("Import…"), self.import_requested.emit)
        self._connect()
        self._refresh()
        self.resize(980, 680)

    # ------------------------------------------------------------------ what is asked for

    def set_layouts(self, names: Sequence[str]) -> None:
        """List the layouts that can be compared, by their names.

        All are checked, except those that the user has unchecked in the previous list.
        """
        unchecked = {item.text() for item in self._items() if item.checkState() is Qt.CheckState.Unchecked}
        self.layout_list.clear()
        for name in names:
            item = QListWidgetItem(name)
            item.setFlags(Qt.ItemFlag.ItemIsEnabled | Qt.ItemFlag.ItemIsSelectable | Qt.ItemFlag.ItemIsUserCheckable)
            item.setCheckState(Qt.CheckState.Unchecked if name in unchecked else Qt.CheckState.Checked)
            self.layout_list.addItem(item)
        self._refresh()

    @property
    def chosen(self) -> tuple[int, ...]:
        """Indices of the checked layouts in the list."""
        return tuple(at for at, item in enumerate(self._items()) if item.checkState() is Qt.CheckState.Checked)

    @property
    def preset(self) -> str:
        """Key of the chosen preset in `PRESETS`. A preset sets the length and the number of the measurements."""
        return str(self.preset_combo.currentData())

    @property
    def is_automatic(self) -> bool:
        """Whether the user has chosen to measure automatic layouts and settings too."""
        return self.automatic_box.isChecked()

    # ------------------------------------------------------------------ what is shown

    def show_running(self, running: bool) -> None:
        """Show whether a comparison is running."""
        had_focus = self.start_button.hasFocus()
        self._running = running
        self._refresh()
        if running and had_focus:
            # A disabled button passes its focus on to any next part.
            self.cancel_button.setFocus()

    def show_progress(self, words: str, done: int, total: int) -> None:
        """Show the progress of the comparison: `done` of `total` steps, with the text `words`.

        If `total` is 0, the bar moves without showing how much is done.
        """
        # Qt shows the range 0 to 0 as "busy".
        self.progress_bar.setRange(0, total)
        self.progress_bar.setValue(done)
        if self.cancel_button.isEnabled():
            self.show_status(f"{words}…")

    def show_cancelling(self) -> None:
        """Show that the comparison is being cancelled."""
        self.cancel_button.setEnabled(False)
        self.show_status(tr("Cancelling…"))

    def show_status(self, sentence: str, *, bad: bool = False, can_unload: bool = False) -> None:
        """Show a sentence above the chart.

        `bad`: the sentence is an error.
        `can_unload`: whether the button is shown that unloads the loaded models and then compares.
        """
        self.status_label.setText(sentence)
        had_focus = self.unload_button.hasFocus()
        self.unload_button.setVisible(can_unload)
        if had_focus and not can_unload:
            self.start_button.setFocus()
        set_role(self.status_label, "error" if bad else "strong")

    def show_results(self, results: BenchResults | None) -> None:
        """Show results in chart and table; None removes the shown results."""
        self._results = results
        results = self._titled
        rows = () if results is None else rows_of(results)
        self.table.show_rows(
            [
                (
                    row.layout,
                    MEASURE_TEXTS[row.measure] + (tr(" at depth {depth}", depth=row.depth) if row.depth else ""),
                    f"{number(row.value)} {row.unit}",
                    "" if row.low is None or row.high is None else f"{number(row.low)} – {number(row.high)}",
                    "" if row.comparison is None else verdict_text(row.comparison),
                )
                for row in rows
            ]
        )
        self._draw()
        notes = [] if results is None else [*_remarks(results), *closing_lines(results)]
        self.notes.setPlainText("\n".join(notes))
        self.machine_label.setText("" if results is None else f"{results.model.name} – {machine_text(results)}")
        self._refresh()

    def set_kept(self, kept: bool) -> None:
        """Set whether the editor already has the fastest layout. If so, the button Keep the Winner is disabled."""
        self._is_kept = kept
        self._refresh()

    @property
    def results(self) -> BenchResults | None:
        """The shown results; None if there are none."""
        return self._results

    @property
    def _titled(self) -> BenchResults | None:
        """The shown results, with titles in place of the strategies' names."""
        return None if self._results is None else with_titles(self._results, self._titles)

    def apply_palette(self, palette: Palette) -> None:
        """Use the colours of `palette` in the chart."""
        self.chart.apply_palette(palette)

    # ------------------------------------------------------------------ parts

    def _items(self) -> list[QListWidgetItem]:
        return [self.layout_list.item(row) for row in range(self.layout_list.count())]

    def _connect(self) -> None:
        self.add_layout_button.clicked.connect(lambda _checked: self.add_requested.emit())
        self.start_button.clicked.connect(lambda _checked: self.compare_requested.emit())
        self.cancel_button.clicked.connect(lambda _checked: self.cancel_requested.emit())
        self.unload_button.clicked.connect(lambda _checked: self.unload_requested.emit())
        self.layout_list.itemChanged.connect(lambda _item: self._refresh())
        self.automatic_box.toggled.connect(lambda _on: self._refresh())
        self.measure_combo.currentIndexChanged.connect(lambda _index: self._draw())

    def _draw(self) -> None:
        measure: Measure = self.measure_combo.currentData()
        self.chart.show_rows(() if (results := self._titled) is None else rows_of(results), measure)

    def _refresh(self) -> None:
        results = self._results
        self.start_button.setEnabled(not self._running and bool(self.chosen))
        self.cancel_button.setEnabled(self._running)
        self.progress_bar.setVisible(self._running)
        choice = (self.layout_list, self.add_layout_button, self.automatic_box, self.preset_combo)
        for part in (*choice, self.import_button):
            part.setEnabled(not self._running)
        self.export_button.setEnabled(not self._running and results is not None)
        has_winner = results is not None and bool(results.winner) and not self._is_kept
        self.keep_button.setEnabled(not self._running and has_winner)

    def _lay_out_parts(self) -> None:
        choice = QHBoxLayout()
        choice.addWidget(self.layout_list, 1)
        beside = QVBoxLayout()
        for part in (self.add_layout_button, self.automatic_box, self.preset_combo):
            beside.addWidget(part)
        beside.addStretch(1)
        choice.addLayout(beside)
        starting = QHBoxLayout()
        starting.addWidget(self.start_button)
        starting.addWidget(self.cancel_button)
        starting.addWidget(self.progress_bar, 1)
        starting.addStretch()
        starting.addWidget(QLabel(tr("Chart:")))
        starting.addWidget(self.measure_combo)
        status = QHBoxLayout()
        status.addWidget(self.status_label, 1)
        status.addWidget(self.unload_button)
        shown = QSplitter(Qt.Orientation.Vertical)
        shown.setAccessibleName(tr("Chart, table and details"))
        shown.setChildrenCollapsible(False)
        shown.addWidget(self.chart)
        shown.addWidget(self.table)
        shown.addWidget(self.notes)
        shown.setSizes([220, 140, 90])
        self.lay_out(
            plain_label(INTRODUCTION, "dim", wrap=True), choice, starting, status, shown, self.machine_label,
        )  # fmt: skip


INTRODUCTION = tr(
    "Loads the layouts alternately, and measures prompts and answers. A difference counts only if it is larger than "
    "the normal variation of this computer. Do not use other programs during the comparison."
)


def _remarks(results: BenchResults) -> list[str]:
    """Return a line for each layout with its remarks, such as its memory and the load by other programs."""
    lines = [(each.name, "; ".join(side_lines(each))) for each in results.layouts]
    return [f"{name}: {words}" for name, words in lines if words]
