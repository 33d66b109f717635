"""What this process may take: a cap on its memory, and bounds on running a foreign chat template."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any


class TimeIsUp(BaseException):
    """Raised inside `time_limit` when the time has passed; once only, so nothing inside may catch it as an error."""


def data_bytes() -> int:
    """Return VmData, what RLIMIT_DATA counts; 0 where the system does not tell."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    line = next((line for line in status.splitlines() if line.startswith("VmData:")), "VmData: 0 kB")
    return int(line.split()[1]) * 1024


def limit_data(limit_bytes: int) -> bool:
    """Have the system refuse private memory beyond `limit_bytes`, for good; False where it cannot."""
    if not sys.platform.startswith("linux"):
        return False
    import resource

    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    return True


@contextmanager
def memory_limit(further_bytes: int) -> Iterator[None]:
    """Refuse more than `further_bytes` of new memory inside, as a MemoryError (Linux only)."""
    baseline_bytes = data_bytes()
    if not sys.platform.startswith("linux") or not baseline_bytes:
        yield
        return
    import resource

    soft_bytes, hard_bytes = resource.getrlimit(resource.RLIMIT_DATA)
    wanted_bytes = baseline_bytes + further_bytes
    if soft_bytes != resource.RLIM_INFINITY:
        wanted_bytes = min(wanted_bytes, soft_bytes)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted_bytes, hard_bytes))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft_bytes, hard_bytes))


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Let Python code inside run for `seconds` at most: every executed line looks at the clock.

    Raises:
        TimeIsUp: from wherever the code is.
    """
    deadline = time.monotonic() + seconds

    def trace(_frame: FrameType, _event: str, _argument: Any) -> Any:
        if time.monotonic() > deadline:
            raise TimeIsUp
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    # What is raised inside a callback of the collector is swallowed, and with it the limit: Python then traces no more.
    gc.disable()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
