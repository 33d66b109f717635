"""Refuses a borrower (a machine that uses our devices) for some time if its models crash workers too often.

A model can crash a worker: ggml aborts at an operation that the device cannot compute. The worker is started again, and
other borrowers must be able to use it. So the crashes are counted for each borrower, not for each device.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable

MAX_ENDS = 5
"""Number of ended workers within `WITHIN_S` seconds after which a borrower is refused."""
WITHIN_S = 600.0
REFUSED_S = 300.0


class Refusals:
    """Counts for each borrower how often its models have crashed a worker, and when to refuse it. Thread-safe.

    `clock`: returns monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._ends_s: dict[str, deque[float]] = {}

    def count(self, fingerprint: str) -> bool:
        """Count one crash of a worker for the borrower that used it; return whether the borrower is refused now.

        `fingerprint`: fingerprint of the borrower's certificate.
        """
        with self._lock:
            # One entry for each pairing, and the file of pairings is bounded.
            self._ends_s.setdefault(fingerprint, deque(maxlen=MAX_ENDS)).append(self._clock())
        return self.left_s(fingerprint) > 0

    def left_s(self, fingerprint: str) -> int:
        """Return the seconds for which a borrower is still refused; 0 if it is not refused.

        `fingerprint`: fingerprint of the borrower's certificate.
        """
        with self._lock:
            # At most the last `MAX_ENDS` times, so the first and the last one span `MAX_ENDS` ends.
            ends_s = self._ends_s.get(fingerprint)
            if ends_s is None or len(ends_s) < MAX_ENDS or ends_s[-1] - ends_s[0] > WITHIN_S:
                return 0
            return max(0, math.ceil(ends_s[-1] + REFUSED_S - self._clock()))
