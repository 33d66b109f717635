"""N-gram drafts (prompt lookup): the last tokens are found earlier in the sequence, and what followed there is drafted.

Text is repeated when a model quotes the prompt, changes code, or loops. llama.cpp's `ngram-simple` drafts in the same
way. The index here makes a search as fast in a long sequence as in a short one. Of several matches the
longest is taken, because a long copy will probably go on. So the length of the match tells how likely the answer is to
continue with the drafted tokens (`NgramDraft.kind`). Drafts that are made but not used are compared with the answer's
next tokens too (`NgramDrafts`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from engine.runtime.child.generate.draft_length import Acceptance

N = 3
"""Length of the n-grams, in tokens. Shorter ones match too often for the following tokens to be a good draft."""
MAX_MATCHES = 4
"""Largest number of earlier occurrences of an n-gram that are remembered: the latest ones."""
LENGTHS = (N, 4, 6, 10, 20)
"""Shortest match, in tokens, for drafts of kind 1, 2 and so on (`NgramDraft.kind`).

A match is measured up to the last of these lengths.
"""
RATES = (0.5, 0.65, 0.75, 0.85, 0.9, 0.98)
"""Assumed share of accepted tokens, by kind of draft (`NgramDraft.kind`).

Kind 0: the earlier occurrences of the n-gram were followed by different tokens. The other kinds are those of `LENGTHS`.
Answers of a small model had shares in this order; how large they are depends on the text.
"""


class NgramDraft(NamedTuple):
    """Tokens that may come next, and how likely they are.

    `kind`: index in `RATES`, the assumed acceptance rates. It depends on the length of the match, and on whether
    different tokens followed the earlier occurrences of the n-gram.
    """

    tokens: list[int]
    kind: int


class NgramIndex:
    """The n-grams of one sequence, each with the positions after its last occurrences. The sequence may only grow."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], list[int]] = {}
        self._indexed = N

    def draft(self, tokens: Sequence[int], most: int) -> NgramDraft:
        """Return up to `most` tokens that may follow `tokens`; none if their last n-gram did not occur before."""
        count = len(tokens)
        # Not the last n-gram, which nothing follows yet.
        for end in range(self._indexed, count):
            indices = self._after.setdefault(tuple(tokens[end - N : end]), [])
            indices.append(end)
            del indices[:-MAX_MATCHES]
        self._indexed = max(self._indexed, count)
        indices = self._after.get(tuple(tokens[count - N :]), []) if count > N else []
        if not indices:
            return NgramDraft([], 0)
        # The latest one of the longest matches.
        length, index = max((_match(tokens, index), index) for index in indices)
        # If the sequence ends before the draft does, the text between both matches is taken to be repeated again.
        period = count - index
        drafted = [tokens[index + number % period] for number in range(most)]
        # Images and sounds stand as negative numbers in a sequence, and are no tokens.
        drafted = next((drafted[:number] for number, token in enumerate(drafted) if token < 0), drafted)
        is_disputed = any(tokens[other] != tokens[index] for other in indices)
        kind = bisect_right(LENGTHS, length)
        return NgramDraft(drafted, 0 if is_disputed and length < LENGTHS[-1] else kind)


def _match(tokens: Sequence[int], index: int) -> int:
    """Return how many tokens before `index` equal the last tokens of the sequence.

    The caller has found that the last `N` tokens are equal. At most `LENGTHS[-1]` tokens are compared.
    """
    count = len(tokens)
    most = min(LENGTHS[-1], index)
    return next((n for n in range(N, most) if tokens[index - 1 - n] != tokens[count - 1 - n]), most)


class NgramDrafts:
    """Makes n-gram drafts for one answer, and records how many of their tokens agree with the answer.

    The comparison needs no decoding, so drafts are compared even if the model did not check them.
    """

    def __init__(self) -> None:
        self._index = NgramIndex()
        self._open = NgramDraft([], 0)
        self._begin = 0

    def draft(self, tokens: Sequence[int], most: int, acceptance: Acceptance) -> NgramDraft:
        """Return up to `most` tokens that may follow `tokens`.

        `acceptance`: records how many tokens of an earlier draft agree with the answer.
        """
        came, opened = tokens[self._begin :], self._open.tokens
        right = next((n for n, (one, other) in enumerate(zip(opened, came, strict=False)) if one != other), None)
        if right is not None:
            acceptance.note(self._open.kind, right, right + 1)
        elif len(came) >= len(opened):
            acceptance.note(self._open.kind, len(opened), len(opened))
        found = self._index.draft(tokens, most)
        if right is not None or len(came) >= len(opened):
            # One at a time: the drafts of the next steps would count the same tokens again.
            self._open, self._begin = found, len(tokens)
        return found
