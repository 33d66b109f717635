"""Who fetches what of one file, and how many do: spans of bytes for connections, and whether one more helps."""

from __future__ import annotations

from dataclasses import dataclass

from engine.downloads.ranges import Ranges, add_range, first_gap
from engine.units import MIB

WORTH_BYTES = 64 * MIB
"""Less than this is not worth a second connection."""
MAX_SPAN_BYTES = 32 << 30
"""Of one request. The hub gives files above 50 GB, which lie in pieces (Xet), in parts only."""
_GAIN = 1.15


@dataclass(eq=False)
class Span:
    """Bytes that one connection fetches, from `at` up to `end`, which may come closer meanwhile; None: to the end.

    `at` is moved on by its connection, `end` by the plan.
    """

    at: int
    end: int | None


class SpanPlan:
    """Hands out spans of one file so that together they stay near its start: what is there in order can be checked."""

    def __init__(self, segment_bytes: int) -> None:
        self._segment_bytes = segment_bytes
        self._taken: list[Span] = []

    @property
    def n_taken(self) -> int:
        return len(self._taken)

    def take(self, done: Ranges, size_bytes: int | None, wanted: int) -> Span | None:
        """Return what one more connection should fetch, None where there is nothing left for it.

        `wanted` is how many connections there are to be: one alone fetches everything to the end.
        """
        if size_bytes is None:
            return None if self._taken else self._hand_out(done[0][1] if done and done[0][0] == 0 else 0, None)
        if wanted > 1:
            self._shorten()
        covered = done
        for span in self._taken:
            covered = add_range(covered, span.at, size_bytes if span.end is None else span.end)
        gap = first_gap(covered, size_bytes)
        if gap is None:
            return None
        first, end = gap
        return self._hand_out(first, min(end, first + (MAX_SPAN_BYTES if wanted == 1 else self._segment_bytes)))

    def release(self, span: Span) -> None:
        """Take a span back, fetched or not."""
        self._taken.remove(span)

    def _hand_out(self, first: int, end: int | None) -> Span:
        span = Span(first, end)
        self._taken.append(span)
        return span

    def _shorten(self) -> None:
        for span in self._taken:
            limit = span.at + self._segment_bytes
            if span.end is None or span.end > limit:
                span.end = limit


class Trial:
    """How many connections to have: one more is kept where it brings a good deal, and then the next is tried.

    `trial_s`: for how long the rate is looked at; 0 is for as many as may be from the start.
    """

    def __init__(self, most: int, trial_s: float, worth_bytes: int = WORTH_BYTES) -> None:
        self._most = most
        self._trial_s = trial_s
        self._worth_bytes = worth_bytes
        self._settled = most <= 1 or trial_s <= 0
        self.wanted = most if trial_s <= 0 else 1
        self._begun: tuple[float, int] | None = None
        self._before: float | None = None

    def settle(self) -> None:
        """Have one connection and try no other: the server gives nothing but whole files."""
        self.wanted, self._settled = 1, True

    def look(self, now_s: float, fetched_bytes: int, left_bytes: int) -> None:
        """Look at how much was fetched by now, and choose."""
        if self._settled or left_bytes < self._worth_bytes:
            return
        if self._begun is None:
            if fetched_bytes:
                self._begun = (now_s, fetched_bytes)
            return
        passed_s = now_s - self._begun[0]
        if passed_s < self._trial_s:
            return
        rate = (fetched_bytes - self._begun[1]) / passed_s
        if self._before is not None and rate < self._before * _GAIN:
            self.wanted, self._settled = self.wanted - 1, True
        elif self.wanted == self._most:
            self._settled = True
        else:
            self.wanted += 1
            self._before, self._begun = rate, None
