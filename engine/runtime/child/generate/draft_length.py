"""Chooses how many tokens are drafted for a step, so that the answers get the most tokens per second.

A step with drafts takes longer than a plain step (a step without drafts): the model computes more tokens, and a draft
model computes too. How much longer is measured for each number of tokens (`StepCosts`); on a CPU the duration jumps
where another tile of the matrix products begins. How many tokens a step yields depends on the chances that the first,
the first two, ... drafted tokens are accepted (`Acceptance`). `DraftLengths` compares durations and chances, and
chooses a number of tokens for each answer; 0 means no draft.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from statistics import mean, median
from typing import NamedTuple

MAX_COSTS = 9
"""Number of the latest step durations that are kept for each number of drafted tokens."""
LEAST_COSTS = 2
"""Number of durations that must be measured for a number of drafted tokens before they are used.

Of two durations the shorter one is used, because the first batch of a size is often slow.
"""
MOST_SLOW = 3.0
"""Multiple of the median duration above which a duration is ignored, because another program has slowed the step down.
"""
NEW_COST = 0.1
"""Assumed time that a drafted token adds to a step, until durations have been measured.

It is a share of the time that a plain step (a step without drafts) takes for each running answer. The value is low, so
that drafts are tried.
"""
UNMEASURED = 0.8
"""Factor that makes the assumed duration shorter for numbers of drafted tokens that were not measured.

So these numbers are tried, and their durations measured.
"""
FORGOTTEN_STEPS = 1000
"""Number of steps after which a duration that was not measured again is forgotten, so that it may be measured anew."""
TRIED_WIDTHS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Sizes of a batch in tokens that are compared to find the best one: one token for each answer, and drafted tokens.

The size with all possible drafted tokens is compared too. Most sizes are multiples of 4, the height of ggml's tiles.
"""

EVIDENCE_DECAY = 0.93
"""Factor by which each new draft reduces the weight of the earlier drafts in the counts of accepted tokens.

With this factor about the last 14 drafts count.
"""
PRIOR_DRAFTS = 2.0
"""Weight of the assumed share of accepted tokens: it counts as much as this number of measured drafts."""
MODEL_RATES = (0.6,)
"""Assumed share of accepted tokens by kind of draft. All drafts of draft models and MTP heads are of one kind."""
LEAST_GAIN = 1.03
"""Smallest expected gain (speed with drafts divided by speed without) for which tokens are drafted."""


class StepCosts:
    """Measured durations of steps by number of running answers and number of drafted tokens.

    Each duration is divided by that of a plain step (a step without drafts) with the same number of answers.
    """

    def __init__(self) -> None:
        self._measured: dict[int, dict[int, deque[float]]] = {}
        self._last: dict[tuple[int, int], int] = {}
        self._steps = 0

    def count_step(self) -> None:
        """Count a step with or without drafts, and forget durations that are older than `FORGOTTEN_STEPS` steps."""
        self._steps += 1
        if self._steps % FORGOTTEN_STEPS == 0:
            for answers, drafted in [key for key, last in self._last.items() if last + FORGOTTEN_STEPS < self._steps]:
                del self._measured[answers][drafted], self._last[answers, drafted]

    def note(self, answers: int, drafted: int, cost: float) -> None:
        """Add the duration of a step.

        `answers`: number of running answers.
        `drafted`: number of tokens that were requested from the drafter, for all answers together.
        `cost`: the duration, divided by that of a plain step (a step without drafts) with as many answers.
        """
        self._measured.setdefault(answers, {}).setdefault(drafted, deque(maxlen=MAX_COSTS)).append(cost)
        self._last[answers, drafted] = self._steps

    def cost(self, answers: int, drafted: int) -> float:
        """Return the duration of a step, divided by that of a plain step (a step without drafts).

        The duration is interpolated if it was not measured.

        `answers`: number of running answers.
        `drafted`: number of drafted tokens, for all answers together.
        """
        measured = self._measured.get(answers, {})
        known = sorted(each for each, costs in measured.items() if len(costs) >= LEAST_COSTS)
        if drafted in known:
            return _typical(measured[drafted])
        index = bisect_left(known, drafted)
        low, low_cost = (known[index - 1], _typical(measured[known[index - 1]])) if index else (0, 1.0)
        if index == len(known):
            slope = (low_cost - 1) / low if low else NEW_COST / answers
        else:
            slope = (_typical(measured[known[index]]) - low_cost) / (known[index] - low)
        factor = UNMEASURED if known else 1.0
        return max(1.0, factor * (low_cost + slope * (drafted - low)))


def _typical(costs: Sequence[float]) -> float:
    if len(costs) <= LEAST_COSTS:
        return min(costs)
    # Not the median: the drafts of a draft model end early or late, and the mean of both counts.
    most = MOST_SLOW * median(costs)
    return mean(cost for cost in costs if cost <= most)


class Acceptance:
    """Chances that the first, the first two, ... tokens of a draft are accepted, for drafts of several kinds.

    `rates`: assumed share of accepted tokens for each kind. A kind is an index in this list.
    """

    def __init__(self, rates: Sequence[float] = MODEL_RATES) -> None:
        self._rates = rates
        self._tried: dict[int, list[float]] = {}
        self._accepted: dict[int, list[float]] = {}

    def note(self, kind: int, accepted: int, tried: int) -> None:
        """Record how many tokens of a draft were accepted.

        `kind`: kind of the draft.
        `accepted`: number of accepted tokens, which are the first ones of the draft.
        `tried`: number of tokens that were compared with the answer: the accepted ones, and the first wrong one if any.
        """
        tries, right = self._tried.setdefault(kind, []), self._accepted.setdefault(kind, [])
        for index in range(tried):
            if index == len(tries):
                tries.append(0.0)
                right.append(0.0)
            tries[index] = tries[index] * EVIDENCE_DECAY + 1
            right[index] = right[index] * EVIDENCE_DECAY + (index < accepted)

    def chances(self, kind: int, most: int) -> Iterator[float]:
        """Yield the chance that the first token of a draft is accepted, that the first two are, and so on.

        `kind`: kind of the draft.
        `most`: number of chances.
        """
        tries, right = self._tried.get(kind, ()), self._accepted.get(kind, ())
        rate, chance = self._rates[kind], 1.0
        for index in range(most):
            tried, accepted = (tries[index], right[index]) if index < len(tries) else (0.0, 0.0)
            # A token that was seldom reached is as likely as the one before it.
            rate = (accepted + PRIOR_DRAFTS * rate) / (tried + PRIOR_DRAFTS)
            chance *= rate
            yield chance

    def forget(self) -> None:
        """Forget all earlier drafts, because the text after a pause may be of a different kind."""
        self._tried.clear()
        self._accepted.clear()


class Possible(NamedTuple):
    """A draft that may be computed. `kind`: index of its kind in `Acceptance`. `most`: its largest number of tokens."""

    kind: int
    most: int


class DraftLengths:
    """Chooses the number of drafted tokens for each answer of a loaded model.

    `rates`: assumed share of accepted tokens for each kind of draft.
    """

    def __init__(self, rates: Sequence[float] = MODEL_RATES) -> None:
        self.costs = StepCosts()
        self.acceptance = Acceptance(rates)

    def choose(self, answers: int, drafts: Sequence[Possible], room: int) -> list[int]:
        """Return the number of tokens to draft for each of `drafts`; all 0 if drafts are expected to lose time.

        `answers`: number of running answers, also of those without a draft.
        `room`: largest number of drafted tokens in the batch.
        """
        # The duration depends on the number of tokens only, so that the most likely ones come first. A token is never
        # more likely than the one before it, so that they are the first ones of each draft.
        chances = sorted(
            (
                (chance, index)
                for index, draft in enumerate(drafts)
                for chance in self.acceptance.chances(draft.kind, draft.most)
            ),
            key=lambda each: -each[0],
        )[: max(0, room)]
        best, best_rate, tokens = 0, LEAST_GAIN * answers, float(answers)
        for count, (chance, _) in enumerate(chances, start=1):
            tokens += chance
            if answers + count in TRIED_WIDTHS or count == len(chances):
                rate = tokens / self.costs.cost(answers, count)
                if rate > best_rate:
                    best, best_rate = count, rate
        chosen = Counter(index for _, index in chances[:best])
        return [chosen[index] for index in range(len(drafts))]
