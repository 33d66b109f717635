"""A bound on what a library does with strangers' words: in calls, not in time, so that it is the same anywhere."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TooMuchWorkError(Exception):
    """More calls than were allowed."""


@contextmanager
def call_limit(calls: int) -> Iterator[None]:
    """Let this thread call `calls` functions, those in C and all returns counted too.

    Raises:
        TooMuchWorkError: out of the code that called one more.
    """
    left = calls

    def count(frame: FrameType, _event: str, _argument: object) -> None:
        nonlocal left
        left -= 1
        # What is raised in a generator that is being dropped is lost, and the limit with it: elsewhere first.
        if left < (-calls if frame.f_code.co_flags & inspect.CO_GENERATOR else 0):
            raise TooMuchWorkError

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(before)
