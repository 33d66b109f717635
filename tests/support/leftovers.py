"""Finds child processes and threads that a test leaves running.

QThreads are not searched for, since our code makes none. A search for them by `gc.get_objects` broke other threads:
CPython cannot finish a tuple to which there is already a reference (SystemError in tupleobject.c).
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from weakref import WeakKeyDictionary

import psutil

GRACE_S = 60.0
"""Time for processes and threads that are ending when the test ends. On a busy machine a child takes seconds."""

_TASKS = Path("/proc/self/task")
_started_at: WeakKeyDictionary[threading.Thread, str] = WeakKeyDictionary()


@contextmanager
def record_thread_starts() -> Iterator[None]:
    """Record the place in the code that starts each thread, for the message about a left-over thread."""
    start = threading.Thread.start

    def noting_start(thread: threading.Thread) -> None:
        _started_at[thread] = _caller(sys._getframe(1))
        start(thread)

    threading.Thread.start = noting_start  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]


class Watch:
    """Records what runs when it is made. `leftovers` returns what was started since and still runs."""

    def __init__(self) -> None:
        self._children = set(_children())
        self._threads = set(threading.enumerate())

    def leftovers(self, grace_s: float = GRACE_S) -> list[str]:
        """Return a line for each process or thread that still runs after `grace_s`. Left-over processes are killed."""
        deadline_s = time.monotonic() + grace_s
        return [*self._leftover_children(deadline_s), *self._leftover_threads(deadline_s)]

    def _leftover_children(self, deadline_s: float) -> list[str]:
        added = [child for child in _children() if not self._is_known(child)]
        _, alive = psutil.wait_procs(added, timeout=_remaining(deadline_s))
        lines = [f"process {child.pid}: {_command_line(child)}" for child in alive]
        for child in alive:
            child.kill()
        psutil.wait_procs(alive, timeout=GRACE_S)
        return lines

    def _is_known(self, child: psutil.Process) -> bool:
        """Return whether a process, or one of its ancestors, ran before the test."""
        try:
            return bool(self._children & {child, *child.parents()})
        except psutil.Error:
            return child in self._children

    def _leftover_threads(self, deadline_s: float) -> list[str]:
        added = [thread for thread in threading.enumerate() if thread not in self._threads and not thread.daemon]
        for thread in added:
            thread.join(timeout=_remaining(deadline_s))
        return [
            f'thread "{thread.name}", started at {_started_at.get(thread, "an unknown place")}'
            for thread in added
            if thread.is_alive()
        ]


def _children() -> list[psutil.Process]:
    if _has_no_children():
        return []  # looking through all processes takes long
    children: list[psutil.Process] = psutil.Process().children(recursive=True)
    return children


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return "ending"


def _has_no_children() -> bool:
    """Return whether the system reports that this process has no children; False also if it cannot tell."""
    try:
        return not any((task / "children").read_bytes() for task in _TASKS.iterdir())
    except OSError:
        return False


def _remaining(deadline_s: float) -> float:
    return max(0.0, deadline_s - time.monotonic())


def _caller(frame: FrameType) -> str:
    """Return file and line of the innermost frame in our own code."""
    root = str(Path(__file__).resolve().parents[2])
    stack = traceback.extract_stack(frame)
    place = next((entry for entry in reversed(stack) if entry.filename.startswith(root)), stack[-1])
    return f"{Path(place.filename).name}:{place.lineno}"
