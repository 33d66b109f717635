"""Time limits for estimates, because a model file may describe a graph that takes too long to compute.

The caller sets a time and a way to cancel with `limited`, and the loops call `check_limits`. Outside of `limited` there
is no limit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import thread_time

from engine.base.errors import CancelledError

_CALLS_PER_CHECK = 64
"""Number of calls of `check_limits` per check of the clock, because reading the clock is slower than the call."""


class TooMuchWorkError(Exception):
    """An estimate took longer than its limit."""


# Several threads estimate at the same time, each with its own deadline: `thread_time` is different in every thread.
class _Limits(threading.local):
    """Limits of the current thread.

    `deadline_s`: value of `thread_time` at which the time is up; None for no limit.
    `cancelled`: function that returns whether the caller cancelled; None if it cannot.
    `left`: number of calls of `check_limits` until the next check of the clock.
    """

    deadline_s: float | None = None
    cancelled: Callable[[], bool] | None = None
    left = _CALLS_PER_CHECK


_limits = _Limits()


@contextmanager
def limited(seconds: float, cancelled: Callable[[], bool] | None = None) -> Iterator[None]:
    """Limit the estimates in the `with` block to `seconds` of this thread's processor time.

    Of nested limits the earlier deadline counts. Processor time is used so that a busy computer delays a forecast, but
    does not end it.

    `cancelled`: function that returns whether the caller cancelled; None if it cannot.

    Raises:
        TooMuchWorkError, CancelledError: from `check_limits`.
    """
    # Limits may be nested: an inner one can only shorten the time, and the outer one holds again afterwards.
    before = _limits.deadline_s, _limits.cancelled
    deadline_s = thread_time() + seconds
    _limits.deadline_s = deadline_s if before[0] is None else min(before[0], deadline_s)
    _limits.cancelled = cancelled or before[1]
    try:
        yield
    finally:
        _limits.deadline_s, _limits.cancelled = before


def check_limits() -> None:
    """Raise an exception if a limit of this thread is reached. Loops whose length depends on a model file call this.

    Raises:
        TooMuchWorkError: the time is up.
        CancelledError: the caller cancelled.
    """
    _limits.left -= 1
    if _limits.left > 0:
        return
    _limits.left = _CALLS_PER_CHECK
    if _limits.deadline_s is not None and thread_time() > _limits.deadline_s:
        raise TooMuchWorkError("it takes too long")
    if _limits.cancelled is not None and _limits.cancelled():
        raise CancelledError("The forecast was cancelled.")
