"""Measurements in turns: each round measures every kind once, so that other load on the machine affects all kinds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable


def medians_in_turns(kinds: Iterable[str], start: Callable[[str], float], rounds: int) -> dict[str, float]:
    """Return the median seconds of each kind over `rounds` rounds.

    `start` measures one kind and returns its seconds. A first round fills the file cache and is not counted.
    """
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(rounds + 1):
        for kind, taken in times.items():
            seconds = start(kind)
            if number:
                taken.append(seconds)
    return {kind: statistics.median(taken) for kind, taken in times.items()}
