"""The Hugging Face hub in the window: searches, and memory forecasts of repositories for this rig.

The hub's client takes half a second to import, and each request takes a round trip. Both happen in background threads,
and a window that never uses the hub does not import the client.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from PySide6.QtCore import QObject, Signal

from app.background import Background, Task
from app.library.downloads import DownloadController
from app.library.hub_access import HubAccess
from app.models.auto_layouts import AutoLayouts
from app.models.open_models import OpenModels
from app.models.speeds import SpeedRepository
from app.notices import Notices
from app.paths import downloads_path, remote_headers_path
from app.rig.live_rig import LiveRig
from engine.base.errors import EngineError
from engine.base.language import tr
from engine.library.hub.settings import HubError
from engine.library.hub.tokens import TokenLocation
from engine.library.planning import settled_rig
from engine.planning.fit.strategies.constraints import Constraints, SearchLimit
from engine.planning.plan.decisions.context_length import default_context
from widgets.library.find_values import DownloadChoice, FoundRepo, SearchRequest, ShownCard, ShownRepo

if TYPE_CHECKING:
    from engine.library.downloads.job import Job
    from engine.library.hub.listing import RepoListing
    from engine.model.gguf.model_file import ModelFile

_T = TypeVar("_T")


class HubFinder(QObject):
    """Sends searches and requests to the hub. A newer request cancels the previous one."""

    found = Signal(object)  # tuple[FoundRepo, ...]
    repo_shown = Signal(ShownRepo)
    message = Signal(str)
    card_read = Signal(ShownCard)
    # The hub needs an access token; the text is its reason.
    token_wanted = Signal(str)

    def __init__(
        self,
        *,
        live: LiveRig,
        models: OpenModels,
        auto_layouts: AutoLayouts,
        speeds: SpeedRepository,
        access: HubAccess,
        downloads: DownloadController,
        background: Background,
        notices: Notices,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._live, self._models, self._auto_layouts, self._speeds = live, models, auto_layouts, speeds
        self.access, self.downloads = access, downloads
        self._background, self._notices = background, notices
        self._asking, self._reading_card = background.latest(), background.latest()
        self._listing: RepoListing | None = None
        self._asked = ""
        auto_layouts.projectors_counted.connect(self._on_projectors_counted)

    def _on_projectors_counted(self) -> None:
        """Forecast the shown repository again, because the preference to count projectors in forecasts has changed."""
        if self._listing is not None:
            self.show_repo(self._asked)

    def close(self) -> None:
        """Cancel the requests and close the download queue. The next start of the window resumes downloads."""
        self._asking.cancel()
        self._reading_card.cancel()
        self.downloads.close()

    def set_token(self, token: str) -> None:
        """Save an access token of the hub, in the system's keyring if possible, and repeat the last request."""

        def kept(home: str) -> None:
            self._notices.show(
                tr("Access token saved in the keyring.")
                if home == "keyring"
                else tr("Access token saved until Layerdeck is closed.")
            )
            if self._asked:
                self.show_repo(self._asked)

        keep = partial(self.access.keep_token, token)
        self._background.run("Keeping the token", keep, kept, self._notices.show_error, quiet=True)

    def remove_token(self) -> None:
        """Delete the access token that was entered here. Tokens of the environment and of other programs are kept."""

        def removed(remaining: TokenLocation | None) -> None:
            if remaining == "keyring":
                self._notices.show(
                    tr("The keyring did not remove the access token. Unlock it and try again."), bad=True
                )
            elif remaining is None:
                self._notices.show(tr("The access token was removed."))
            else:
                self._notices.show(
                    tr(
                        "The access token was removed. The token of other Hugging Face programs (HF_TOKEN or their "
                        "token file) is used from now on."
                    )
                )

        self._background.run(
            "Removing the token", self.access.remove_token, removed, self._notices.show_error, quiet=True
        )

    # ------------------------------------------------------------------ questions

    def search(self, request: SearchRequest) -> None:
        """Search the hub for repositories, and emit `found`.

        If the text of `request` has a slash, it is taken as the address of a repository, which is then shown.
        """
        # Names of repositories and addresses have a slash.
        if "/" in request.text:
            self.show_repo(request.text)
            return

        def ask(_task: Task[None]) -> tuple[FoundRepo, ...]:
            from app.library.hub_texts import found_repo
            from engine.library.hub.client import search_models
            from engine.library.hub.listing import SEARCH_ORDERS, SearchQuery

            hub = self.access.settings
            order = next(each for each in SEARCH_ORDERS if each == request.order)
            models = search_models(SearchQuery(request.text, order=order), hub, self.access.token(hub))
            return tuple(map(found_repo, models))

        def show(found: tuple[FoundRepo, ...]) -> None:
            self.found.emit(found)
            self.message.emit("" if found else tr("No results. Try fewer words."))

        self._ask(tr("Searching"), ask, show)

    def show_repo(self, text: str) -> None:
        """Show the quantisations in the repository that `text` names, with forecasts of their memory.

        If `text` is the URL of a file that is not on the hub, the file is downloaded instead.
        """
        self._asked = text
        # As if no model were loaded: a downloaded model may take the place of the loaded ones.
        rig = settled_rig(self._live.rig_without(self._models.held))
        options, speeds_of = self._auto_layouts.options, self._speeds.known_speeds
        text_only = not self._auto_layouts.counts_projectors

        def ask(task: Task[None]) -> tuple[RepoListing | None, ShownRepo | Job]:
            from app.library.hub_texts import shown_repo
            from engine.library.downloads.job import web_job
            from engine.library.hub.addresses import WebAddress, parse_address
            from engine.library.hub.client import list_repo
            from engine.library.hub.forecast import FitOptions, fit_listing
            from engine.library.hub.remote_header import HeaderCache

            hub = self.access.settings
            address = parse_address(text, hub.endpoint)
            if isinstance(address, WebAddress):
                hub.require_online()
                return None, web_job(secrets.token_hex(8), address, self._web_folder)
            access = self.access.token(hub)
            listing = list_repo(address.repo, hub, access, revision=address.revision)
            constraints = Constraints(
                speeds=speeds_of(rig), watch=SearchLimit(task.token), one_backend=options.one_backend
            )

            def options_of(model: ModelFile) -> FitOptions:
                return FitOptions(rig, options.strategy, default_context(model), constraints, text_only=text_only)

            try:
                fit = fit_listing(listing, address, hub, access, HeaderCache(remote_headers_path()), options_of)
            except HubError as error:
                # A token may help here. After other errors the list of files is still of use.
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
                # A token or a preference that changes later must not download the file once more.
                self._asked = ""
            self.message.emit("")

        self._ask(tr("Reading {text}", text=text), ask, show)

    def read_card(self) -> None:
        """Download the model card of the shown repository, and emit `card_read`.

        The card is from the same commit as the list of files.
        """
        listing = self._listing
        if listing is None:
            return
        hub = self.access.settings

        def ask(_task: Task[None]) -> ShownCard:
            from app.library.hub_texts import shown_card
            from engine.library.hub.card import fetch_card

            card = fetch_card(listing.repo, hub, self.access.token(hub), revision=listing.commit)
            return shown_card(listing.repo, card, hub.endpoint)

        def failed(error: EngineError) -> None:
            self.card_read.emit(ShownCard(listing.repo, (), "", error.summary()))

        self._reading_card.run("Reading a model card", ask, self.card_read.emit, failed, quiet=True)

    @property
    def _web_folder(self) -> Path:
        """Folder for model files that are downloaded from the URL of any web server, not from the hub."""
        return downloads_path().parent / "models"

    def _ask(self, what: str, ask: Callable[[Task[None]], _T], show: Callable[[_T], None]) -> None:
        def failed(error: EngineError) -> None:
            self.message.emit(error.summary())
            if isinstance(error, HubError) and error.fault in ("gated", "token"):
                self.token_wanted.emit(error.summary())

        self.message.emit(f"{what}…")
        self._asking.run(what, ask, show, failed, quiet=True)

    def download(self, choice: DownloadChoice) -> None:
        """Append the quantisation that the user has chosen in the shown repository to the download queue."""
        if self._listing is not None and self._listing.repo == choice.repo:
            self.downloads.download(choice, self._listing)
