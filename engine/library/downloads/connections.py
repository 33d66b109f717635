"""Divides a file into spans for its connections, chooses the number of connections, and measures the rate.

A rate is that of the last ten seconds. The time left is known only if the rate is steady.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from engine.base.units import MIB
from engine.library.downloads.part_file import Ranges, add_range, first_gap

# A download with fewer bytes left gets no second connection.
WORTH_BYTES = 64 * MIB
# Longest span of one request. The hub sends files above 50 GB, which are stored in pieces (Xet), only by range.
MAX_SPAN_BYTES = 32 << 30
_GAIN = 1.15


@dataclass(eq=False)
class Span:
    """Bytes that one connection fetches, from `at` to `end`; `end` None is the end of the file.

    The connection increases `at`. The plan may reduce `end` meanwhile.
    """

    at: int
    end: int | None


class SpanPlan:
    """Assigns spans near the start of the file first, because the hash is computed in order."""

    def __init__(self, segment_bytes: int) -> None:
        self._segment_bytes = segment_bytes
        self._taken: list[Span] = []

    @property
    def n_taken(self) -> int:
        return len(self._taken)

    def take(self, done: Ranges, size_bytes: int | None, wanted: int) -> Span | None:
        """Return a span for one more connection; None if nothing is left for it.

        `wanted`: number of connections. A single one fetches everything to the end.
        """
        if size_bytes is None:
            return None if self._taken else self._hand_out(done[0][1] if done and done[0][0] == 0 else 0, None)
        if wanted > 1:
            self._shorten()
        covered = done
        for span in self._taken:
            # What other connections fetch counts as covered.
            covered = add_range(covered, span.at, size_bytes if span.end is None else span.end)
        gap = first_gap(covered, size_bytes)
        if gap is None:
            return None
        first, end = gap
        return self._hand_out(first, min(end, first + (MAX_SPAN_BYTES if wanted == 1 else self._segment_bytes)))

    def release(self, span: Span) -> None:
        """Release a span, complete or not."""
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
    """Finds a good number of connections: another one is tried, and kept if the rate grows by 15 %.

    `trial_s`: seconds for which a rate is measured; 0 uses the largest number from the start.
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
        """Use one connection from now on: the server sends whole files only."""
        self.wanted, self._settled = 1, True

    def look(self, now_s: float, fetched_bytes: int, left_bytes: int) -> None:
        """Measure the rate, and choose the number of connections."""
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
            # The last connection did not pay. It ends with its span, and no other one is started in its place.
            self.wanted, self._settled = self.wanted - 1, True
        elif self.wanted == self._most:
            self._settled = True
        else:
            self.wanted += 1
            self._before, self._begun = rate, None


WINDOW_S = 10.0
_LEAST_S = 4.0
# The rate is steady if those of both halves of the window differ by less than this factor.
_STEADY = 1.5


class RateMeter:
    """Rate of a transfer. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def add(self, now_s: float, done_bytes: int) -> None:
        """Record the bytes that are done at a moment."""
        self._samples.append((now_s, done_bytes))
        # The second sample decides, so that those that stay span the whole window.
        while len(self._samples) > 2 and now_s - self._samples[1][0] >= WINDOW_S:
            self._samples.popleft()

    def clear(self) -> None:
        """Forget all records: the transfer begins again."""
        self._samples.clear()

    @property
    def bytes_per_second(self) -> float | None:
        """Rate of the last ten seconds; None before there are two records."""
        return _rate(self._samples[0], self._samples[-1]) if len(self._samples) > 1 else None

    def left_s(self, left_bytes: int) -> float | None:
        """Return the seconds that `left_bytes` will take; None if the rate is not steady."""
        if len(self._samples) < 3 or self._samples[-1][0] - self._samples[0][0] < _LEAST_S:
            return None
        middle_s = (self._samples[0][0] + self._samples[-1][0]) / 2
        middle = min(self._samples, key=lambda sample: abs(sample[0] - middle_s))
        halves = (_rate(self._samples[0], middle), _rate(middle, self._samples[-1]))
        rate = self.bytes_per_second
        if None in halves or not rate:
            return None
        slow, fast = sorted(half or 0.0 for half in halves)
        return left_bytes / rate if slow > 0 and fast <= slow * _STEADY else None


def _rate(first: tuple[float, int], last: tuple[float, int]) -> float | None:
    return (last[1] - first[1]) / (last[0] - first[0]) if last[0] > first[0] else None
