"""One model of the pool: its state between requests, and what a request gets of it."""

from __future__ import annotations

import asyncio

from engine.api.wire.api_request import Profile
from engine.api.wire.names import ModelEntry
from engine.planning.fit.loaded_models import HeldModel
from engine.runtime.session.events import LoadEnding
from engine.runtime.session.session import ModelSession
from engine.runtime.session.snapshot import Snapshot

_DEFAULT_KEEP_ALIVE_S = 300.0
"""Seconds after which an idle model is unloaded if a request loaded it; Ollama's default."""


def default_keep_alive_s(load_s: float) -> float:
    """Return the idle time in seconds after which a model is unloaded, if nobody has chosen one.

    It is at least as long as the load took. `load_s`: duration of the load in seconds.
    """
    return max(_DEFAULT_KEEP_ALIVE_S, load_s)


class PooledModel:
    """The pool's state of one model that is loaded or requested.

    `session`: the model's session; None: not loaded.
    `waiting`: futures of the requests that wait for the model.
    `users`: number of requests that the model is answering.
    `keep_alive_s`: the chosen idle time in seconds; None: the default one. `load_s`: seconds that the last load took.
    `held`: memory of the model; None: the pool has not loaded it.
    """

    def __init__(self, entry: ModelEntry, keep_alive_s: float | None) -> None:
        self.entry, self.keep_alive_s, self.load_s = entry, keep_alive_s, 0.0
        self.session: ModelSession | None = None
        self.waiting: list[asyncio.Future[None]] = []
        self.users = 0
        self.is_leaving = False
        """Whether the model will be unloaded for another one. New requests for it wait until it is loaded again."""
        self.held: HeldModel | None = None
        self.lent: HeldModel | None = None
        """Memory of a model that is lent to the pool (`ModelPool.lend`); None: the pool loads the model itself."""
        self.ended: asyncio.Future[LoadEnding] | None = None
        """Future with the result of the model's load; None: the pool has not loaded the model."""

    @property
    def snapshot(self) -> Snapshot:
        return Snapshot() if self.session is None else self.session.snapshot

    @property
    def idle_time_s(self) -> float:
        return default_keep_alive_s(self.load_s) if self.keep_alive_s is None else self.keep_alive_s

    @property
    def is_ready(self) -> bool:
        """Whether the model is loaded and may get new requests."""
        return self.snapshot.loaded is not None and not self.snapshot.is_unloading and not self.is_leaving


class LoadedModel:
    """A loaded model during one request; `ModelPool.use` provides it.

    `n_ctx`: number of tokens that prompt and answer of a request may have together.
    """

    def __init__(self, entry: ModelEntry, session: ModelSession, profile: Profile, n_ctx: int) -> None:
        self.id, self.session, self.profile, self.n_ctx = entry.id, session, profile, n_ctx
