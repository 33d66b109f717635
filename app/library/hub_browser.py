"""The hub in the window: searches, a repository with its card, and how it would fit, found beside the GUI thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from PySide6.QtCore import QObject, Signal

from app.background import Background
from engine.errors import EngineError
from engine.gguf.model_file import ModelFile
from engine.hub.addresses import HubAddress
from engine.hub.client import list_repo, model_card, search_models
from engine.hub.errors import HubError
from engine.hub.fit import RepoFit
from engine.hub.fitting import fit_listing
from engine.hub.forecast import FitWish
from engine.hub.found import SearchQuery
from engine.hub.listing import RepoListing
from engine.hub.remote_header import HeaderCache
from engine.hub.settings import HubSettings
from engine.hub.tokens import TokenStore

_T = TypeVar("_T")


class HubBrowser(QObject):
    """Answers one search and one repository at a time: what was asked before is not told any more.

    `failed` has what went wrong, and `token_wanted` says that an access token would help. `hub` is asked at each call.
    """

    found = Signal(object)  # tuple[HubModel, ...]
    listed = Signal(RepoListing)
    card_read = Signal(str)
    fitted = Signal(RepoFit)
    failed = Signal(object)  # EngineError
    token_wanted = Signal(str)

    def __init__(
        self,
        hub: Callable[[], HubSettings],
        *,
        tokens: TokenStore,
        cache: HeaderCache,
        background: Background,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._hub, self._tokens, self._cache, self._background = hub, tokens, cache, background
        self._search = self._repo = 0

    def search(self, query: SearchQuery) -> None:
        """Look for models; `found` tells."""
        self._search += 1
        number = self._search
        self._run(
            "Searching the hub",
            lambda hub, token: search_models(query, hub, token),
            self.found.emit,
            lambda: number == self._search,
        )

    def look(self, address: HubAddress, wish_of: Callable[[ModelFile], FitWish]) -> None:
        """Look into a repository: `listed` tells first, then `card_read` and, once its header was read, `fitted`."""
        self._repo += 1
        number = self._repo

        def is_wanted() -> bool:
            return number == self._repo

        def listed(listing: RepoListing) -> None:
            self.listed.emit(listing)
            self._run(
                "Reading the card",
                lambda hub, token: model_card(address.repo, hub, token),
                self.card_read.emit,
                is_wanted,
            )
            self._run(
                "Planning before the download",
                lambda hub, token: fit_listing(listing, address, hub, token, self._cache, wish_of),
                self.fitted.emit,
                is_wanted,
            )

        self._run(
            "Looking into the repository",
            lambda hub, token: list_repo(address.repo, hub, token, revision=address.revision),
            listed,
            is_wanted,
        )

    def keep_token(self, token: str, done: Callable[[str], None]) -> None:
        """Keep an access token for the hub; `done` hears where ("keyring", or "session" where there is none)."""
        self._run("Keeping the token", lambda hub, _token: self._tokens.keep(hub, token), done, lambda: True)

    def _run(
        self,
        what: str,
        ask: Callable[[HubSettings, str | None], _T],
        done: Callable[[_T], None],
        is_wanted: Callable[[], bool],
    ) -> None:
        def work() -> _T:
            hub = self._hub()
            return ask(hub, self._tokens.find(hub))

        def answered(answer: _T) -> None:
            if is_wanted():
                done(answer)

        def failed(error: EngineError) -> None:
            if is_wanted():
                self._on_error(error)

        self._background.run(what, work, answered, failed, quiet=True)

    def _on_error(self, error: EngineError) -> None:
        if isinstance(error, HubError) and error.fault in ("gated", "token"):
            self.token_wanted.emit(error.summary())
        else:
            self.failed.emit(error)
