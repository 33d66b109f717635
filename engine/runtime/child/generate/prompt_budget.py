"""`PromptBudget`: how many prompt tokens go into a batch, by measured times."""

from __future__ import annotations

FIRST_TOKENS = 32
"""Number of prompt tokens in the first batch, when the speed is unknown.

It is small because a layout on the CPU may compute only one token per second.
"""
SECONDS_ALONE = 2.0
"""Time in seconds of a batch of prompt tokens while no answer is running, unless larger batches gain (`GAIN`).

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
GAIN = 1.1
"""Smallest gain in tokens/s for which a batch is doubled, even if it then takes longer than the times above.

Part of a batch's time does not depend on its size: each micro batch reads all weights once, from host memory, from the
disk if the model is larger than the memory, or over PCIe with op offload. For a model of 380 GB in host memory this
takes ten seconds and more, in which 512 tokens are computed as well as 32. A processor that computes few tokens per
second gains nothing from large batches.
"""
SLOWER_WITH_ANSWERS = 1.5
"""Largest factor by which a batch may take longer than one of `FIRST_TOKENS` while answers are generated.

If nearly all of the time does not depend on the size, the answers hardly lose by larger batches.
"""
TRY_HALF_EVERY = 16
"""Number of batches after which one of half the size is tried: weights may be in the page cache by now."""


class PromptBudget:
    """Limits the number of prompt tokens in a batch, so that progress is seen and answers go on, but no speed is lost.

    `most`: largest number of tokens in a batch.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._latest: float | None = None
        # Tokens per second of the latest batch of at least this size and less than twice that, by size: FIRST_TOKENS
        # and its doubles.
        self._rates: dict[int, float] = {}
        self._n_batches = 0

    def tokens(self, missing: int, *, with_answers: bool) -> int:
        """Return how many tokens of prompts the next batch may have.

        `missing`: number of tokens of prompts that must still be computed.
        `with_answers`: whether answers are running.
        """
        if self._latest is None:
            return min(FIRST_TOKENS, self._most)
        seconds = SECONDS_WITH_ANSWERS if with_answers else SECONDS_ALONE
        # Not below FIRST_TOKENS: `note` ignores smaller batches, so the measured speed would never change again.
        tokens = max(FIRST_TOKENS, int(self._latest * seconds), self._worthwhile(with_answers=with_answers))
        if not with_answers and missing <= tokens * (1 + LARGEST_REST):
            tokens = missing
        return min(self._most, tokens)

    def note(self, tokens: int, seconds: float) -> None:
        """Update the measured speed of prompts. A batch with few prompt tokens is ignored.

        `tokens`, `seconds`: number of prompt tokens in a computed batch, and duration of the batch.
        """
        if tokens >= min(FIRST_TOKENS, self._most):
            self._n_batches += 1
            self._latest = tokens / max(seconds, 1e-9)
            if tokens >= FIRST_TOKENS:
                self._rates[FIRST_TOKENS << (tokens // FIRST_TOKENS).bit_length() - 1] = self._latest

    def _worthwhile(self, *, with_answers: bool) -> int:
        """Return the number of tokens up to which larger batches have gained.

        If no larger batch was measured yet, return the double, to measure it.
        """
        rates = self._rates
        size = FIRST_TOKENS
        if size not in rates:
            return size
        for larger in sorted(rates)[1:]:
            if with_answers:
                gains = larger / rates[larger] <= SLOWER_WITH_ANSWERS * FIRST_TOKENS / rates[FIRST_TOKENS]
            else:
                gains = rates[larger] >= rates[size] * GAIN ** (larger // size).bit_length() / GAIN
            if not gains:
                return size if self._n_batches % TRY_HALF_EVERY else max(FIRST_TOKENS, size // 2)
            size = larger
        return 2 * size
