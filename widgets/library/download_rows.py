"""The downloads, each with how far it is and what can be done with it."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QHBoxLayout, QProgressBar, QPushButton, QScrollArea, QVBoxLayout, QWidget

from engine.language import tr
from widgets.common.elided_label import ElidedLabel
from widgets.common.roles import plain_label, set_role
from widgets.library.find_values import JobRow

MAX_HEIGHT = 220
_STEPS = 1000


class DownloadRow(QWidget):
    """One download; it stays the same widget as long as the download is listed."""

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
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.addLayout(texts, 1)
        for button in (self.pause_button, self.resume_button, self.remove_button):
            row.addWidget(button)

    def show_job(self, job: JobRow) -> None:
        """Show how far it is."""
        self._restarts = job.must_restart
        self.title_label.setText(job.title)
        self.words_label.setText(job.words)
        set_role(self.words_label, "error" if job.is_bad else "dim")
        self.bar.setRange(0, 0 if job.fraction is None else _STEPS)
        self.bar.setValue(round((job.fraction or 0.0) * _STEPS))
        self.bar.setVisible(not job.is_done)
        self.bar.setAccessibleName(tr("Progress of {title}", title=job.title))
        self.pause_button.setVisible(job.may_pause)
        self.resume_button.setVisible(job.may_resume or job.must_restart)
        self.resume_button.setText(
            tr("Begin anew") if job.must_restart else tr("Retry") if job.is_bad else tr("Resume")
        )

    def _resume(self) -> None:
        signal = self._rows.restart_requested if self._restarts else self._rows.resume_requested
        signal.emit(self._job_id)


class DownloadRows(QWidget):
    """Hidden while nothing is downloaded."""

    pause_requested = Signal(str)
    resume_requested = Signal(str)
    restart_requested = Signal(str)
    remove_requested = Signal(str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.rows: dict[str, DownloadRow] = {}
        self._content = QWidget()
        self._column = QVBoxLayout(self._content)
        self._column.setContentsMargins(0, 0, 8, 0)
        scroll = QScrollArea()
        scroll.setWidgetResizable(True)
        scroll.setWidget(self._content)
        scroll.setMaximumHeight(MAX_HEIGHT)
        scroll.setAccessibleName(tr("Downloads"))
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.addWidget(plain_label(tr("Downloads"), "strong"))
        column.addWidget(scroll)
        self.hide()

    def show_jobs(self, jobs: Sequence[JobRow]) -> None:
        """Show these downloads in their order."""
        ids = [job.id for job in jobs]
        for gone in [job_id for job_id in self.rows if job_id not in ids]:
            self.rows.pop(gone).deleteLater()
        for place, job in enumerate(jobs):
            row = self.rows.get(job.id)
            if row is None:
                row = self.rows[job.id] = DownloadRow(self, job.id)
            if self._column.indexOf(row) != place:
                self._column.insertWidget(place, row)
            row.show_job(job)
        self.setVisible(bool(jobs))
