"""Statistics for the comparison of layouts, as pure functions.

Layouts are measured in the order A B B A A B, so that slow changes (heat, clocks, other programs) affect both alike.
The ratio of the two speeds is computed for each round, and the result is the median of these ratios. Its confidence
interval is a percentile bootstrap of the rounds. With five rounds the interval extends from the smallest to the largest
ratio, and contains the true median with a probability of 94 %, whatever the distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

MIN_ROUNDS = 5
"""Smallest number of rounds for which a confidence interval is computed.

With four rounds, the interval would contain the true median with a probability of only 88 %.
"""
WARM_GAIN = 1.05
"""The warm-up (the answers before the first measured one) ends when an answer is at most this factor times as fast as
the answer before it.
"""
MAX_WARM_UP = 6
"""Largest number of answers in a warm-up, for a machine whose speed keeps growing."""
_TAIL = 0.01
"""Quantile of the bootstrap at both ends of the interval.

With 0.025 the intervals of few rounds would be too narrow: with 7 rounds, the interval contains the true median with a
probability of 87 % only. With 0.01 the probability is 93 % or more for any number of rounds (simulated in the tests).
"""
_RESAMPLES = 2000
_SEED = 20240229
"""Seed of the random numbers, fixed so that the same samples always have the same interval."""


class Ratio(Struct, frozen=True):
    """How many times as fast one layout is as another, with the confidence interval (95 %).

    `value`: median of the ratios of the rounds.
    `low`, `high`: bounds of the interval, None if there are fewer than `MIN_ROUNDS` rounds.
    """

    value: float
    low: float | None
    high: float | None
    n_rounds: int

    @property
    def has_interval(self) -> bool:
        """Whether there are enough rounds for an interval, so that the layouts can be compared."""
        return self.low is not None and self.high is not None

    @property
    def differs(self) -> bool:
        """Whether the interval excludes 1, so that one layout is faster."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high


def ratio_of(rates: Sequence[tuple[float, float]]) -> Ratio | None:
    """Return the median of the ratios (second rate divided by first) of all rounds; None if there are no rounds.

    `rates`: pairs of rates above 0, one pair for each round.
    """
    if not rates:
        return None
    # Logarithms, so that the ratio of the swapped layouts is the inverse, also for an even number of rounds.
    # Imported here: the window reads results at its start only if there are some, and numpy takes 0.1 s.
    import numpy as np

    logs = np.log([other / base for base, other in rates])
    value = float(np.exp(np.median(logs)))
    if len(rates) < MIN_ROUNDS:
        return Ratio(value, None, None, len(rates))
    generator = np.random.default_rng(_SEED)
    drawn = logs[generator.integers(0, len(logs), (_RESAMPLES, len(logs)))]
    low, high = np.exp(np.quantile(np.median(drawn, axis=1), [_TAIL, 1 - _TAIL]))
    return Ratio(value, float(low), float(high), len(rates))


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the bootstrap interval (95 %) of the median of values above 0.

    None if there are fewer than `MIN_ROUNDS` values.
    """
    found = ratio_of([(1.0, value) for value in values])
    if found is None or found.low is None or found.high is None:
        return None
    return found.low, found.high


def turn_order(names: Sequence[str], round_number: int) -> tuple[str, ...]:
    """Return `names` in the order in which they are measured in a round. The order alternates: A B, B A, A B.

    `names`: names of the layouts or other things to compare.
    `round_number`: number of the round, from 0.
    """
    return tuple(names) if round_number % 2 == 0 else tuple(reversed(names))


def is_warm(rates: Sequence[float]) -> bool:
    """Return whether the warm-up is complete: the last answer was hardly faster than the one before it.

    It is also complete after `MAX_WARM_UP` answers.

    `rates`: speeds of the answers so far, in tokens per second.
    """
    if len(rates) >= MAX_WARM_UP:
        return True
    return len(rates) > 1 and rates[-1] <= WARM_GAIN * rates[-2]
