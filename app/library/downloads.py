"""Connects the window to the download queue, which is imported and made when it is first needed."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Qt, Signal

from app.library.hub_access import HubAccess
from app.notices import Notices
from app.paths import downloads_path
from engine.base.errors import ArgumentError
from engine.base.language import tr
from widgets.library.find_values import DownloadChoice

if TYPE_CHECKING:
    from engine.library.downloads.job import Job, JobView
    from engine.library.downloads.queue import DownloadQueue
    from engine.library.hub.listing import RepoListing


class DownloadController(QObject):
    """Connects the window to the `DownloadQueue`. Calls return at once, since the queue has its own thread."""

    jobs_changed = Signal(object)  # tuple[JobRow, ...]
    downloaded = Signal()

    _jobs_changed = Signal(object)  # tuple[JobView, ...]

    def __init__(self, access: HubAccess, notices: Notices, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._access, self._notices = access, notices
        self._done: frozenset[str] | None = None
        self._queue: DownloadQueue | None = None
        # Emitted in the thread of the queue.
        self._jobs_changed.connect(self._on_jobs_changed, Qt.ConnectionType.QueuedConnection)

    def close(self) -> None:
        """Stop the running download. The next start of the window resumes it."""
        if self._queue is not None:
            self._queue.close()

    def go_on(self) -> None:
        """Resume the downloads that were left in the queue when the window was last closed, if there are any."""
        if downloads_path().is_file():
            self._open_queue()

    def download(self, choice: DownloadChoice, listing: RepoListing) -> None:
        """Append the quantisation that the user has chosen in the repository `listing` to the queue."""
        from engine.library.downloads.job import hub_job

        try:
            quantisation = next(each for each in listing.quantisations if each.name == choice.name)
            self.add(hub_job(secrets.token_hex(8), listing, quantisation, self._access.settings, choice.folder))
        except ArgumentError as error:
            self._notices.show_error(error)

    def pause(self, job_id: str) -> None:
        """Pause a download. The bytes downloaded so far stay on the disk."""
        self._open_queue().pause(job_id)

    def resume(self, job_id: str) -> None:
        """Resume a paused or failed download."""
        self._open_queue().resume(job_id)

    def restart(self, job_id: str) -> None:
        """Restart a download from the beginning, because its file on the hub has changed."""
        self._open_queue().resume(job_id, restart=True)

    def remove(self, job_id: str) -> None:
        """Remove a download from the queue, and delete the downloaded bytes of files that are not complete."""
        self._open_queue().remove(job_id, discard=True)

    def add(self, job: Job) -> None:
        """Append a job to the queue, and show a notice."""
        self._open_queue().add(job)
        self._notices.show(tr("{title} was added to the download queue.", title=job.title))

    def _open_queue(self) -> DownloadQueue:
        if self._queue is None:
            from engine.library.downloads.queue import DownloadQueue

            self._queue = DownloadQueue(downloads_path(), self._jobs_changed.emit, token_of=self._access.token_of)
        return self._queue

    def _on_jobs_changed(self, jobs: tuple[JobView, ...]) -> None:
        from app.library.hub_texts import job_row

        rows = tuple(map(job_row, jobs))
        self.jobs_changed.emit(rows)
        done = frozenset(row.id for row in rows if row.is_done)
        # The first report lists downloads that an earlier run has finished.
        if self._done is not None and done - self._done:
            for job in jobs:
                if job.id in done - self._done:
                    self._notices.show(tr("{title} has been downloaded.", title=job.title))
            self.downloaded.emit()
        self._done = done
