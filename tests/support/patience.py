"""Deadline of waits in tests. It is far longer than any wait takes, so only a hang reaches it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

DEADLINE_S = 120.0
DEADLINE_MS = round(DEADLINE_S * 1000)
_LOOK_S = 0.01


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until `condition` holds, where nothing tells of the change.

    Raises:
        AssertionError: it does not hold at the deadline.
    """
    ends_s = time.monotonic() + DEADLINE_S
    # Leaves the processor to the thread or process that is waited for.
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < ends_s, "this did not happen in time"
        pause.wait(_LOOK_S)
