"""The stop flag of the child, which both Python and llama.cpp's abort callback read.

The reading thread sets the flag when a `Stop` or `Quit` arrives, while the main thread computes. `DecodeLoop` then ends
the request, and the main thread acknowledges the stop.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

_SEMAPHORE_WORDS = 8
"""Size of glibc's `sem_t` on 64-bit machines, in words of 32 bits. The first word is the value of the semaphore."""
_STOPPED = 0x7FFFFFFF
"""SEM_VALUE_MAX: the largest value of a semaphore, at which `sem_post` fails."""
_MOST_NODES = 1 << 30


@cache
def _counts() -> bool:
    """Return whether `sem_post` works like glibc's (`sysdeps/nptl/internaltypes.h`), which `StopFlag` needs."""
    if not sys.platform.startswith("linux") or ctypes.sizeof(ctypes.c_void_p) != 8 or sys.byteorder != "little":
        return False
    post = getattr(ctypes.CDLL(None), "sem_post", None)
    if post is None:
        return False
    post.argtypes = (ctypes.c_void_p,)
    tried = (ctypes.c_uint32 * _SEMAPHORE_WORDS)()
    first = (post(tried), *tried)
    tried[0] = _STOPPED
    return (*first, post(tried), *tried) == (0, 1, *([0] * 7), -1, _STOPPED, *([0] * 7))


def _stopped() -> int:
    """Return the value of the flag at which the abort callback ends a computation."""
    return _STOPPED if _counts() else 1


class StopFlag:
    """The stop flag in native memory, which aborts the running load or batch, and the list of unhandled stops.

    llama.cpp calls its abort callback for each graph node. A Python callback would take the interpreter lock (GIL)
    hundreds of times for each token. So the callback is the C function `sem_post`, and the flag is a semaphore: each
    node adds one to its value, which shows that a computation makes progress. At the largest value `sem_post` fails,
    and llama.cpp aborts. On systems without such semaphores the callback is `strlen`, and the flag is a string that is
    empty or not.

    A batch is aborted only if all of its requests are being stopped, because llama.cpp discards a whole micro batch.
    """

    def __init__(self) -> None:
        self._flag = (ctypes.c_uint32 * _SEMAPHORE_WORDS)()
        self._lock = threading.Lock()
        self._unread: list[int | None] = []
        self._computing: Collection[int] | None = None
        self._load_stopped = False
        self._quitting = False
        self.requested = False
        """Whether the running load or batch must end."""

    @property
    def pending(self) -> bool:
        """Whether a stop of any request, or `Quit`, was read and has not been handled yet."""
        return self._quitting or bool(self._unread)

    @property
    def address(self) -> int:
        """Address of the flag, for the data argument of llama.cpp's abort callback."""
        return ctypes.addressof(self._flag)

    @property
    def nodes(self) -> int | None:
        """Counter that grows by one with each graph node on the CPU; None if nodes cannot be counted.

        It is set back to 0 from time to time, so only a change of its value means something.
        """
        if not _counts():
            return None
        with self._lock:
            count = int(self._flag[0])
            # Long before a stop: a second has some 100,000 nodes.
            if _MOST_NODES < count < _STOPPED:
                self._flag[0] = 0
            return count

    def request(self, request: int | None) -> None:
        """Note a stop that the main thread has not handled yet, and set the flag if the stop concerns running work.

        The reading thread calls this for each `Stop`. The main thread takes the same `Stop` from the queue later.

        `request`: id of the request to stop; None: all requests.
        """
        with self._lock:
            self._unread.append(request)
            self._load_stopped = self._load_stopped or request is None
            self._update()

    def acknowledge(self, request: int | None) -> None:
        """Remove a stop from the list of unhandled stops, after the main thread has handled it.

        `request`: id of the stopped request; None: all requests.
        """
        with self._lock:
            self._unread.remove(request)
            self._update()

    def begin_load(self) -> None:
        """Discard a stop of an earlier load, so that it does not abort the next one. Called when a `Load` was read."""
        with self._lock:
            self._load_stopped = False
            self._update()

    def quit(self) -> None:
        """Abort the running load or batch, and every one that begins later."""
        with self._lock:
            self._quitting = True
            self._update()

    def begin_computing(self, requests: Collection[int]) -> None:
        """Note that a batch of these requests is being computed, until `end_computing`.

        Meanwhile the flag is set only if all of these requests are stopped, or by `quit`; stops of loads do not set it.
        """
        with self._lock:
            self._computing = requests
            self._update()

    def end_computing(self) -> None:
        """Note that the batch of `begin_computing` has ended. From now on, a stop of a load or `quit` sets the flag."""
        with self._lock:
            self._computing = None
            self._update()

    @contextmanager
    def computing(self, requests: Collection[int]) -> Iterator[None]:
        """Within a `with` block, note that a batch of these requests is being computed (`begin_computing`)."""
        self.begin_computing(requests)
        try:
            yield
        finally:
            self.end_computing()

    @contextmanager
    def aborting(self) -> Iterator[None]:
        """Set the flag within a `with` block.

        A decode in the block then allocates all memory for its batch, but llama.cpp aborts before it computes.
        """
        with self._lock:
            self._flag[0] = _stopped()
        try:
            yield
        finally:
            with self._lock:
                self._flag[0] = _stopped() if self.requested else 0

    @staticmethod
    def native_callback(prototype: Any) -> Any:
        """Return a C function of libc that llama.cpp calls as abort callback with the flag's address, without Python.

        It is `sem_post`, or `strlen` on systems without such semaphores (see the class): both return a value other than
        0 once the flag is set. `prototype`: ctypes type of the callback, `bool (*)(void *)`.
        """
        # 0 is: go on. strlen("\x01") is 1, and sem_post fails with -1: end the computation.
        library = ctypes.CDLL("msvcrt" if sys.platform == "win32" else None)
        return ctypes.cast(library.sem_post if _counts() else library.strlen, prototype)

    def _update(self) -> None:
        # Called with the lock held, in either thread. It sets the flag last, which native code reads without a lock.
        computing, unread = self._computing, self._unread
        if computing is None:
            ends = self._load_stopped
        else:
            ends = None in unread or (bool(unread and computing) and all(each in unread for each in computing))
        ends = ends or self._quitting
        if ends is not self.requested:
            self.requested = ends
            self._flag[0] = _stopped() if ends else 0
