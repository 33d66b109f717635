"""How long the rest of a question takes to be read, by how fast it was read so far."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.downloads.job import time_words
from engine.language import tr
from engine.session.events import Reading

KNOWN_AFTER_S = 1.0
"""Before that a single batch would tell of all others."""


class ReadingPace:
    """Follows one request at a time, from the first that is told of it: what was cached then took no time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._request: int | None = None
        self._since_s = 0.0
        self._first_tokens = 0

    def left_s(self, event: Reading) -> float | None:
        """Return the seconds that are left; None while nobody knows, and at the end."""
        now_s = self._clock()
        if event.request != self._request:
            self._request, self._since_s, self._first_tokens = event.request, now_s, event.read_tokens
        took_s, read = now_s - self._since_s, event.read_tokens - self._first_tokens
        left = event.prompt_tokens - event.read_tokens
        return took_s * left / read if took_s >= KNOWN_AFTER_S and read > 0 and left > 0 else None


def left_words(left_s: float | None) -> str:
    """Return what follows the tokens read."""
    return "" if left_s is None else tr(", {time} left", time=time_words(max(1.0, left_s)))
