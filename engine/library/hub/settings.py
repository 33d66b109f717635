"""Settings of the Hugging Face hub (endpoint, offline mode), and `HubError`, the error of its HTTP requests."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal
from urllib.parse import quote as quoted
from urllib.parse import urlsplit

from msgspec import Struct

from engine.base.errors import ArgumentError, EngineError
from engine.base.language import tr
from engine.base.texts import quote

# Reason of an error. "gated" and "token" need a token, "offline" the offline switch, "rate_limited" a pause.
HubErrorKind = Literal[
    "gated",
    "token",
    "not_found",
    "refused",
    "offline",
    "unreachable",
    "timeout",
    "tls",
    "proxy",
    "rate_limited",
    "server",
    "answer",
    "redirect",
]

_OURS_TO_CHANGE: frozenset[HubErrorKind] = frozenset({"gated", "token", "not_found", "refused", "offline"})
# Reasons that may be temporary, so that a retry makes sense.
TEMPORARY: frozenset[HubErrorKind] = frozenset({"unreachable", "timeout", "rate_limited", "server", "answer", "proxy"})
PUBLIC_ENDPOINT = "https://huggingface.co"
_TRUE = {"1", "ON", "YES", "TRUE"}
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}


class HubError(EngineError):
    """A failed HTTP request to the hub or another server.

    `fault`: the reason.
    `retry_after_s`: pause in seconds that a busy server requested, None if it requested none.
    """

    def __init__(self, fault: HubErrorKind, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.fault = fault
        self.retry_after_s = retry_after_s

    @property
    def kind(self) -> str:  # type: ignore[override]
        """Kind of the error, as listed in `docs/contract.md`.

        "argument" if the user can avoid it by another command or setting, else "unreachable".
        """
        return "argument" if self.fault in _OURS_TO_CHANGE else "unreachable"

    @property
    def is_temporary(self) -> bool:
        """Whether the reason is temporary, so that a retry makes sense."""
        return self.fault in TEMPORARY


class HubSettings(Struct, frozen=True):
    """The Hugging Face hub, or a mirror, that requests go to.

    `endpoint`: scheme, host and path, without a trailing slash.
    `offline`: whether all requests are refused.
    `trusted`: whether the endpoint is the public hub or that of `HF_ENDPOINT`. The tokens of other programs are sent
    only to a trusted endpoint.
    """

    endpoint: str = PUBLIC_ENDPOINT
    offline: bool = False
    trusted: bool = True

    def require_online(self) -> None:
        """Raise `HubError` in offline mode."""
        if self.offline:
            raise HubError(
                "offline",
                tr("Layerdeck works offline. Turn off Work Offline, or unset HF_HUB_OFFLINE, to reach the hub."),
            )

    def file_url(self, repo: str, revision: str, path: str) -> str:
        """Return the address of a file in the repository `repo`.

        The hub answers with the file's bytes, or with a redirect to a signed link.

        `revision`: branch, tag or commit.
        `path`: path of the file in the repository.
        """
        return f"{self.endpoint}/{repo}/resolve/{quoted(revision, safe='')}/{quoted(path)}"


def hub_settings(
    mirror: str = "", *, offline: bool = False, environment: Mapping[str, str] | None = None
) -> HubSettings:
    """Return the settings of the hub. Its endpoint is `HF_ENDPOINT`, else `mirror`, else huggingface.co.

    `offline`: whether the user set offline mode; the environment (`HF_HUB_OFFLINE`) can set it as well.
    `environment`: environment variables, None for those of this process.

    Raises:
        ArgumentError: if the endpoint is not https (http is allowed for this computer).
    """
    found = os.environ if environment is None else environment
    named = found.get("HF_ENDPOINT", "").strip()
    endpoint = (named or mirror.strip() or PUBLIC_ENDPOINT).rstrip("/")
    if not is_safe_url(endpoint):
        where = "HF_ENDPOINT" if named else tr("the mirror")
        raise ArgumentError(
            tr(
                "{endpoint} cannot be used as the address of {service}; use an address that begins with https://.",
                endpoint=quote(endpoint),
                service=where,
            )
        )
    says_offline = any(found.get(name, "").upper() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return HubSettings(endpoint, offline or says_offline, bool(named) or endpoint == PUBLIC_ENDPOINT)


def is_loopback(url: str) -> bool:
    """Return whether the host of `url` is this computer's loopback interface."""
    return _host(url) in _LOOPBACK


def is_safe_url(url: str) -> bool:
    """Return whether `url` is allowed: https to any host, http to this computer."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return False
    if not url.isprintable() or " " in url or "\\" in url or not parts.hostname or parts.username is not None:
        return False
    return parts.scheme == "https" or (parts.scheme == "http" and is_loopback(url))


def same_origin(url: str, other: str) -> bool:
    """Return whether the addresses `url` and `other` have the same scheme, host and port."""
    return _origin(url) == _origin(other)


def _origin(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or {"https": 443, "http": 80}.get(parts.scheme)


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
