"""The hub in the window: searches, how what is offered would fit this rig, and the queue of downloads.

The hub's client takes half a second to import and every question a round trip: both happen beside the GUI thread, and
nothing of it is imported by a window that asks no hub.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
from PySide6.QtCore import QObject, Qt, Signal

from app.background import Background
from app.models.auto_layouts import AutoLayouts
from app.models.open_models import OpenModels
from app.models.speeds import SpeedKeeper
from app.notices import Notices
from app.paths import downloads_path, remote_headers_path
from app.rig.live_rig import LiveRig
from app.settings import Settings
from engine.cancellation import CancelToken
from engine.errors import ArgumentError, EngineError
from engine.fit.strategies.constraints import Constraints
from engine.fit.strategies.watch import Watch
from engine.hub.errors import HubError
from engine.hub.settings import HubSettings, hub_settings
from engine.hub.tokens import TokenStore
from engine.library.settled import settled_rig
from engine.plan.decisions.defaults import default_context
from widgets.library.find_values import DownloadWish, FoundRepo, SearchWish, ShownRepo

if TYPE_CHECKING:
    from engine.downloads.job import Job
    from engine.downloads.queue import DownloadQueue
    from engine.downloads.view import JobView
    from engine.gguf.model_file import ModelFile
    from engine.hub.listing import RepoListing

_T = TypeVar("_T")


class KeptHub(msgspec.Struct, frozen=True):
    """Which hub is asked, and whether any is."""

    mirror: str = ""
    offline: bool = False


class HubFinder(QObject):
    """Of several questions asked in quick succession the last one counts."""

    found = Signal(object)  # tuple[FoundRepo, ...]
    repo_shown = Signal(ShownRepo)
    jobs_changed = Signal(object)  # tuple[JobRow, ...]
    message = Signal(str)
    token_wanted = Signal(str)
    """The hub gives this only to somebody it knows; the text says so."""
    downloaded = Signal()

    _told = Signal(object)  # tuple[JobView, ...]

    def __init__(
        self,
        *,
        live: LiveRig,
        models: OpenModels,
        auto_layouts: AutoLayouts,
        speeds: SpeedKeeper,
        settings: Settings,
        background: Background,
        notices: Notices,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._live, self._models, self._auto_layouts, self._speeds = live, models, auto_layouts, speeds
        self._settings, self._background, self._notices = settings, background, notices
        self.kept = settings.kept("hub", KeptHub) or KeptHub()
        self._tokens = TokenStore()
        self._token = CancelToken()
        """Of the question under way."""
        self._listing: RepoListing | None = None
        self._asked = ""
        self._done: frozenset[str] | None = None
        self._queue: DownloadQueue | None = None
        self._told.connect(self._on_told, Qt.ConnectionType.QueuedConnection)

    def close(self) -> None:
        """End the question under way; a download goes on the next time."""
        self._token.cancel()
        if self._queue is not None:
            self._queue.close()

    def go_on(self) -> None:
        """Go on with downloads that an earlier run has left."""
        if downloads_path().is_file():
            self._open_queue()

    # ------------------------------------------------------------------ which hub

    def set_offline(self, offline: bool) -> None:
        """Keep whether nothing is asked of any hub."""
        self._keep(msgspec.structs.replace(self.kept, offline=offline))

    def set_mirror(self, mirror: str) -> None:
        """Keep which hub is asked instead of the public one; empty: that one."""
        try:
            hub_settings(mirror)
        except ArgumentError as error:
            self._notices.tell(error)
            return
        self._keep(msgspec.structs.replace(self.kept, mirror=mirror.strip()))

    def set_token(self, token: str) -> None:
        """Keep an access token, in the system's keyring where there is one, and ask again."""

        def keep() -> str:
            return self._tokens.keep(self._hub(), token)

        def kept(home: str) -> None:
            where = "in the keyring" if home == "keyring" else "for this session"
            self._notices.say(f"The token is kept {where}.")
            if self._asked:
                self.show_repo(self._asked)

        self._background.run("Keeping the token", keep, kept, self._notices.tell, quiet=True)

    def _keep(self, kept: KeptHub) -> None:
        self.kept = kept
        self._settings.keep("hub", kept)

    def _hub(self) -> HubSettings:
        return hub_settings(self.kept.mirror, offline=self.kept.offline)

    # ------------------------------------------------------------------ questions

    def search(self, wish: SearchWish) -> None:
        """Find repositories; where an address is given, show what it names."""
        if "/" in wish.text:
            self.show_repo(wish.text)
            return

        def ask() -> tuple[FoundRepo, ...]:
            from app.library.hub_words import found_repo
            from engine.hub.client import search_models
            from engine.hub.found import SEARCH_ORDERS, SearchQuery

            hub = self._hub()
            order = next(each for each in SEARCH_ORDERS if each == wish.order)
            models = search_models(SearchQuery(wish.text, order=order), hub, self._tokens.find(hub))
            return tuple(map(found_repo, models))

        def show(found: tuple[FoundRepo, ...]) -> None:
            self.found.emit(found)
            self.message.emit("" if found else "Nothing was found; try fewer words.")

        self._ask("Searching", ask, show)

    def show_repo(self, text: str) -> None:
        """Show what `text` names and how it would fit; a file of another server is downloaded."""
        self._asked = text
        rig = settled_rig(self._live.rig_without(self._models.held))
        wishes, speeds_of = self._auto_layouts.wishes, self._speeds.known_speeds
        token = self._token = self._renewed()

        def ask() -> tuple[RepoListing | None, ShownRepo | Job]:
            from app.library.hub_words import shown_repo
            from engine.downloads.job import web_job
            from engine.hub.addresses import WebAddress, parse_address
            from engine.hub.client import list_repo
            from engine.hub.fitting import fit_listing
            from engine.hub.forecast import FitWish
            from engine.hub.remote_header import HeaderCache

            hub = self._hub()
            address = parse_address(text, hub.endpoint)
            if isinstance(address, WebAddress):
                hub.require_online()
                return None, web_job(secrets.token_hex(8), address, self._web_folder)
            access = self._tokens.find(hub)
            listing = list_repo(address.repo, hub, access, revision=address.revision)
            constraints = Constraints(speeds=speeds_of(rig), watch=Watch(token))

            def wish_of(model: ModelFile) -> FitWish:
                return FitWish(rig, wishes.strategy, default_context(model), constraints)

            try:
                fit = fit_listing(listing, address, hub, access, HeaderCache(remote_headers_path()), wish_of)
            except HubError as error:
                if error.fault in ("gated", "token"):
                    raise
                return listing, shown_repo(listing, None, address, error.summary())
            return listing, shown_repo(listing, fit, address, fit.why)

        def show(answer: tuple[RepoListing | None, ShownRepo | Job]) -> None:
            self._listing = answer[0]
            if isinstance(answer[1], ShownRepo):
                self.repo_shown.emit(answer[1])
            else:
                self._add(answer[1])
            self.message.emit("")

        self._ask(f"Reading {text}", ask, show, token)

    @property
    def _web_folder(self) -> Path:
        """Where files of other servers go: beside what is downloaded otherwise."""
        return downloads_path().parent / "models"

    def _renewed(self) -> CancelToken:
        self._token.cancel()
        return CancelToken()

    def _ask(
        self, what: str, ask: Callable[[], _T], show: Callable[[_T], None], token: CancelToken | None = None
    ) -> None:
        mine = self._token = token or self._renewed()

        def answer(found: _T) -> None:
            if not mine.cancelled:
                show(found)

        def failed(error: EngineError) -> None:
            if mine.cancelled:
                return
            self.message.emit(error.summary())
            if isinstance(error, HubError) and error.fault in ("gated", "token"):
                self.token_wanted.emit(error.summary())

        self.message.emit(f"{what}…")
        self._background.run(what, ask, answer, failed, quiet=True)

    # ------------------------------------------------------------------ downloads

    def download(self, wish: DownloadWish) -> None:
        """Put a quantisation of the repository that is shown at the end of the queue."""
        from engine.downloads.job import hub_job

        listing = self._listing
        if listing is None or listing.repo != wish.repo:
            return
        try:
            quantisation = next(each for each in listing.quantisations if each.name == wish.name)
            self._add(hub_job(secrets.token_hex(8), listing, quantisation, self._hub(), wish.folder))
        except ArgumentError as error:
            self._notices.tell(error)

    def pause(self, job_id: str) -> None:
        """Stop a download; what is here stays."""
        self._open_queue().pause(job_id)

    def resume(self, job_id: str) -> None:
        """Let a download go on."""
        self._open_queue().resume(job_id)

    def restart(self, job_id: str) -> None:
        """Begin a download anew whose file has changed."""
        self._open_queue().resume(job_id, restart=True)

    def remove(self, job_id: str) -> None:
        """Take a download off the list, with what is here of unfinished files."""
        self._open_queue().remove(job_id, discard=True)

    def _add(self, job: Job) -> None:
        self._open_queue().add(job)
        self._notices.say(f"{job.title} is in the queue.")

    def _open_queue(self) -> DownloadQueue:
        if self._queue is None:
            from engine.downloads.queue import DownloadQueue

            self._queue = DownloadQueue(downloads_path(), self._told.emit, token_of=self._token_of)
        return self._queue

    def _token_of(self, endpoint: str) -> str | None:
        hub = self._hub()
        return self._tokens.find(hub) if hub.endpoint == endpoint else None

    def _on_told(self, jobs: tuple[JobView, ...]) -> None:
        from app.library.hub_words import job_row

        rows = tuple(map(job_row, jobs))
        self.jobs_changed.emit(rows)
        done = frozenset(row.id for row in rows if row.is_done)
        if self._done is not None and done - self._done:
            for job in jobs:
                if job.id in done - self._done:
                    self._notices.say(f"{job.title} is here.")
            self.downloaded.emit()
        self._done = done
