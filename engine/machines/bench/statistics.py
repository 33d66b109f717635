"""Statistics of a comparison of layouts, as pure functions.

Layouts are measured in turns, A B B A A B: what changes slowly (heat, clocks, other programs) affects both alike. So
the ratio of two layouts is taken round by round, and the median of these ratios counts. Its interval is a percentile
bootstrap of the rounds. With five rounds that is the smallest and the largest ratio, which contain the true median with
a probability of 94 %, whatever the distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MIN_ROUNDS = 5
"""Fewest rounds for an interval. Four would contain the true median with a probability of 88 % only."""
WARM_GAIN = 1.05
"""Warm-up ends if a block is not faster than the one before by more than this factor."""
MAX_WARM_UP = 6
"""Most blocks of a warm-up, for a machine whose speed never settles."""
_TAIL = 0.01
"""Quantile of the bootstrap at both ends. With 0.025 intervals of few rounds are too narrow: of 7 they contain the true
median with 87 % only, with 0.01 of any number with 93 % or more (simulated in the tests)."""
_RESAMPLES = 2000
_SEED = 20240229
"""Fixed, so that the same samples always have the same interval."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as fast as another layout: median of the rounds, and bounds of its interval of 95 %.

    `low`, `high`: None with fewer than `MIN_ROUNDS` rounds.
    """

    value: float
    low: float | None
    high: float | None
    n_rounds: int

    @property
    def is_told(self) -> bool:
        """Whether there are enough rounds for a verdict."""
        return self.low is not None and self.high is not None

    @property
    def differs(self) -> bool:
        """Whether the interval excludes 1."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high


def ratio_of(rates: Sequence[tuple[float, float]]) -> Ratio | None:
    """Return the ratio of the second to the first rate of each round; None without rounds. Rates must be above 0."""
    if not rates:
        return None
    logs = np.log([other / base for base, other in rates])
    value = float(np.exp(np.median(logs)))
    if len(rates) < MIN_ROUNDS:
        return Ratio(value, None, None, len(rates))
    generator = np.random.default_rng(_SEED)
    drawn = logs[generator.integers(0, len(logs), (_RESAMPLES, len(logs)))]
    low, high = np.exp(np.quantile(np.median(drawn, axis=1), [_TAIL, 1 - _TAIL]))
    return Ratio(value, float(low), float(high), len(rates))


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the bootstrap interval of 95 % of the median; None with fewer than `MIN_ROUNDS` values above 0."""
    found = ratio_of([(1.0, value) for value in values])
    if found is None or found.low is None or found.high is None:
        return None
    return found.low, found.high


def turn_order(names: Sequence[str], round_number: int) -> tuple[str, ...]:
    """Return the order of the layouts in a round: forwards and backwards in turns, so A B, B A, A B."""
    return tuple(names) if round_number % 2 == 0 else tuple(reversed(names))


def is_warm(rates: Sequence[float]) -> bool:
    """Return whether a warm-up with blocks of these speeds is over."""
    if len(rates) >= MAX_WARM_UP:
        return True
    return len(rates) > 1 and rates[-1] <= WARM_GAIN * rates[-2]
