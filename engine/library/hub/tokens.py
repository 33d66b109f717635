"""Access tokens: kept by the system's keyring, else for this session only; never in settings, files or logs of ours.

Tokens that other programs of the hub left (`HF_TOKEN`, the hub's own file) are read and never written.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from engine.base.errors import ArgumentError
from engine.base.files import hugging_face_home, read_at_most
from engine.base.language import tr
from engine.library.hub.settings import HubSettings

SERVICE = "layerdeck"
MAX_TOKEN = 500
TokenHome = Literal["keyring", "session", "environment", "file"]


class TokenStore:
    """The tokens of this session. For any thread; the keyring may ask the user, so not for one that draws."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = environment
        self._lock = threading.Lock()
        self._session: dict[str, str] = {}

    def find(self, hub: HubSettings) -> str | None:
        """Return the token for `hub`, None where there is none."""
        found = self.locate(hub)
        return found[1] if found else None

    def locate(self, hub: HubSettings) -> tuple[TokenHome, str] | None:
        """Return where the token for `hub` is kept, and the token."""
        with self._lock:
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

    def keep(self, hub: HubSettings, token: str) -> TokenHome:
        """Keep `token` for `hub`; return where: without a keyring it is forgotten at the end of the session.

        Raises:
            ArgumentError: for what cannot be a token.
        """
        checked = _checked(token)
        if checked is None:
            raise ArgumentError(
                tr("That is no access token: it is one word such as hf_..., from the settings of the hub.")
            )
        with self._lock:
            self._session[hub.endpoint] = checked
        try:
            import keyring

            keyring.set_password(SERVICE, hub.endpoint, checked)
        except Exception:  # Backends raise what they like: no keyring, locked, refused by the user.
            return "session"
        return "keyring"

    def forget(self, hub: HubSettings) -> None:
        """Forget what was kept for `hub`; what other programs left stays."""
        with self._lock:
            self._session.pop(hub.endpoint, None)
        try:
            import keyring

            keyring.delete_password(SERVICE, hub.endpoint)
        except Exception:  # As above; what was never there is gone too.
            return


def token_file(environment: Mapping[str, str]) -> Path:
    """Return where the hub's own tools keep the token of the one who logged in with them."""
    if named := environment.get("HF_TOKEN_PATH"):
        return Path(named).expanduser()
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
    """Return the token without spaces around it, None for what would break a header or is none."""
    stripped = (token or "").strip()
    is_word = stripped.isascii() and stripped.isprintable() and " " not in stripped
    return stripped if stripped and is_word and len(stripped) <= MAX_TOKEN else None
