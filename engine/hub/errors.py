"""What goes wrong between us and a hub or another server, as one sentence each."""

from __future__ import annotations

from typing import Literal

from engine.errors import EngineError

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
