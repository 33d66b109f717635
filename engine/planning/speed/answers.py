"""Corrections of speed predictions, learnt from the time that answers took: for each device, and for each class of
layouts.
Pure values. An answer has one measured time, and a predicted time for each device. The predicted parts are scaled,
answer after answer and in several passes, until they add up (multiplicative algebraic reconstruction, as in
tomography). The remaining ratio of a class of layouts is its own correction.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median_high

import msgspec

MIN_TOKENS = 16
"""Shorter answers are not used: start-up dominates their time."""
MIN_PROMPT_TOKENS = 64
"""Shorter prompts are not used."""
MAX_RATIO = 20.0
"""Largest ratio of measured to predicted time, and inverse of the smallest. Beyond it something else was measured, such
as a busy or a swapping computer."""
KEPT_ANSWERS = 48
"""Answers that are kept; older ones are dropped."""
_OF_A_CLASS = 5
"""Latest ratios of a class; their median counts."""
_PASSES = 20
"""Passes over all answers."""
_STEP = 0.5
"""Exponent of each correction. Below 1, so that a single answer does not decide alone."""
_COMMON = 0.5
"""Share of the common correction that a device without answers gets, as an exponent."""


class Answer(msgspec.Struct, frozen=True):
    """Seconds of one token. `parts`: predicted for each device by its key, without corrections. `seconds`: measured."""

    layout_class: str
    parts: dict[str, float]
    seconds: float

    @property
    def is_sensible(self) -> bool:
        """Return whether it can be learnt from."""
        predicted = sum(self.parts.values())
        if not all(0 <= part < 1e6 for part in self.parts.values()) or not (predicted > 0 and 0 < self.seconds < 1e6):
            return False
        return 1 / MAX_RATIO <= self.seconds / predicted <= MAX_RATIO


def learnt_factors(answers: Sequence[Answer]) -> dict[str, float]:
    """Return how many times longer than predicted each device takes, by its key. The latest answers count most."""
    factors = {key: 1.0 for answer in answers for key in answer.parts}
    for _ in range(_PASSES):
        for answer in answers:
            parts = {key: part * factors[key] for key, part in answer.parts.items()}
            whole = sum(parts.values())
            # Each part is corrected in proportion to its share of the time; dividing by the sum of squares makes one
            # full step reach the measured time to first order.
            squares = sum((part / whole) ** 2 for part in parts.values())
            for key, part in parts.items():
                factors[key] *= (answer.seconds / whole) ** (_STEP * part / whole / squares)
                # An outlier must not move a factor out of the range in which answers are accepted.
                factors[key] = min(MAX_RATIO, max(1 / MAX_RATIO, factors[key]))
    return factors


def with_common(factors: Mapping[str, float], measured: Iterable[str]) -> dict[str, float]:
    """Return `factors` with one for each measured device that has no answers yet.

    A systematic error of the measurements is likely the same on every device. So such a device gets the mean correction
    of the others, with the exponent `_COMMON`. Otherwise a device with corrections would be compared with one without,
    and one of them would always win.
    """
    keys = set(measured)
    # Factors are ratios, so their mean is geometric: twice as fast and twice as slow cancel out.
    logs = [math.log(factor) for key, factor in factors.items() if key in keys]
    common = math.exp(_COMMON * sum(logs) / max(1, len(logs)))
    return {**(dict.fromkeys(keys, common) if logs else {}), **factors}


def learnt_ratios(answers: Sequence[Answer], factors: Mapping[str, float]) -> dict[str, float]:
    """Return the ratio of measured to corrected time, by class of layouts."""
    ratios: dict[str, list[float]] = {}
    for answer in answers:
        whole = sum(part * factors.get(key, 1.0) for key, part in answer.parts.items())
        ratios.setdefault(answer.layout_class, []).append(answer.seconds / whole)
    return {name: median_high(found[-_OF_A_CLASS:]) for name, found in ratios.items()}
