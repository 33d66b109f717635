"""What of a library is to be forecast, the wanted ones first; what is known is not asked again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from engine.library.entry import Entry
from engine.library.fit import Fit

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
