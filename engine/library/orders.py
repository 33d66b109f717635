"""Requests to the library's child and its answers, which hold pairs: the number of a model in the request, and what was
found of it."""

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
from engine.runtime.protocol.messages import Failure, Hello, Message, Request


class ReadHeaders(Request, frozen=True, tag="read_headers", kw_only=True):
    """Read the headers of models, each with all of its parts. Paths are bytes: a name need not be text."""

    models: tuple[tuple[bytes, ...], ...]


class PlanModels(Request, frozen=True, tag="plan_models", kw_only=True):
    """Forecast models, each by the path of its first part. `order` to `speeds` are those of `Constraints`."""

    models: tuple[bytes, ...]
    rig: Rig
    strategy: str
    order: tuple[str, ...]
    off: frozenset[str]
    split: bool
    kv_types: tuple[KvType, ...]
    speeds: Speeds

    @property
    def constraints(self) -> Constraints:
        return Constraints(order=self.order, off=self.off, split=self.split, kv_types=self.kv_types, speeds=self.speeds)


Order = ReadHeaders | PlanModels


class FactsFound(Message, frozen=True, tag="facts_found", kw_only=True):
    """Answer to `ReadHeaders`, about some of the models."""

    found: tuple[tuple[int, Facts], ...]


class FitsFound(Message, frozen=True, tag="fits_found", kw_only=True):
    """Answer to `PlanModels`, about some of the models."""

    found: tuple[tuple[int, Fit], ...]


class Working(Message, frozen=True, tag="working"):
    """Sign of life while nothing is found."""


class AllFound(Message, frozen=True, tag="all_found"):
    """The request is done."""


AnyFound = FactsFound | FitsFound | Working | AllFound | Hello | Failure


def read_order(models: Iterable[Iterable[Path]]) -> ReadHeaders:
    """Return the order to read the headers of `models`."""
    return ReadHeaders(models=tuple(tuple(map(os.fsencode, paths)) for paths in models))


def plan_order(models: Iterable[Path], rig: Rig, strategy: str, constraints: Constraints) -> PlanModels:
    """Return the order to forecast `models`."""
    return PlanModels(
        models=tuple(map(os.fsencode, models)),
        rig=rig,
        strategy=strategy,
        order=constraints.order,
        off=constraints.off,
        split=constraints.split,
        kv_types=constraints.kv_types,
        speeds=constraints.speeds,
    )


def path_of(encoded: bytes) -> Path:
    """Return a path of an order."""
    return Path(os.fsdecode(encoded))
