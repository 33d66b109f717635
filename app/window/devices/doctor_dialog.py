"""The dialog of Help > Check This Computer: progress, results, and a report file."""

from __future__ import annotations

from PySide6.QtWidgets import QProgressBar, QWidget

from app.rig.examiner import Examiner
from app.window import dialogs
from app.window.dialogs import OneDialog
from engine.base.language import tr
from engine.machines.doctor.report import Check, Progress, Report, table
from widgets.common.dialog import StatusDialog
from widgets.common.roles import plain_label
from widgets.common.row_table import RowTable

REPORT_FILTER = tr("Reports (*.json);;All files (*)")
INTRODUCTION = tr(
    "Checks what is installed, whether the engine computes correctly on each device, whether forecasts are "
    "right, and how fast the devices are. The check takes a few minutes and loads a small model on each device. "
    "The report contains no personal data."
)
_COLUMNS = (tr("Check"), tr("Device"), "", tr("Result"))


class DoctorDialog(StatusDialog):
    """Tests this computer (engine, devices, forecasts, speeds) when it opens; closing the dialog cancels the tests."""

    def __init__(self, parent: QWidget, examiner: Examiner) -> None:
        super().__init__(tr("Check This Computer"), parent)
        self._examiner = examiner
        self._report: Report | None = None
        self.progress_bar = QProgressBar()
        self.progress_bar.setTextVisible(False)
        self.progress_bar.setAccessibleName(tr("Progress of the check"))
        self.table = RowTable(_COLUMNS, tr("Checks"))
        self.save_button = self.add_button(tr("Save Report…"), self._on_save, apart=True)
        self.cancel_button = self.add_button(tr("Cancel"), self._on_cancel)
        self.again_button = self.add_button(tr("Check Again"), self.begin)
        self.lay_out(plain_label(INTRODUCTION, "dim", wrap=True), self.status_label, self.progress_bar, self.table)
        self.resize(860, 560)
        examiner.progressed.connect(self._on_progress)
        examiner.finished.connect(self._on_finished)
        examiner.failed.connect(self._on_failed)

    def begin(self) -> None:
        """Start the tests of this computer anew."""
        self._report = None
        self.table.setRowCount(0)
        self._show_running(True)
        self.show_status(tr("Checking this computer…"))
        # Qt shows the range 0 to 0 as "busy": the number of checks is not known yet.
        self.progress_bar.setRange(0, 0)
        self._examiner.start()

    def done(self, result: int) -> None:
        """Close the dialog, and cancel running tests."""
        # Accept, reject and the close button of the window all end in `done`.
        self._examiner.cancel()
        super().done(result)

    def _on_progress(self, progress: Progress) -> None:
        self.progress_bar.setRange(0, progress.total)
        self.progress_bar.setValue(progress.done)
        # After Cancel the line says "Cancelling…" until the running check has ended.
        if progress.words and self.cancel_button.isEnabled():
            self.show_status(f"{progress.words}…")
        self._show_checks(progress.checks)

    def _on_finished(self, report: Report) -> None:
        self._report = report
        self.table.setRowCount(0)
        # All rows anew: unlike those shown so far, the report contains no personal names.
        self._show_checks(report.checks)
        self.show_status(report.summary, bad=not report.is_sound)
        self._show_running(False)

    def _on_failed(self, sentence: str) -> None:
        self.show_status(sentence, bad=True)
        self._show_running(False)

    def _on_cancel(self) -> None:
        self.cancel_button.setEnabled(False)
        self.show_status(tr("Cancelling…"))
        self._examiner.cancel()

    def _on_save(self) -> None:
        if self._report is None:
            return
        path = dialogs.ask_save(self, tr("Save the Report"), REPORT_FILTER, "layerdeck-report.json")
        if path is not None:
            self._examiner.save(path, self._report)

    def _show_checks(self, checks: tuple[Check, ...]) -> None:
        """Add rows for the new results. If the table was scrolled to its end, scroll it to the new end."""
        bar = self.table.verticalScrollBar()
        follows = bar.value() == bar.maximum()
        self.table.add_rows(table(checks)[self.table.rowCount() :])
        if follows:
            self.table.scrollToBottom()

    def _show_running(self, running: bool) -> None:
        self.progress_bar.setVisible(running)
        self.cancel_button.setVisible(running)
        self.cancel_button.setEnabled(running)
        self.again_button.setVisible(not running)
        self.save_button.setEnabled(not running and self._report is not None)


class DoctorPresenter(OneDialog[DoctorDialog]):
    """Opens the dialog Check This Computer, and starts its tests."""

    def __init__(self, examiner: Examiner, window: QWidget) -> None:
        super().__init__(lambda: DoctorDialog(window, examiner), DoctorDialog.begin, window)
