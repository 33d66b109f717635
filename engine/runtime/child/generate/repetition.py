"""Detection of an answer that repeats itself without end, as answers of small models do.

Only an exact repetition counts: the same tokens again and again at the end of the answer. Numbered lists, tables with
values and poems with a refrain differ from line to line, so they do not count. Code and ASCII art may have many equal
rows, so more repeated tokens are needed there than in prose.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence

CHECKED_EVERY = 32
"""Number of tokens between two checks. A check takes about 20 µs, and 0.1 ms if there are repetitions."""
WINDOW = 1536
"""Number of latest tokens that are checked."""
PROSE_TIMES, PROSE_TOKENS = 6, 144
"""Limits from which a repetition of prose counts as endless.

They are the smallest number of repetitions, and the smallest number of tokens in all repetitions together.
"""
OTHER_TIMES, OTHER_TOKENS = 12, 1024
"""Limits from which a repetition of other texts counts as endless: numbers, code, table rows, rules of dashes.

They are the smallest number of repetitions, and the smallest number of tokens in all repetitions together. They are so
large that an array of 500 zeros does not count.
"""
_CODE = frozenset("<>{}[]()|=\\/_#*~^+;`\t")
"""Characters that hardly occur in prose."""
_TAIL = 24
"""Number of tokens at the end of the answer. They are searched for in the tokens before them, to find repetitions."""
_MOST_PERIODS = 64
"""Largest number of earlier occurrences of the last `_TAIL` tokens that are examined. A run of equal tokens has many.
"""
_MIN_LETTERS = 4
"""Smallest number of letters in a repeated text that counts as prose; a row of "0, " or "- - " has fewer."""


def repeated_periods(tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (period, number of repeating tokens) for each repetition at the end of `tokens`, shortest period first.

    A period is the length of the repeated text, in tokens. The text must occur at least twice in a row. Repetitions of
    fewer than `_TAIL` tokens are not found.
    """
    # Bytes, because searching them is a hundred times as fast as comparing lists.
    held, found = array("i", tokens), list[tuple[int, int]]()
    if len(held) <= _TAIL:
        return
    data, size = held.tobytes(), held.itemsize
    tail, end = data[-_TAIL * size :], len(data)
    for _ in range(_MOST_PERIODS):
        # The end of the tokens, found earlier. The last byte is left out, so that this does not find the end itself.
        found_at = data.rfind(tail, 0, end - 1)
        if found_at < 0:
            return
        end = found_at + len(tail)
        period, rest = divmod(len(data) - end, size)
        # A multiple of a period repeats as long as that does, but less often.
        if not rest and not any(period % known == 0 and period < count for known, count in found):
            earlier = zip(reversed(held), reversed(held[:-period]), strict=False)
            matched = next((index for index, (one, other) in enumerate(earlier) if one != other), len(held) - period)
            if matched >= period:
                found.append((period, period + matched))
                yield period, period + matched


def is_endless(period: int, n_tokens: int, text: str) -> bool:
    """Return whether a repetition is long enough to be regarded as endless.

    `period`: length of the repeated text, in tokens.
    `n_tokens`: number of tokens in all repetitions together.
    `text`: the text that is repeated.
    """
    times, tokens = (PROSE_TIMES, PROSE_TOKENS) if _is_prose(text) else (OTHER_TIMES, OTHER_TOKENS)
    return n_tokens >= tokens and n_tokens >= times * period


def _is_prose(text: str) -> bool:
    return sum(map(str.isalpha, text)) >= _MIN_LETTERS and _CODE.isdisjoint(text)


class RepetitionDetector:
    """Detects endless repetition in one answer while its tokens are sampled.

    `text_of`: function that returns the text of a token list.
    """

    def __init__(self, text_of: Callable[[Sequence[int]], str]) -> None:
        self._text_of = text_of
        self._latest: list[int] = []
        self._until_check = CHECKED_EVERY

    def add(self, token: int) -> bool:
        """Add a sampled token; return whether the answer repeats itself without end."""
        self._latest.append(token)
        self._until_check -= 1
        if self._until_check:
            return False
        self._until_check = CHECKED_EVERY
        # Only at checks, so the list is up to CHECKED_EVERY tokens longer than the window.
        del self._latest[:-WINDOW]
        return any(
            n_tokens >= PROSE_TOKENS and is_endless(period, n_tokens, self._text_of(self._latest[-period:]))
            for period, n_tokens in repeated_periods(self._latest)
        )
