"""How much of prompts goes into one batch: what can be computed before somebody waits too long."""

from __future__ import annotations

FIRST_TOKENS = 32
"""Before the speed is known: few, since a layout on the CPU may do one a second."""
ALONE_SECONDS = 2.0
"""Then what can be computed in this time: several micro batches at once keep several devices busy, and a batch cut
small reads the weights more often. A stop ends it earlier, and signs of life are given meanwhile."""
BESIDE_SECONDS = 0.15
"""The same where answers wait for their next token meanwhile."""


class Pace:
    """Follows how fast prompts are read; `most` is what a batch holds."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._tokens_per_second: float | None = None

    def tokens(self, *, beside_answers: bool) -> int:
        """Return how many tokens of prompts to take."""
        if self._tokens_per_second is None:
            return min(FIRST_TOKENS, self._most)
        seconds = BESIDE_SECONDS if beside_answers else ALONE_SECONDS
        return min(self._most, max(FIRST_TOKENS, int(self._tokens_per_second * seconds)))

    def note(self, tokens: int, seconds: float) -> None:
        """Learn from a batch; one with few tokens of prompts tells nothing."""
        if tokens >= min(FIRST_TOKENS, self._most):
            self._tokens_per_second = tokens / max(seconds, 1e-9)
