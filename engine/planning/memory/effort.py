"""How long an estimate may take: its numbers come from a file, which may ask for graphs without end.

Whoever plans says how long, and whether anybody waits any more; the loops of the arithmetic look at it. Without a word
there is no limit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import thread_time

from engine.base.errors import CancelledError

_LOOKS = 64
"""A look at the clock for so many calls of `go_on`."""


class TooMuchWorkError(Exception):
    """An estimate was not done in its time."""


class _Limits(threading.local):
    """Of this thread: by when, and who is asked. `left` calls until the next look."""

    deadline_s: float | None = None
    cancelled: Callable[[], bool] | None = None
    left = _LOOKS


_limits = _Limits()


@contextmanager
def limited(seconds: float, cancelled: Callable[[], bool] | None = None) -> Iterator[None]:
    """Let the arithmetic inside take `seconds` of this thread at most, less where an outer limit says so.

    It is the processor's time that counts: on a busy machine a forecast is late, and none is given up for that.

    Raises:
        TooMuchWorkError, CancelledError: out of `go_on`.
    """
    before = _limits.deadline_s, _limits.cancelled
    deadline_s = thread_time() + seconds
    _limits.deadline_s = deadline_s if before[0] is None else min(before[0], deadline_s)
    _limits.cancelled = cancelled or before[1]
    try:
        yield
    finally:
        _limits.deadline_s, _limits.cancelled = before


def go_on() -> None:
    """To be called in every loop whose length a model file decides; costs next to nothing.

    Raises:
        TooMuchWorkError: the time is up.
        CancelledError: nobody waits any more.
    """
    _limits.left -= 1
    if _limits.left > 0:
        return
    _limits.left = _LOOKS
    if _limits.deadline_s is not None and thread_time() > _limits.deadline_s:
        raise TooMuchWorkError("it takes too long")
    if _limits.cancelled is not None and _limits.cancelled():
        raise CancelledError("Nobody waits for this forecast any more.")
