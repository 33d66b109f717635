"""Starts that take turns, so that a noisy machine hits all kinds of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable


def medians_in_turns(kinds: Iterable[str], start: Callable[[str], float], rounds: int) -> dict[str, float]:
    """Return the median seconds of each kind; a first round, which fills the file cache, does not count."""
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(rounds + 1):
        for kind, taken in times.items():
            seconds = start(kind)
            if number:
                taken.append(seconds)
    return {kind: statistics.median(taken) for kind, taken in times.items()}
