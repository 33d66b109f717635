"""N-gram drafts (prompt lookup): the last tokens are found earlier in the sequence, and what followed there is drafted.

Text is repeated when a model quotes the prompt, changes code, or loops. llama.cpp's `ngram-simple` drafts in the same
way. The index here makes a search as fast in a long sequence as in a short one.
"""

from __future__ import annotations

from collections.abc import Sequence

N = 3
"""Length of the n-grams, in tokens. Shorter ones match too often for the following tokens to be a good draft."""


class NgramIndex:
    """The n-grams of one sequence, each with the position after its last occurrence. The sequence may only grow."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._indexed = N

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return up to `most` tokens that may follow `tokens`; empty if their last n-gram did not occur before."""
        count = len(tokens)
        if count <= N:
            return []
        # Not the last n-gram, which nothing follows yet.
        for end in range(self._indexed, count):
            self._after[tuple(tokens[end - N : end])] = end
        self._indexed = max(self._indexed, count)
        place = self._after.get(tuple(tokens[count - N :]))
        if place is None:
            return []
        # If the sequence ends before the draft does, the text between both places is taken to be repeated again.
        period = count - place
        drafted = [tokens[place + number % period] for number in range(most)]
        # Images and sounds stand as negative numbers in a sequence, and are no tokens.
        return next((drafted[:number] for number, token in enumerate(drafted) if token < 0), drafted)
