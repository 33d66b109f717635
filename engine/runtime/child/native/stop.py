"""The stop flag of the child: readable by Python and by llama.cpp's abort callback.

The reading thread sets it when a `Stop` or `Quit` arrives; the main thread computes meanwhile. `DecodeLoop`
acknowledges each stop after it has ended the request.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any


class StopFlag:
    """Flag in native memory that aborts the running load or batch, and the stops that are not handled yet.

    llama.cpp calls its abort callback for each graph node. A Python function there would take the interpreter lock
    hundreds of times for each token. So the callback is C's `strlen`, and the flag a string that is empty or not.

    A batch is aborted only if all of its requests are being stopped, because llama.cpp discards a whole micro batch.
    """

    def __init__(self) -> None:
        self._text = ctypes.create_string_buffer(2)
        self._lock = threading.Lock()
        self._unread: list[int | None] = []
        self._computing: Collection[int] | None = None
        self._load_stopped = False
        self._quitting = False
        self.requested = False
        """Whether the running load or batch has to end."""

    @property
    def pending(self) -> bool:
        """Whether a stop of any request is not handled yet."""
        return self._quitting or bool(self._unread)

    @property
    def address(self) -> int:
        """Address of the flag, for the data argument of llama.cpp's abort callback."""
        return ctypes.addressof(self._text)

    def request(self, request: int | None) -> None:
        """Note a stop when it is read. The `Stop` itself waits in the queue of requests. None: stop everything."""
        with self._lock:
            self._unread.append(request)
            self._load_stopped = self._load_stopped or request is None
            self._update()

    def acknowledge(self, request: int | None) -> None:
        """Forget a stop that the main thread has handled."""
        with self._lock:
            self._unread.remove(request)
            self._update()

    def begin_load(self) -> None:
        """Note that a `Load` was read. Earlier stops do not apply to it."""
        with self._lock:
            self._load_stopped = False
            self._update()

    def quit(self) -> None:
        """Abort what runs, and everything that begins later."""
        with self._lock:
            self._quitting = True
            self._update()

    def begin_computing(self, requests: Collection[int]) -> None:
        """From now until `end_computing` the flag refers to a batch of these requests."""
        with self._lock:
            self._computing = requests
            self._update()

    def end_computing(self) -> None:
        """The batch has been computed; the flag refers to the load again."""
        with self._lock:
            self._computing = None
            self._update()

    @contextmanager
    def computing(self, requests: Collection[int]) -> Iterator[None]:
        """`begin_computing` and `end_computing` as a context manager."""
        self.begin_computing(requests)
        try:
            yield
        finally:
            self.end_computing()

    @contextmanager
    def aborting(self) -> Iterator[None]:
        """Set the flag for a batch inside, so that llama.cpp allocates everything for it and computes nothing."""
        with self._lock:
            self._text[0] = b"\x01"
        try:
            yield
        finally:
            with self._lock:
                self._text[0] = b"\x01" if self.requested else b"\x00"

    @staticmethod
    def native_callback(prototype: Any) -> Any:
        """Return `strlen` as a function of type `prototype` (`bool (*)(void *)`)."""
        # strlen("") is 0: go on. strlen("\x01") is 1: end the computation.
        library = ctypes.CDLL("msvcrt" if sys.platform == "win32" else None)
        return ctypes.cast(library.strlen, prototype)

    def _update(self) -> None:
        # Called with the lock held, in either thread. It sets the byte last, which native code reads without a lock.
        computing, unread = self._computing, self._unread
        if computing is None:
            ends = self._load_stopped
        else:
            ends = None in unread or (bool(unread and computing) and all(each in unread for each in computing))
        ends = ends or self._quitting
        if ends is not self.requested:
            self.requested = ends
            self._text[0] = b"\x01" if ends else b"\x00"
