"""Stored settings for access to the Hugging Face hub: address, offline mode and tokens."""

from __future__ import annotations

from msgspec import Struct

from app.notices import Notices
from app.settings import Settings
from engine.base.errors import ArgumentError
from engine.base.values import replace
from engine.library.hub.settings import HubSettings, hub_settings
from engine.library.hub.tokens import TokenLocation, TokenStore


class SavedHub(Struct, frozen=True):
    """Stored settings of the hub. `mirror`: address to use in place of the public hub; empty for the public hub.

    `offline`: whether no requests are sent.
    """

    mirror: str = ""
    offline: bool = False


class HubAccess:
    """Settings and access tokens of the hub. May be read in any thread; calls for tokens may wait for the keyring."""

    def __init__(self, kept_in: Settings, notices: Notices) -> None:
        self._settings, self._notices = kept_in, notices
        self.kept = kept_in.kept("hub", SavedHub) or SavedHub()
        self._tokens = TokenStore()

    @property
    def settings(self) -> HubSettings:
        """The address of the hub, and whether no connection to it is allowed (offline mode)."""
        return hub_settings(self.kept.mirror, offline=self.kept.offline)

    def token(self, hub: HubSettings) -> str | None:
        """Return the access token for `hub`; None if there is none.

        May wait for the keyring: not for the GUI thread.
        """
        return self._tokens.find(hub)

    def token_of(self, endpoint: str) -> str | None:
        """Return the access token for the hub at `endpoint`. May block.

        None if there is no token, or if the settings name another hub.
        """
        hub = self.settings
        return self.token(hub) if hub.endpoint == endpoint else None

    def keep_token(self, token: str) -> TokenLocation:
        """Save an access token, in the system's keyring if possible, and return where the token is saved. May block.

        Raises:
            ArgumentError: if `token` is not a valid token.
        """
        return self._tokens.keep(self.settings, token)

    def remove_token(self) -> TokenLocation | None:
        """Delete the saved access token of the present hub. Return the location of the token that is used from now on.

        The result is "keyring" if the system's keyring has not deleted the token, and None if no token is left. May
        block.
        """
        return self._tokens.forget(self.settings)

    def set_offline(self, offline: bool) -> None:
        """Store whether the hub is used offline: all requests are then refused."""
        self._keep(replace(self.kept, offline=offline))

    def set_mirror(self, mirror: str) -> None:
        """Store the address of a hub to use in place of the public one. An empty `mirror` selects the public one.

        If the address is not valid, an error is shown and nothing is stored.
        """
        try:
            # Only checked here: an invalid address raises.
            hub_settings(mirror)
        except ArgumentError as error:
            self._notices.show_error(error)
            return
        self._keep(replace(self.kept, mirror=mirror.strip()))

    def _keep(self, kept: SavedHub) -> None:
        # Replaced as a whole: other threads see the old or the new settings.
        before, self.kept = self.kept, kept
        self._settings.keep_changes("hub", before, kept)
