"""Which hub is asked, whether any is, and with whose token: kept between two runs."""

from __future__ import annotations

import msgspec

from app.notices import Notices
from app.settings import Settings
from engine.base.errors import ArgumentError
from engine.library.hub.settings import HubSettings, hub_settings
from engine.library.hub.tokens import TokenHome, TokenStore


class KeptHub(msgspec.Struct, frozen=True):
    """Which hub is asked, and whether any is."""

    mirror: str = ""
    offline: bool = False


class HubAccess:
    """`settings` and the tokens may be asked in any thread; a keyring may take its time."""

    def __init__(self, kept_in: Settings, notices: Notices) -> None:
        self._settings, self._notices = kept_in, notices
        self.kept = kept_in.kept("hub", KeptHub) or KeptHub()
        self._tokens = TokenStore()

    @property
    def settings(self) -> HubSettings:
        """The hub to ask."""
        return hub_settings(self.kept.mirror, offline=self.kept.offline)

    def token(self, hub: HubSettings) -> str | None:
        """Return the access token for `hub`, None without one. Beside the GUI thread."""
        return self._tokens.find(hub)

    def token_of(self, endpoint: str) -> str | None:
        """Return the token of the hub at `endpoint`, where that is still the one to ask. Beside the GUI thread."""
        hub = self.settings
        return self.token(hub) if hub.endpoint == endpoint else None

    def keep_token(self, token: str) -> TokenHome:
        """Keep an access token, in the system's keyring where there is one. Beside the GUI thread.

        Raises:
            ArgumentError: for what cannot be a token.
        """
        return self._tokens.keep(self.settings, token)

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

    def _keep(self, kept: KeptHub) -> None:
        self.kept = kept
        self._settings.keep("hub", kept)
