"""Forecasts for a whole library, one model after another, the wanted ones first; what is known is not asked again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from engine.cancellation import CancelToken
from engine.devices.device import Rig
from engine.errors import CancelledError, EngineError
from engine.fit.strategies.constraints import Constraints
from engine.fit.strategies.watch import Watch
from engine.gguf.reader import read_model
from engine.library.entry import Entry
from engine.library.fit import Fit
from engine.library.fitting import find_fit, unknown_fit

Job = tuple[str, Path]
"""A model's fingerprint, and where it is."""


def jobs(entries: Iterable[Entry], known: Mapping[str, Fit]) -> tuple[Job, ...]:
    """Return what is still to be forecast: of each model first what is opened, then the other quantisations."""
    first: dict[str, Path] = {}
    later: dict[str, Path] = {}
    for entry in entries:
        for each in entry.quantisations:
            if each.facts is None or each.fault or not each.facts.fingerprint or each.facts.fingerprint in known:
                continue
            (first if each is entry.proposed else later).setdefault(each.facts.fingerprint, each.copy.path)
    return (*first.items(), *(job for job in later.items() if job[0] not in first))


def plan_all(
    wanted: Iterable[Job],
    rig: Rig,
    strategy: str,
    constraints: Constraints,
    tell: Callable[[str, Fit], None],
    token: CancelToken,
) -> None:
    """Forecast `wanted` on `rig` and tell each; ends early where `token` is set."""
    asked = replace(constraints, watch=Watch(token))
    for mark, path in wanted:
        if token.cancelled:
            return
        try:
            fit = find_fit(read_model(path), rig, strategy, asked)
        except CancelledError:
            return
        except EngineError as error:
            fit = unknown_fit(error)
        tell(mark, fit)
