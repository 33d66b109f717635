"""The load report: progress of a load, then its outcome with a badge, a sentence and numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import (
    QFrame,
    QHBoxLayout,
    QLabel,
    QProgressBar,
    QPushButton,
    QScrollArea,
    QVBoxLayout,
    QWidget,
)

from engine.base.language import tr
from engine.base.values import replace
from engine.runtime.session.events import Attempt, Cancelled, Crashed, Failed, Loaded, OutOfMemory, Stage
from widgets.common.boxes import h_box, v_box
from widgets.common.palette import DARK, Palette
from widgets.common.roles import plain_label, plain_tool_tip, set_role, tool_button
from widgets.load_report.outcome import (
    Outcome,
    ProposalText,
    attempt_text,
    cancelled_outcome,
    crashed_outcome,
    failed_outcome,
    loaded_outcome,
    out_of_memory_outcome,
    progress_text,
)
from widgets.load_report.report_table import ATTEMPTS_TITLE, ReportTable, plain_report

IDLE_SENTENCE = tr("Nothing has been loaded yet.")
# `QProgressBar` counts in 32-bit integers, so bytes would overflow at 2 GiB.
PROGRESS_STEPS = 1000
BADGE_HEIGHT_PX = 20
MIN_DETAILS_HEIGHT_PX = 24


class LoadReport(QWidget):
    """Shows progress and outcome of a load. "Copy" puts the report on the clipboard as text.

    The table of bytes is shown only after "Details", because the sentence above the table is enough for most people.
    """

    check_requested = Signal()
    proposal_chosen = Signal(int)  # the index of the proposal among those shown
    restart_requested = Signal()
    """Requests a restart of the stopped lab workers (RPC workers on this computer)."""
    lay_out_requested = Signal()
    """Requests a layout that does not use the stopped lab workers (RPC workers on this computer)."""
    details_toggled = Signal(bool)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._stopped: tuple[str, ...] = ()
        self._is_unreachable = False
        self._palette = DARK
        # `LoadPresenter` replaces it by the setting `shows_report_details`.
        self._shows_details = True
        self._outcome: Outcome | None = None
        self._table: ReportTable | None = None
        self.proposal_list: ProposalList | None = None
        self._badge = plain_label()
        self._badge.setMinimumHeight(BADGE_HEIGHT_PX)
        self._sentence = plain_label("", wrap=True)
        self._detail = plain_label("", "dim", wrap=True)
        self._rows_title = plain_label("", "dim")
        self._attempts: tuple[str, ...] = ()
        self._attempts_label = plain_label("", "dim", wrap=True)
        self._progress = QProgressBar()
        self._progress.setTextVisible(False)
        self._progress.setAccessibleName(tr("Load progress"))
        self.copy_button = tool_button(tr("Copy"), tr("Copy the report as text"))
        self.details_button = tool_button(tr("Details"), tr("Show memory by device and part"))
        self.details_button.setCheckable(True)
        self.details_button.setChecked(self._shows_details)
        self.check_button = QPushButton(tr("Check This Computer…"))
        self.restart_button = QPushButton()
        self.lay_out_button = QPushButton()
        self._scroll = QScrollArea()
        self._column = QVBoxLayout()
        self._build()
        self.show_idle()

    @property
    def badge_text(self) -> str:
        return self._badge.text()

    @property
    def sentence(self) -> str:
        return self._sentence.text()

    @property
    def detail(self) -> str:
        return self._detail.text()

    @property
    def attempts(self) -> tuple[str, ...]:
        """The layouts that the last load tried, as texts. They are shown only if there are several."""
        return self._attempts

    def apply_palette(self, palette: Palette) -> None:
        """Use the colours that `palette` has for the parts of memory."""
        self._palette = palette
        if self._table is not None:
            self._table.apply_palette(palette)

    @property
    def needed_height(self) -> int:
        """Height in pixels at which the report needs no scroll bar, at its present width."""
        shown = self._scroll.viewport().size()
        wrapped = self._column.hasHeightForWidth()
        needed = self._column.totalHeightForWidth(shown.width()) if wrapped else self._column.totalSizeHint().height()
        return self.height() - shown.height() + max(needed, MIN_DETAILS_HEIGHT_PX)

    def show_details(self, shown: bool) -> None:
        """Show or hide the table and the layouts that were tried, without emitting a signal."""
        self._shows_details = shown
        self.details_button.setChecked(shown)
        self._fit_details()

    def _fit_details(self) -> None:
        shown = self._shows_details
        has_attempts = len(self._attempts) > 1
        self.details_button.setVisible(self._table is not None or has_attempts)
        self._rows_title.setVisible(shown and bool(self._rows_title.text()))
        self._attempts_label.setVisible(shown and has_attempts)
        if self._table is not None:
            self._table.setVisible(shown)

    def _on_details(self, shown: bool) -> None:
        self.show_details(shown)
        self.details_toggled.emit(shown)

    def show_idle(self) -> None:
        """Show that no load has been started yet."""
        self._show(None, IDLE_SENTENCE)

    def show_progress(self, stage: Stage, fraction: float | None = None, device: str | None = None) -> None:
        """Show the stage of a load.

        `fraction`: progress of the stage, 0 to 1; None if its length is unknown.
        `device`: id of the device that is being filled; None if unknown.
        """
        if self._outcome is not None:
            self._show_attempts(())  # Those of the load before.
        self._show(None, f"{progress_text(stage, device, fraction)}…")
        # A range of 0 to 0 makes Qt show a busy bar.
        self._progress.setRange(0, 0 if fraction is None else PROGRESS_STEPS)
        self._progress.setValue(0 if fraction is None else round(min(max(fraction, 0.0), 1.0) * PROGRESS_STEPS))
        self._progress.show()

    def show_attempt(self, event: Attempt) -> None:
        """Add a layout that the load tries. The first attempt of a load removes the attempts of the previous load."""
        self._show_attempts((*(self._attempts if event.number > 1 else ()), attempt_text(event)))

    def show_loaded(self, event: Loaded) -> None:
        """Show the measured memory of a successful load, with the forecast."""
        self._show_outcome(loaded_outcome(event))

    def show_out_of_memory(
        self,
        event: OutOfMemory,
        names: Mapping[str, str] | None = None,
        proposals: Sequence[ProposalText] = (),
        short_bytes: int = 0,
    ) -> None:
        """Show which device ran out of memory, how many bytes it could not allocate, and changes that should help.

        `names`: names of devices by id.
        `proposals`: the changes with their effects; if there are none, those of `event` are shown without effects.
        `short_bytes`: bytes that the device lacks for the whole layout, according to the forecast; 0 if unknown.
        """
        self._show_outcome(out_of_memory_outcome(event, names or {}, proposals, short_bytes))

    def show_failed(self, event: Failed, *, was_loaded: bool = False) -> None:
        """Show the reason why the load was refused or failed. Offer remedies if RPC workers of this computer stopped.

        `was_loaded`: whether the load had succeeded and the model stopped later.
        """
        self._show_outcome(failed_outcome(event, was_loaded=was_loaded))
        # After `_show_outcome`, which resets it for every ending.
        self._is_unreachable = event.kind == "unreachable"
        self._show_remedies()

    def set_stopped_workers(self, names: tuple[str, ...]) -> None:
        """Set the names of stopped lab workers (RPC workers on this computer).

        If a load failed because of them, the report offers a restart, or a layout without them.
        """
        self._stopped = names
        self._show_remedies()

    def _show_remedies(self) -> None:
        count, is_offered = len(self._stopped), bool(self._stopped) and self._is_unreachable
        self.restart_button.setText(tr("Restart Worker") if count <= 1 else tr("Restart Workers"))
        self.lay_out_button.setText(
            tr("Find Layout Without Worker") if count <= 1 else tr("Find Layout Without Workers")
        )
        self.restart_button.setToolTip(plain_tool_tip(tr("Start {names} again", names=", ".join(self._stopped))))
        self.lay_out_button.setToolTip(tr("Propose a layout without the stopped workers; Undo reverts the change"))
        for button in (self.restart_button, self.lay_out_button):
            button.setVisible(is_offered)

    def show_crashed(self, event: Crashed) -> None:
        """Show how the model child process ended, and offer to check the machine."""
        self._show_outcome(crashed_outcome(event))
        self.check_button.show()

    def show_cancelled(self, event: Cancelled) -> None:
        """Show that the load was cancelled, and in which stage."""
        self._show_outcome(cancelled_outcome(event))

    def plain_text(self) -> str:
        """Return the report as plain text, for the clipboard."""
        return f"{self.sentence}\n" if self._outcome is None else plain_report(self._outcome)

    def copy(self) -> None:
        """Put the report on the clipboard."""
        QGuiApplication.clipboard().setText(self.plain_text())

    def _show_outcome(self, outcome: Outcome) -> None:
        if len(self._attempts) > 1:
            tried = tr("{count} layouts tried.", count=len(self._attempts))
            # Into the outcome, because "Copy" makes its text from that.
            outcome = replace(outcome, attempts=self._attempts, sentence=f"{outcome.sentence} {tried}")
        self._show(outcome, outcome.sentence)

    def _show_attempts(self, attempts: tuple[str, ...]) -> None:
        self._attempts = attempts
        self._attempts_label.setText("\n".join((ATTEMPTS_TITLE, *attempts)))
        self._fit_details()

    def _show(self, outcome: Outcome | None, sentence: str) -> None:
        self._outcome = outcome
        self._progress.hide()
        self.check_button.hide()
        self._is_unreachable = False
        self._show_remedies()
        self._sentence.setText(sentence)
        set_role(self._sentence, "dim" if outcome is None else "")
        self._badge.setVisible(outcome is not None)
        self.copy_button.setEnabled(outcome is not None)
        self.copy_button.setVisible(outcome is not None)
        # An empty report is no stop of the Tab key.
        self._scroll.setFocusPolicy(Qt.FocusPolicy.NoFocus if outcome is None else Qt.FocusPolicy.StrongFocus)
        detail = "" if outcome is None else outcome.detail
        self._detail.setText(detail)
        self._detail.setVisible(bool(detail))
        if outcome is not None:
            self._badge.setText(outcome.badge)
            set_role(self._badge, f"badge-{outcome.tone}")
        self._show_table(outcome)
        self._show_proposals(() if outcome is None else outcome.proposals)

    def _show_proposals(self, proposals: Sequence[ProposalText]) -> None:
        # Deleted later: the click that chose a proposal may have led here, and its button is still on the stack.
        old, self.proposal_list = self.proposal_list, None
        if old is not None:
            self._column.removeWidget(old)
            old.hide()
            old.deleteLater()
        if proposals:
            self.proposal_list = ProposalList(proposals)
            self.proposal_list.chosen.connect(self.proposal_chosen)
            self._column.insertWidget(0, self.proposal_list)
            self.proposal_list.show()

    def _show_table(self, outcome: Outcome | None) -> None:
        # What to do about a failure comes before the numbers, a remark on a success after them.
        self._column.removeWidget(self._detail)
        is_bad = outcome is not None and outcome.tone == "bad"
        self._column.insertWidget(0 if is_bad else self._column.indexOf(self._rows_title) + 1, self._detail)
        if self._table is not None:
            self._column.removeWidget(self._table)
            self._table.hide()
            self._table.deleteLater()
            self._table = None
        self._rows_title.setText("" if outcome is None else outcome.rows_title)
        if outcome is not None and outcome.rows:
            self._table = ReportTable(outcome, self._palette)
            self._column.insertWidget(self._column.indexOf(self._rows_title) + 1, self._table)
        self._fit_details()

    def _build(self) -> None:
        for label in (self._sentence, self._detail, self._attempts_label):
            # Numbers and messages are copied into bug reports.
            label.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.copy_button.clicked.connect(self.copy)
        self.details_button.clicked.connect(self._on_details)
        self.check_button.clicked.connect(self.check_requested)
        self.restart_button.clicked.connect(self.restart_requested)
        self.lay_out_button.clicked.connect(self.lay_out_requested)
        heading = QHBoxLayout()
        heading.setSpacing(8)
        top = Qt.AlignmentFlag.AlignTop
        heading.addWidget(self._badge, 0, top)
        heading.addWidget(self._sentence, 1, top)
        for button in (self.check_button, self.restart_button, self.lay_out_button, self.details_button):
            heading.addWidget(button, 0, top)
        heading.addWidget(self.copy_button, 0, top)
        content = QWidget()
        content.setLayout(self._column)
        self._column.setContentsMargins(0, 0, 0, 0)
        self._column.setSpacing(8)
        self._column.addWidget(self._detail)
        self._column.addWidget(self._rows_title)
        self._column.addWidget(self._attempts_label)
        self._column.addStretch(1)
        scroll = self._scroll
        # Without it the content would keep the width of its hint, and long sentences would not wrap.
        scroll.setWidgetResizable(True)
        scroll.setAccessibleName(tr("Details of the last load"))
        scroll.setFrameShape(QScrollArea.Shape.NoFrame)
        # The sentence above is never cut for it.
        scroll.setMinimumHeight(MIN_DETAILS_HEIGHT_PX)
        scroll.setWidget(content)
        layout = v_box(self, spacing=8, margins=(8, 4, 8, 8))
        layout.addLayout(heading)
        layout.addWidget(self._progress)
        layout.addWidget(scroll, 1)


class ProposalList(QWidget):
    """List of changes that should help after a load ran out of memory, the best first.

    Each has a button that applies it.
    """

    chosen = Signal(int)  # the index of the proposal in the list

    def __init__(self, proposals: Sequence[ProposalText], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.buttons: list[QPushButton] = []
        column = v_box(self, spacing=4)
        for index, words in enumerate(proposals):
            column.addWidget(self._row(index, words))

    def _row(self, index: int, words: ProposalText) -> QFrame:
        frame = QFrame()
        frame.setProperty("role", "card")
        row = h_box(frame, spacing=12, margins=(8, 4, 4, 4))
        row.addWidget(_text(words.text, "strong"), 4)
        row.addWidget(_text(words.detail, "dim"), 5)
        button = QPushButton(tr("Apply"))
        button.setProperty("role", "primary")
        button.setAccessibleName(tr("Apply: {text}", text=words.text))
        button.setToolTip(tr("Change the layout without loading it. Undo reverts the change."))
        button.clicked.connect(partial(self.chosen.emit, index))
        row.addWidget(button, 0, Qt.AlignmentFlag.AlignVCenter)
        self.buttons.append(button)
        return frame


def _text(text: str, role: str) -> QLabel:
    label = plain_label(text, role, wrap=True)
    label.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
    return label
