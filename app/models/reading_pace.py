"""An estimate of the remaining time to read a prompt, from the speed so far."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.base.language import tr
from engine.base.units import format_duration
from engine.runtime.session.events import Reading

KNOWN_AFTER_S = 1.0
"""Seconds of prompt processing before the first estimate. An earlier estimate may be based on a single batch."""


class ReadingPace:
    """Measures how fast the engine reads a prompt, to estimate the remaining time; for one request at a time.

    The measurement starts at the first progress event (`Reading`) of the request. Tokens that the engine had in its
    cache are already counted in that event, so they do not make the speed look too high.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._request: int | None = None
        self._since_s = 0.0
        self._first_tokens = 0

    def left_s(self, event: Reading) -> float | None:
        """Return the estimated seconds until the prompt is read; None if unknown, or if nothing is left to read."""
        now_s = self._clock()
        # The first event may report cached tokens, so time and tokens count from here.
        if event.request != self._request:
            self._request, self._since_s, self._first_tokens = event.request, now_s, event.read_tokens
        took_s, read = now_s - self._since_s, event.read_tokens - self._first_tokens
        left = event.prompt_tokens - event.read_tokens
        return took_s * left / read if took_s >= KNOWN_AFTER_S and read > 0 and left > 0 else None


def left_words(left_s: float | None) -> str:
    """Return the remaining time `left_s`, in seconds, as text to append to a text about progress; empty if unknown."""
    return "" if left_s is None else tr(", {time} left", time=format_duration(max(1.0, left_s)))
