"""Which hub is asked, whether the network may be used, and the error of everything that asks a hub or server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from engine.base.errors import ArgumentError, EngineError
from engine.base.language import tr
from engine.model.gguf.quoting import quote

HubFault = Literal[
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
"""What a window can act on: gated and token want a token, offline its switch, rate_limited some patience."""

_OURS_TO_CHANGE: frozenset[HubFault] = frozenset({"gated", "token", "not_found", "refused", "offline"})
PASSING: frozenset[HubFault] = frozenset({"unreachable", "timeout", "rate_limited", "server", "answer", "proxy"})
"""Faults that may be gone after a while, so that trying again makes sense."""
PUBLIC_ENDPOINT = "https://huggingface.co"
_TRUE = {"1", "ON", "YES", "TRUE"}
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}


class HubError(EngineError):
    """A hub or server that does not give what was asked for. `retry_after_s`: what a busy one asked us to wait."""

    def __init__(self, fault: HubFault, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.fault = fault
        self.retry_after_s = retry_after_s

    @property
    def kind(self) -> str:  # type: ignore[override]
        """The contract's word: what another call can change is an argument, all else a place that is not reached."""
        return "argument" if self.fault in _OURS_TO_CHANGE else "unreachable"

    @property
    def passes(self) -> bool:
        """Whether trying again later may help."""
        return self.fault in PASSING


@dataclass(frozen=True, slots=True)
class HubSettings:
    """`endpoint`: scheme and host (and path) of the hub, without a slash at the end; `offline`: nothing is asked.

    `trusted`: the public hub, or one that the environment names; only there go tokens that other programs left.
    """

    endpoint: str = PUBLIC_ENDPOINT
    offline: bool = False
    trusted: bool = True

    def require_online(self) -> None:
        """Raise where nothing is to be asked."""
        if self.offline:
            raise HubError("offline", tr("Working offline: turn that off, or unset HF_HUB_OFFLINE, to reach the hub."))


def hub_settings(
    mirror: str = "", *, offline: bool = False, environment: Mapping[str, str] | None = None
) -> HubSettings:
    """Return the hub to ask: what `HF_ENDPOINT` names, else `mirror`, else the public one.

    Raises:
        ArgumentError: for an address that is no https address (http for this machine itself).
    """
    found = os.environ if environment is None else environment
    named = found.get("HF_ENDPOINT", "").strip()
    endpoint = (named or mirror.strip() or PUBLIC_ENDPOINT).rstrip("/")
    if not is_safe_url(endpoint):
        where = "HF_ENDPOINT" if named else tr("the mirror")
        raise ArgumentError(
            tr(
                "{endpoint} is no address for {where}; use one that begins with https://.",
                endpoint=quote(endpoint),
                where=where,
            )
        )
    says_offline = any(found.get(name, "").upper() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return HubSettings(endpoint, offline or says_offline, bool(named) or endpoint == PUBLIC_ENDPOINT)


def is_loopback(url: str) -> bool:
    """Return whether `url` leads to this machine itself."""
    return _host(url) in _LOOPBACK


def is_safe_url(url: str) -> bool:
    """Return whether `url` may be asked: https to any host, http to this machine."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return False
    if not url.isprintable() or " " in url or "\\" in url or not parts.hostname or parts.username is not None:
        return False
    return parts.scheme == "https" or (parts.scheme == "http" and is_loopback(url))


def same_origin(url: str, other: str) -> bool:
    """Return whether both have scheme, host and port in common."""
    return _origin(url) == _origin(other)


def _origin(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or {"https": 443, "http": 80}.get(parts.scheme)


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
