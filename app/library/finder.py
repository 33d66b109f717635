"""The hub in the window: searches, and how what is offered would fit this rig.

The hub's client takes half a second to import and every question a round trip: both happen beside the GUI thread, and
nothing of it is imported by a window that asks no hub.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from PySide6.QtCore import QObject, Signal

from app.background import Background
from app.library.downloads import DownloadKeeper
from app.library.hub_access import HubAccess
from app.models.auto_layouts import AutoLayouts
from app.models.open_models import OpenModels
from app.models.speeds import SpeedKeeper
from app.notices import Notices
from app.paths import downloads_path, remote_headers_path
from app.rig.live_rig import LiveRig
from engine.base.cancellation import CancelToken
from engine.base.errors import EngineError
from engine.base.language import tr
from engine.library.hub.settings import HubError
from engine.library.planning import settled_rig
from engine.planning.fit.strategies.constraints import Constraints, Watch
from engine.planning.plan.decisions.context_length import default_context
from widgets.library.find_values import DownloadWish, FoundRepo, SearchWish, ShownCard, ShownRepo

if TYPE_CHECKING:
    from engine.library.downloads.job import Job
    from engine.library.hub.listing import RepoListing
    from engine.model.gguf.model_file import ModelFile

_T = TypeVar("_T")


class HubFinder(QObject):
    """Of several questions asked in quick succession the last one counts."""

    found = Signal(object)  # tuple[FoundRepo, ...]
    repo_shown = Signal(ShownRepo)
    message = Signal(str)
    card_read = Signal(ShownCard)
    token_wanted = Signal(str)
    """The hub gives this only to somebody it knows; the text says so."""

    def __init__(
        self,
        *,
        live: LiveRig,
        models: OpenModels,
        auto_layouts: AutoLayouts,
        speeds: SpeedKeeper,
        access: HubAccess,
        downloads: DownloadKeeper,
        background: Background,
        notices: Notices,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._live, self._models, self._auto_layouts, self._speeds = live, models, auto_layouts, speeds
        self.access, self.downloads = access, downloads
        self._background, self._notices = background, notices
        self._token = CancelToken()
        """Of the question under way."""
        self._card_token = CancelToken()
        self._listing: RepoListing | None = None
        self._asked = ""

    def close(self) -> None:
        """End the question under way; a download goes on the next time."""
        self._token.cancel()
        self._card_token.cancel()
        self.downloads.close()

    def set_token(self, token: str) -> None:
        """Keep an access token, in the system's keyring where there is one, and ask again."""

        def kept(home: str) -> None:
            where = tr("in the keyring") if home == "keyring" else tr("for this session")
            self._notices.say(tr("The token is kept {where}.", where=where))
            if self._asked:
                self.show_repo(self._asked)

        keep = partial(self.access.keep_token, token)
        self._background.run("Keeping the token", keep, kept, self._notices.tell, quiet=True)

    # ------------------------------------------------------------------ questions

    def search(self, wish: SearchWish) -> None:
        """Find repositories; where an address is given, show what it names."""
        if "/" in wish.text:
            self.show_repo(wish.text)
            return

        def ask() -> tuple[FoundRepo, ...]:
            from app.library.hub_words import found_repo
            from engine.library.hub.client import search_models
            from engine.library.hub.listing import SEARCH_ORDERS, SearchQuery

            hub = self.access.settings
            order = next(each for each in SEARCH_ORDERS if each == wish.order)
            models = search_models(SearchQuery(wish.text, order=order), hub, self.access.token(hub))
            return tuple(map(found_repo, models))

        def show(found: tuple[FoundRepo, ...]) -> None:
            self.found.emit(found)
            self.message.emit("" if found else tr("Nothing was found; try fewer words."))

        self._ask(tr("Searching"), ask, show)

    def show_repo(self, text: str) -> None:
        """Show what `text` names and how it would fit; a file of another server is downloaded."""
        self._asked = text
        rig = settled_rig(self._live.rig_without(self._models.held))
        wishes, speeds_of = self._auto_layouts.wishes, self._speeds.known_speeds
        token = self._token = self._renewed()

        def ask() -> tuple[RepoListing | None, ShownRepo | Job]:
            from app.library.hub_words import shown_repo
            from engine.library.downloads.job import web_job
            from engine.library.hub.addresses import WebAddress, parse_address
            from engine.library.hub.client import list_repo
            from engine.library.hub.forecast import FitWish, fit_listing
            from engine.library.hub.remote_header import HeaderCache

            hub = self.access.settings
            address = parse_address(text, hub.endpoint)
            if isinstance(address, WebAddress):
                hub.require_online()
                return None, web_job(secrets.token_hex(8), address, self._web_folder)
            access = self.access.token(hub)
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
                self.downloads.add(answer[1])
            self.message.emit("")

        self._ask(tr("Reading {text}", text=text), ask, show, token)

    def read_card(self) -> None:
        """Fetch the card of the repository that is shown, at the commit that its files are listed at."""
        listing = self._listing
        if listing is None:
            return
        self._card_token.cancel()
        token = self._card_token = CancelToken()
        hub = self.access.settings

        def ask() -> ShownCard:
            from app.library.hub_words import shown_card
            from engine.library.hub.card import fetch_card

            card = fetch_card(listing.repo, hub, self.access.token(hub), revision=listing.commit)
            return shown_card(listing.repo, card, hub.endpoint)

        def show(card: ShownCard) -> None:
            if not token.cancelled:
                self.card_read.emit(card)

        def failed(error: EngineError) -> None:
            show(ShownCard(listing.repo, (), "", error.summary()))

        self._background.run("Reading a model card", ask, show, failed, quiet=True)

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

    def download(self, wish: DownloadWish) -> None:
        """Fetch a quantisation of the repository that is shown."""
        if self._listing is not None and self._listing.repo == wish.repo:
            self.downloads.download(wish, self._listing)
