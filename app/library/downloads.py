"""The queue of downloads in the window: its jobs as one signal in the GUI thread, and what people ask of them."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import QObject, Qt, Signal

from app.background import Background
from app.notices import Notices
from engine.downloads.job import Job, hub_job, web_job
from engine.downloads.queue import DownloadQueue
from engine.downloads.view import JobState, JobView
from engine.hub.addresses import HubAddress, WebAddress
from engine.hub.client import list_repo
from engine.hub.listing import Quantisation, RepoListing
from engine.hub.settings import PUBLIC_ENDPOINT, HubSettings, hub_settings
from engine.hub.tokens import TokenStore
from engine.protocol.messages import Download


class Downloads(QObject):
    """`jobs` are the latest, in their order. `finished` is told once per job that has come whole."""

    jobs_changed = Signal(object)  # tuple[JobView, ...]
    finished = Signal(JobView)

    _told = Signal(object)  # tuple[JobView, ...]

    def __init__(
        self,
        path: Path,
        *,
        tokens: TokenStore,
        background: Background,
        notices: Notices,
        template: Download | None = None,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self.jobs: tuple[JobView, ...] = ()
        self._background, self._notices, self._tokens = background, notices, tokens
        self._told.connect(self._on_told, Qt.ConnectionType.QueuedConnection)
        self._queue = DownloadQueue(path, self._told.emit, token_of=self._token_of, template=template)

    def close(self) -> None:
        """End what runs, so that it goes on the next time; waits a bounded time."""
        self._queue.close()

    def add(
        self, listing: RepoListing, quantisation: Quantisation, hub: HubSettings, folder: Path | None = None
    ) -> None:
        """Download a quantisation with all that belongs to it; without a folder into the Hugging Face cache."""
        self._add(lambda: hub_job(_new_id(), listing, quantisation, hub, folder))

    def add_address(self, address: HubAddress | WebAddress, hub: HubSettings, folder: Path | None = None) -> None:
        """Download what an address names; a file of another server goes into the user's downloads without a folder."""

        def find() -> Job:
            if isinstance(address, WebAddress):
                hub.require_online()
                return web_job(_new_id(), address, folder or Path.home() / "Downloads")
            listing = list_repo(address.repo, hub, self._tokens.find(hub), revision=address.revision)
            found = listing.find(address.quantisation, address.path)
            return hub_job(_new_id(), listing, found, hub, folder)

        self._add(find)

    def pause(self, job_id: str) -> None:
        """Stop a job; what is here stays."""
        self._queue.pause(job_id)

    def resume(self, job_id: str, *, restart: bool = False) -> None:
        """Go on with a job; `restart`: begin a file anew that has changed."""
        self._queue.resume(job_id, restart=restart)

    def move(self, job_id: str, place: int) -> None:
        """Put a job at a place in the order."""
        self._queue.move(job_id, place)

    def remove(self, job_id: str, *, discard: bool = False) -> None:
        """Take a job off the list; `discard`: with what is here of unfinished files."""
        self._queue.remove(job_id, discard=discard)

    def _add(self, find: Callable[[], Job]) -> None:
        self._background.run("Looking for the files to download", find, self._queue.add, self._notices.tell)

    def _token_of(self, endpoint: str) -> str | None:
        # Called in the queue's thread: a keyring may ask people.
        named = hub_settings()
        trusted = endpoint == PUBLIC_ENDPOINT or (endpoint == named.endpoint and named.trusted)
        return self._tokens.find(HubSettings(endpoint, trusted=trusted))

    def _on_told(self, jobs: tuple[JobView, ...]) -> None:
        before = {job.id: job.state for job in self.jobs}
        self.jobs = jobs
        self.jobs_changed.emit(jobs)
        for job in jobs:
            if job.state is JobState.DONE and before.get(job.id, JobState.DONE) is not JobState.DONE:
                self.finished.emit(job)


def _new_id() -> str:
    return secrets.token_hex(8)
