"""`PromptBudget`: chooses how many prompt tokens go into a batch, from the measured times of earlier batches.

A micro batch takes a + b·n seconds for n tokens. a is the time to read all weights: from host memory, from a disk if
the model is larger than the memory, or over PCIe with op offload. b is the time to compute a token. Usually b
dominates, and batches of two seconds show progress without loss. For a model of 380 GB in host memory a is eight
seconds, so that a batch of 512 tokens takes hardly longer than one of 32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

FIRST_TOKENS = 32
"""Number of prompt tokens in the first batch, and the smallest number in later ones while no answer is running.

It is small because the speed is unknown at first: a layout on the CPU may compute only one token per second.
"""
FEWEST_WITH_ANSWERS = 8
"""Smallest number of prompt tokens in a batch while answers are generated."""
SECONDS_ALONE = 2.0
"""Time in seconds of a batch of prompt tokens while no answer is running, unless larger batches are more efficient.

The progress of a prompt grows, and other requests begin, only between two batches. A stop request aborts a batch early,
and `WorkHeartbeat` sends heartbeats while it is computed.
"""
SECONDS_WITH_ANSWERS = 0.15
"""Time in seconds of a batch with prompt tokens while answers are generated.

The next token of each answer waits for the end of the batch.
"""
LARGEST_REST = 0.25
"""Share by which a batch of prompt tokens may exceed its usual size if it then completes the prompts.

A separate small batch for the last tokens would cost more per token.
"""
FIXED_SHARE = 0.1
"""While no answer is running, batches grow until the fixed time (a) is only this share of a batch's time."""
SLOWER_WITH_ANSWERS = 1.5
"""1 plus the part of the fixed time (a) by which a batch may take longer than the smallest one, if answers are running.

If reading the weights takes nearly all of the time, larger batches hardly delay the answers.
"""
GROWTH = 4
"""Largest factor by which a batch is enlarged at once."""
LONGEST_REMOTE_S = 15.0
"""Longest expected time in seconds of a batch that is enlarged, if RPC workers compute.

Such a batch cannot be aborted, and a child that waits for a worker for long counts as stalled.
"""
MAX_BATCHES = 16
"""Number of batches after which a measurement is dropped: weights may be in the page cache by now, and attention takes
longer in a longer context.

If only measurements of one batch size are left, a batch of another size is tried.
"""


class _Measured(NamedTuple):
    tokens: int
    seconds: float
    number: int


class PromptBudget:
    """Chooses the number of prompt tokens in a batch.

    Short batches report progress often and do not delay running answers for long. Long ones take less time per token.

    `most`: largest number of tokens in a batch.
    `micro_batch`: number of tokens that are computed together; larger batches read the weights several times.
    `longest_s`: longest time in seconds that a batch is expected to take; the smallest batch may take longer.
    """

    def __init__(self, most: int, micro_batch: int, longest_s: float = math.inf) -> None:
        self._most = most
        self._micro_batch = min(micro_batch, most)
        self._longest_s = longest_s
        self._n_batches = 0
        # The latest batch of each size, by the power of two below its number of tokens.
        self._measured: dict[int, _Measured] = {}

    def tokens(self, missing: int, *, with_answers: bool) -> int:
        """Return how many tokens of prompts the next batch may have.

        `missing`: number of tokens of prompts that must still be computed.
        `with_answers`: whether answers are being generated at the same time; a long batch would delay them.
        """
        if not self._measured:
            return min(FIRST_TOKENS, self._most)
        fewest = FEWEST_WITH_ANSWERS if with_answers else FIRST_TOKENS
        fixed_s, token_s = self._costs()
        seconds = SECONDS_WITH_ANSWERS if with_answers else SECONDS_ALONE
        wanted = _within(seconds, fixed_s, token_s)
        if len(self._measured) == 1:
            # Another size, to learn how much of the time is fixed.
            (only,) = self._measured.values()
            if wanted < 2 * only.tokens:
                wanted = only.tokens / 2 if only.tokens >= 2 * fewest else 2 * only.tokens
        elif with_answers:
            wanted = max(wanted, self._enlarged(fewest, (SLOWER_WITH_ANSWERS - 1) * fixed_s, token_s))
        else:
            wanted = max(wanted, self._enlarged(0, fixed_s * (1 / FIXED_SHARE - 1), token_s))
        tokens = max(fewest, int(min(wanted, _within(self._longest_s, fixed_s, token_s))))
        if not with_answers and missing <= tokens * (1 + LARGEST_REST):
            tokens = missing
        return min(self._most, tokens)

    def note(self, tokens: int, seconds: float) -> None:
        """Record the time of a computed batch, from which the sizes of later batches are chosen.

        A batch with few prompt tokens is ignored.

        `tokens`, `seconds`: number of prompt tokens in the batch, and duration of the batch.
        """
        if tokens < min(FEWEST_WITH_ANSWERS, self._most):
            return
        self._n_batches += 1
        size = tokens.bit_length()
        self._measured[size] = _Measured(tokens, max(seconds, 1e-9), self._n_batches)
        oldest = self._n_batches - MAX_BATCHES
        # A smaller batch did not take longer than this one: weights had to be read from the disk then.
        self._measured = {
            key: each
            for key, each in self._measured.items()
            if each.number > oldest and (key >= size or each.seconds < seconds)
        }

    def _costs(self) -> tuple[float, float]:
        """Return (fixed seconds of a micro batch, further seconds for each token), computed from measured batches."""
        few, many = min(self._measured.values()), max(self._measured.values())
        if few is not many and few.tokens < self._micro_batch:
            # Beyond a micro batch each token also pays a share of the fixed time.
            token_s = (many.seconds - few.seconds) / (many.tokens - few.tokens)
            fixed_s = few.seconds - token_s * few.tokens
            if fixed_s > 0 and token_s > 0:
                return fixed_s, token_s
        latest = max(self._measured.values(), key=lambda each: each.number)
        return 0.0, latest.seconds / latest.tokens

    def _enlarged(self, fewest: int, further_s: float, token_s: float) -> float:
        """Return the number of tokens of a batch that takes `further_s` seconds longer than one of `fewest` tokens.

        It is at most a micro batch, and at most `GROWTH` times the largest measured batch, because a measurement may be
        wrong.

        `token_s`: seconds that each further token takes.
        """
        largest = max(self._measured.values()).tokens
        return min(self._micro_batch, GROWTH * largest, fewest + further_s / token_s)


def _within(seconds: float, fixed_s: float, token_s: float) -> float:
    """Return how many tokens can be computed in `seconds`, if a batch takes `fixed_s` plus `token_s` for each token."""
    return max(0.0, seconds - fixed_s) / token_s
