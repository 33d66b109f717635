"""Limits of the work on an estimate. Its loops have lengths from a model file, which may describe a graph without end.

The caller sets a time and a way to cancel with `limited`; the loops call `check_limits`. Without `limited` there is no
limit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import thread_time

from engine.base.errors import CancelledError

_CALLS_PER_CHECK = 64
"""Calls of `check_limits` for one look at the clock, which costs more than the call."""


class TooMuchWorkError(Exception):
    """An estimate took longer than its limit."""


# Several threads estimate at the same time, each with its own deadline: `thread_time` is different in every thread.
class _Limits(threading.local):
    """Limits of the current thread: deadline in seconds of `thread_time`, cancellation, calls until the next check."""

    deadline_s: float | None = None
    cancelled: Callable[[], bool] | None = None
    left = _CALLS_PER_CHECK


_limits = _Limits()


@contextmanager
def limited(seconds: float, cancelled: Callable[[], bool] | None = None) -> Iterator[None]:
    """Limit the arithmetic inside to `seconds` of this thread's processor time, or less if an outer limit is shorter.

    Processor time counts, so that a forecast on a busy machine is late but not given up.

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
    """Check the limits. Every loop whose length comes from a model file calls this.

    Raises:
    TooMuchWorkError: the time is up.
    CancelledError: the caller has cancelled.
    """
    _limits.left -= 1
    if _limits.left > 0:
        return
    _limits.left = _CALLS_PER_CHECK
    if _limits.deadline_s is not None and thread_time() > _limits.deadline_s:
        raise TooMuchWorkError("it takes too long")
    if _limits.cancelled is not None and _limits.cancelled():
        raise CancelledError("The forecast was cancelled.")
