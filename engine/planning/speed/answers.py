"""What answers teach of speed: by how much predictions are off on each device, and on each class of layouts.

Pure values. An answer says how long a token took in all; its parts are what was predicted for each device. The parts
are scaled, one answer after the other and several times over, until they add up (the multiplicative form of algebraic
reconstruction, as tomography has it); what answers of one class still differ by is the class's own ratio.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median_high

import msgspec

MIN_TOKENS = 16
"""An answer shorter than this says little about speed."""
MIN_PROMPT_TOKENS = 64
"""The same of prompts, of which a part was read before."""
MAX_RATIO = 20.0
"""Beyond this, either way, something else was measured: a machine busy with other work, or one that swaps."""
KEPT_ANSWERS = 48
_OF_A_CLASS = 5
"""Ratios of a class of which the middle one counts."""
_PASSES = 20
_STEP = 0.5
_COMMON = 0.5


class Answer(msgspec.Struct, frozen=True):
    """Seconds of a token: those predicted for each device by its key, without what was learnt, and those measured."""

    layout_class: str
    parts: dict[str, float]
    seconds: float

    @property
    def is_sensible(self) -> bool:
        """Whether it can be learnt from."""
        predicted = sum(self.parts.values())
        if not all(0 <= part < 1e6 for part in self.parts.values()) or not (predicted > 0 and 0 < self.seconds < 1e6):
            return False
        return 1 / MAX_RATIO <= self.seconds / predicted <= MAX_RATIO


def learnt_factors(answers: Sequence[Answer]) -> dict[str, float]:
    """Return how many times longer than predicted each device takes, by its key; the last answers count most."""
    factors = {key: 1.0 for answer in answers for key in answer.parts}
    for _ in range(_PASSES):
        for answer in answers:
            parts = {key: part * factors[key] for key, part in answer.parts.items()}
            whole = sum(parts.values())
            squares = sum((part / whole) ** 2 for part in parts.values())
            for key, part in parts.items():
                factors[key] *= (answer.seconds / whole) ** (_STEP * part / whole / squares)
                factors[key] = min(MAX_RATIO, max(1 / MAX_RATIO, factors[key]))
    return factors


def with_common(factors: Mapping[str, float], measured: Iterable[str]) -> dict[str, float]:
    """Return `factors` with one for each device that was measured and that no answer used yet.

    What measuring overlooks it overlooks on every device, so that half of what the others were off by, as a power, is
    likely there too. Without it a device that was learnt of is set against one that was not, and always loses or wins.
    """
    keys = set(measured)
    logs = [math.log(factor) for key, factor in factors.items() if key in keys]
    common = math.exp(_COMMON * sum(logs) / max(1, len(logs)))
    return {**(dict.fromkeys(keys, common) if logs else {}), **factors}


def learnt_ratios(answers: Sequence[Answer], factors: Mapping[str, float]) -> dict[str, float]:
    """Return by class of layouts how much longer its tokens take than `factors` make of their parts."""
    ratios: dict[str, list[float]] = {}
    for answer in answers:
        whole = sum(part * factors.get(key, 1.0) for key, part in answer.parts.items())
        ratios.setdefault(answer.layout_class, []).append(answer.seconds / whole)
    return {name: median_high(found[-_OF_A_CLASS:]) for name, found in ratios.items()}
