"""Divides a file into byte ranges for HTTP connections, chooses the number of connections, and measures the rate.

The rate is the mean of the last ten seconds. The time left is known only if the rate is steady.
"""

from __future__ import annotations

from collections import deque

from msgspec import Struct

from engine.base.units import MIB
from engine.library.downloads.part_file import Ranges, add_range, first_gap

# A download with fewer bytes left gets no second connection.
WORTH_BYTES = 64 * MIB
# Longest span of one request. The hub sends files above 50 GB, which are stored in pieces (Xet), only by range.
MAX_SPAN_BYTES = 32 << 30
_GAIN = 1.15


class Span(Struct, eq=False, dict=True):
    """Byte range of a file that one connection fetches.

    `at`: offset of the next byte to fetch; the connection increases it.
    `end`: offset after the last byte; None for the end of the file. `SpanPlan` may reduce it during the transfer.
    """

    at: int
    end: int | None


class SpanPlan:
    """Assigns spans of a file to connections: the first missing bytes first, because the hash is computed in order.

    `segment_bytes`: longest span if several connections fetch the file.
    """

    def __init__(self, segment_bytes: int) -> None:
        self._segment_bytes = segment_bytes
        self._taken: list[Span] = []

    @property
    def n_taken(self) -> int:
        return len(self._taken)

    def take(self, done: Ranges, size_bytes: int | None, wanted: int) -> Span | None:
        """Return a span for one more connection; None if no bytes are left for it.

        `done`: byte ranges on the disk.
        `size_bytes`: size of the file; None: unknown, so a single connection fetches the file to its end.
        `wanted`: number of connections for the file. A single connection gets a span of up to `MAX_SPAN_BYTES`.
        """
        # Without a size there are no gaps to compute: one connection continues after the complete start of the file.
        if size_bytes is None:
            return None if self._taken else self._hand_out(done[0][1] if done and done[0][0] == 0 else 0, None)
        if wanted > 1:
            # A span that was made for a single connection may cover all that is missing.
            self._shorten()
        covered = done
        for span in self._taken:
            # The spans of other connections count as covered.
            covered = add_range(covered, span.at, size_bytes if span.end is None else span.end)
        gap = first_gap(covered, size_bytes)
        if gap is None:
            return None
        first, end = gap
        return self._hand_out(first, min(end, first + (MAX_SPAN_BYTES if wanted == 1 else self._segment_bytes)))

    def release(self, span: Span) -> None:
        """Release a span whose connection has ended. If it is incomplete, its missing bytes can be assigned again."""
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
    """Search for a good number of connections: one more is tried at a time, and kept if the rate grows by 15 %.

    `most`: largest number of connections.
    `trial_s`: seconds for which the rate with each number is measured; if 0, `most` is used from the start.
    `worth_bytes`: no further connection is tried if fewer bytes are left.
    `wanted`: the number of connections to use now.
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
        """Use one connection from now on, because the server ignores range requests."""
        self.wanted, self._settled = 1, True

    def look(self, now_s: float, fetched_bytes: int, left_bytes: int) -> None:
        """Update `wanted`, the number of connections, by the transfer rate since `wanted` was last changed.

        `now_s`: time of a monotonic clock.
        `fetched_bytes`: bytes received in this transfer.
        `left_bytes`: bytes still missing.
        """
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
            # The last added connection did not raise the rate enough. It ends with its span, and is not replaced.
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
    """Transfer rate of a download. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def add(self, now_s: float, done_bytes: int) -> None:
        """Record that `done_bytes` bytes of the download are done at the time `now_s`."""
        self._samples.append((now_s, done_bytes))
        # The first sample is dropped only if the second one is old enough, so that the samples still span the whole
        # window.
        while len(self._samples) > 2 and now_s - self._samples[1][0] >= WINDOW_S:
            self._samples.popleft()

    def clear(self) -> None:
        """Discard all records, because another stage of the download begins, such as hashing after the transfer."""
        self._samples.clear()

    @property
    def bytes_per_second(self) -> float | None:
        """Mean rate of the last ten seconds; None if there are fewer than two records."""
        return _rate(self._samples[0], self._samples[-1]) if len(self._samples) > 1 else None

    def left_s(self, left_bytes: int) -> float | None:
        """Return the estimated seconds for `left_bytes` more bytes; None if the rate is not steady."""
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
