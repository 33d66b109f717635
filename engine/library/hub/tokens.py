"""Access tokens of the hub, saved in the system's keyring, or kept in memory if there is no keyring.

They are written to no file or log. Tokens of other Hugging Face programs (`HF_TOKEN`, their token file) are read and
never written.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

from engine.base.errors import ArgumentError
from engine.base.files import hugging_face_home, read_at_most
from engine.base.language import tr
from engine.library.hub.settings import HubSettings

SERVICE = "layerdeck"
MAX_TOKEN = 500
TokenLocation = Literal["keyring", "session", "environment", "file"]


class TokenStore:
    """Finds and saves access tokens of hubs.

    May be used in any thread but the GUI thread: a keyring may open a dialog.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = environment
        self._lock = threading.Lock()
        self._session: dict[str, str] = {}

    def find(self, hub: HubSettings) -> str | None:
        """Return the access token for `hub`; None if there is none."""
        found = self.locate(hub)
        return found[1] if found else None

    def locate(self, hub: HubSettings) -> tuple[TokenLocation, str] | None:
        """Return where the access token for `hub` was found, and the token; None if there is none."""
        with self._lock:
            # The token of this session first: the user has just entered it.
            of_session = self._session.get(hub.endpoint)
        if of_session:
            return "session", of_session
        if kept := _from_keyring(hub.endpoint):
            return "keyring", kept
        if not hub.trusted:
            return None  # A mirror is not the hub that those tokens are for.
        environment = os.environ if self._environment is None else self._environment
        if (named := _checked(environment.get("HF_TOKEN") or environment.get("HUGGING_FACE_HUB_TOKEN"))) is not None:
            return "environment", named
        if (filed := _from_file(token_file(environment))) is not None:
            return "file", filed
        return None

    def keep(self, hub: HubSettings, token: str) -> TokenLocation:
        """Save the access token for `hub`, and return where it is stored.

        If there is no keyring, the token is kept in memory until the program ends.

        Raises:
            ArgumentError: if `token` is not a valid token.
        """
        checked = _checked(token)
        if checked is None:
            raise ArgumentError(
                tr(
                    "This is not an access token. A token has no spaces and looks like hf_...; create one in the "
                    "settings of your Hugging Face account."
                )
            )
        with self._lock:
            # Also without a keyring the token works until the program ends.
            self._session[hub.endpoint] = checked
        try:
            import keyring

            keyring.set_password(SERVICE, hub.endpoint, checked)
        except Exception:  # Backends raise what they like: no keyring, locked, refused by the user.
            return "session"
        return "keyring"

    def forget(self, hub: HubSettings) -> TokenLocation | None:
        """Delete the saved access token for `hub`. Tokens of other programs are kept.

        Another program's token may be used for `hub` afterwards: return where it is stored, None if there is none. If
        the keyring refused to delete the saved token, the result is "keyring".
        """
        with self._lock:
            self._session.pop(hub.endpoint, None)
        with suppress(Exception):  # As above; also if there was no token.
            import keyring

            keyring.delete_password(SERVICE, hub.endpoint)
        found = self.locate(hub)
        return found[0] if found else None


def token_file(environment: Mapping[str, str]) -> Path:
    """Return the path of the token file that Hugging Face programs share.

    `environment`: environment variables. `HF_TOKEN_PATH` sets the path, and other variables of Hugging Face its folder.
    """
    if named := environment.get("HF_TOKEN_PATH"):
        # Not `Path.expanduser`, which raises for an unknown user; there is then no such file.
        return Path(os.path.expanduser(named))  # noqa: PTH111
    return hugging_face_home(environment) / "token"


def _from_keyring(endpoint: str) -> str | None:
    try:
        import keyring

        return _checked(keyring.get_password(SERVICE, endpoint))
    except Exception:  # Backends raise what they like; a token that cannot be had is none.
        return None


def _from_file(path: Path) -> str | None:
    try:
        return _checked(read_at_most(path, MAX_TOKEN + 2).decode("ascii"))
    except (OSError, ValueError):
        return None


def _checked(token: str | None) -> str | None:
    """Return the token without surrounding spaces; None if it is empty or not valid in an HTTP header."""
    stripped = (token or "").strip()
    is_word = stripped.isascii() and stripped.isprintable() and " " not in stripped
    return stripped if stripped and is_word and len(stripped) <= MAX_TOKEN else None
