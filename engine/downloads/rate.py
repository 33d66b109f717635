"""How fast a transfer is and how long it will take: over the last ten seconds, and only when that is steady."""

from __future__ import annotations

from collections import deque

WINDOW_S = 10.0
_LEAST_S = 4.0
_STEADY = 1.5
"""Both halves of the window may differ by this factor."""


class RateMeter:
    """Bytes over time. Times are in seconds of one clock, and only grow."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def add(self, now_s: float, done_bytes: int) -> None:
        """Note how much was done at a moment."""
        self._samples.append((now_s, done_bytes))
        while len(self._samples) > 2 and now_s - self._samples[1][0] >= WINDOW_S:
            self._samples.popleft()

    def clear(self) -> None:
        """Forget what was: the transfer begins again."""
        self._samples.clear()

    @property
    def bytes_per_second(self) -> float | None:
        """The rate of the last ten seconds, None before there is one."""
        return _rate(self._samples[0], self._samples[-1]) if len(self._samples) > 1 else None

    def left_s(self, left_bytes: int) -> float | None:
        """Return the seconds that `left_bytes` will take; None while the rate is not steady."""
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
