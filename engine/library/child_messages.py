"""Messages between the library and the child process that reads headers and makes forecasts.

An answer carries pairs: the index of a model in the request, and the result for that model.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from engine.devices.device import Rig
from engine.library.facts import Facts
from engine.library.fit import Fit
from engine.planning.fit.strategies.constraints import Constraints
from engine.planning.settings.context_settings import KvType
from engine.planning.speed.speeds import Speeds
from engine.runtime.protocol.messages import Failure, Hello, Message
from engine.runtime.protocol.requests import Request


class ReadHeaders(Request, frozen=True, tag="read_headers", kw_only=True):
    """Request: read the headers of models. Each model is the tuple of the paths of its parts.

    Paths are bytes, because file names on Linux need not be text.
    """

    models: tuple[tuple[bytes, ...], ...]


class PlanModels(Request, frozen=True, tag="plan_models", kw_only=True):
    """Request: forecast memory and speed of models on a rig.

    `models`: for each model, the path of its first part and the path of its projector (empty: no projector).
    `strategy`: name of the strategy that finds the layout.
    The fields from `order` to `speeds` are fields of `Constraints`.
    """

    models: tuple[tuple[bytes, bytes], ...]
    rig: Rig
    strategy: str
    order: tuple[str, ...]
    off: frozenset[str]
    split: bool
    one_backend: bool
    kv_types: tuple[KvType, ...]
    speeds: Speeds

    @property
    def constraints(self) -> Constraints:
        return Constraints(
            order=self.order,
            off=self.off,
            split=self.split,
            one_backend=self.one_backend,
            kv_types=self.kv_types,
            speeds=self.speeds,
        )


LibraryRequest = ReadHeaders | PlanModels


class FactsFound(Message, frozen=True, tag="facts_found", kw_only=True):
    """Answer to `ReadHeaders`: the header values of some of the models. A request may get several such answers.

    `found`: pairs of the model's index in the request, and its header values.
    """

    found: tuple[tuple[int, Facts], ...]


class FitsFound(Message, frozen=True, tag="fits_found", kw_only=True):
    """Answer to `PlanModels`: the forecasts of some of the models, by index. A request may get several such answers."""

    found: tuple[tuple[int, Fit], ...]


class Working(Message, frozen=True, tag="working"):
    """Heartbeat of the child, sent while it has no result to send."""


class AllFound(Message, frozen=True, tag="all_found"):
    """Last message of the child for a request: it has sent all results."""


AnyFound = FactsFound | FitsFound | Working | AllFound | Hello | Failure


def read_request(models: Iterable[Iterable[Path]]) -> ReadHeaders:
    """Return the request to read the headers of `models`, each a series of the paths of its parts."""
    return ReadHeaders(models=tuple(tuple(map(os.fsencode, paths)) for paths in models))


def plan_request(
    models: Iterable[tuple[Path, Path | None]], rig: Rig, strategy: str, constraints: Constraints
) -> PlanModels:
    """Return the request to forecast `models`.

    `models`: pairs of the path of a model's first part and the path of its projector (None: no projector).
    """
    return PlanModels(
        models=tuple(
            (os.fsencode(path), b"" if projector is None else os.fsencode(projector)) for path, projector in models
        ),
        rig=rig,
        strategy=strategy,
        order=constraints.order,
        off=constraints.off,
        split=constraints.split,
        one_backend=constraints.one_backend,
        kv_types=constraints.kv_types,
        speeds=constraints.speeds,
    )


def path_of(encoded: bytes) -> Path:
    """Return the path that a request carries as bytes."""
    return Path(os.fsdecode(encoded))
