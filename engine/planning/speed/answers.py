"""Corrections of speed predictions that are learnt from measured answers, for each device and each class of layouts.

An answer has one measured time per token, and a predicted time for each device. Each device has a factor for its
predicted times. The factors are adjusted, answer after answer and in several passes, until the sum of the scaled times
is close to the measured time (multiplicative algebraic reconstruction, as in tomography). The median
ratio of measured to scaled time in a class of layouts (`layout_class`) is a further correction. All functions are pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median_high

from msgspec import Struct

MIN_TOKENS = 16
"""Smallest number of tokens of an answer from which corrections are learnt.

In shorter answers, the start takes most of the time.
"""
MIN_PROMPT_TOKENS = 64
"""Smallest number of tokens of a prompt from which corrections are learnt."""
MAX_RATIO = 20.0
"""Largest ratio of measured to predicted time from which corrections are learnt; the smallest is its inverse.

With a ratio outside of this range, the measurement is not about the model: the computer was busy or swapping.
"""
MAX_TIMINGS = 48
"""Number of answers, and of prompts, whose measured speeds are stored: the latest ones."""
_OF_A_CLASS = 5
"""Number of latest ratios of a class of layouts; their median is the correction for the class."""
_PASSES = 20
"""Number of passes over all answers in `learnt_factors`."""
_STEP = 0.5
"""Exponent that damps each correction in `learnt_factors`, so that a single answer does not decide alone."""
_COMMON = 0.5
"""Exponent that turns the mean factor of the other devices into the factor of a device without answers."""


class TokenTiming(Struct, frozen=True):
    """Seconds per token of one answer or prompt, measured and predicted.

    `layout_class`: class of the layout, such as several GPUs with overrides (`speeds.layout_class`).
    `parts`: predicted seconds by device key, without learnt corrections.
    `seconds`: measured seconds, for all devices together.
    """

    layout_class: str
    parts: dict[str, float]
    seconds: float

    @property
    def is_sensible(self) -> bool:
        """Return whether corrections may be learnt from this answer.

        Predicted and measured time must be above 0, and their ratio within `MAX_RATIO`.
        """
        predicted = sum(self.parts.values())
        if not all(0 <= part < 1e6 for part in self.parts.values()) or not (predicted > 0 and 0 < self.seconds < 1e6):
            return False
        return 1 / MAX_RATIO <= self.seconds / predicted <= MAX_RATIO


def learnt_factors(answers: Sequence[TokenTiming]) -> dict[str, float]:
    """Return the factor with which each device's predicted time must be multiplied, by device key.

    The latest answers have the largest effect.
    """
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
    """Return `factors`, extended by a common factor for each measured device that took part in no answer yet.

    The common factor is the mean factor of the other measured devices to the power `_COMMON`, because a systematic
    error of the measurements is likely the same on every device. Without it, a search for a layout would compare
    corrected with uncorrected devices, and would always prefer one of these groups.

    `factors`: learnt factors by device key. `measured`: keys of the measured devices.
    """
    keys = set(measured)
    # Factors are ratios, so their mean is geometric: twice as fast and twice as slow cancel out.
    logs = [math.log(factor) for key, factor in factors.items() if key in keys]
    common = math.exp(_COMMON * sum(logs) / max(1, len(logs)))
    return {**(dict.fromkeys(keys, common) if logs else {}), **factors}


def learnt_ratios(answers: Sequence[TokenTiming], factors: Mapping[str, float]) -> dict[str, float]:
    """Return the ratio of measured to predicted time by class of layouts: the median of the latest answers.

    The predicted time of each device is first multiplied by the device's factor.

    `factors`: learnt factors by device key.
    """
    ratios: dict[str, list[float]] = {}
    for answer in answers:
        whole = sum(part * factors.get(key, 1.0) for key, part in answer.parts.items())
        ratios.setdefault(answer.layout_class, []).append(answer.seconds / whole)
    return {name: median_high(found[-_OF_A_CLASS:]) for name, found in ratios.items()}
