"""The wishes of the parent to end what is running, visible to Python and, without Python, to native code."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any


class StopRequest:
    """A flag in native memory that ends the load or the batch that is being computed, and the stops behind it.

    llama.cpp asks its abort callback once per graph node. A Python function there would take the interpreter lock
    hundreds of times per token, so the callback is the C library's `strlen` and the flag a string that is empty or not.
    A batch of several requests goes on until all of them are to end: the engine would take all of it back.
    """

    def __init__(self) -> None:
        self._text = ctypes.create_string_buffer(2)
        self._lock = threading.Lock()
        self._unread: list[int | None] = []
        self._computing: Collection[int] | None = None
        self._load_stopped = False
        self._quitting = False
        self.requested = False
        """Whether what runs now, the load or a batch, is to end."""

    @property
    def pending(self) -> bool:
        """Whether a stop of whatever request waits to be seen to."""
        return self._quitting or bool(self._unread)

    @property
    def address(self) -> int:
        """What to hand to llama.cpp as the callback's data."""
        return ctypes.addressof(self._text)

    def ask(self, request: int | None) -> None:
        """Note a stop that was read; it reaches whoever answers requests in the order of what was read."""
        with self._lock:
            self._unread.append(request)
            self._load_stopped = self._load_stopped or request is None
            self._judge()

    def taken(self, request: int | None) -> None:
        """Forget a stop that has been seen to."""
        with self._lock:
            self._unread.remove(request)
            self._judge()

    def begin_load(self) -> None:
        """Note that a load was read: stops before it did not mean it."""
        with self._lock:
            self._load_stopped = False
            self._judge()

    def quit(self) -> None:
        """End what runs and what may still begin."""
        with self._lock:
            self._quitting = True
            self._judge()

    def begin_computing(self, requests: Collection[int]) -> None:
        """Until `end_computing` the flag is about a batch of these requests."""
        with self._lock:
            self._computing = requests
            self._judge()

    def end_computing(self) -> None:
        """The batch is over."""
        with self._lock:
            self._computing = None
            self._judge()

    @contextmanager
    def computing(self, requests: Collection[int]) -> Iterator[None]:
        """While a batch of these requests is computed, the flag is about it."""
        self.begin_computing(requests)
        try:
            yield
        finally:
            self.end_computing()

    @contextmanager
    def breaking_off(self) -> Iterator[None]:
        """A batch inside ends before anything of it is computed, but all that it takes has been allocated by then."""
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
        library = ctypes.CDLL("msvcrt" if sys.platform == "win32" else None)
        return ctypes.cast(library.strlen, prototype)

    def _judge(self) -> None:
        computing, unread = self._computing, self._unread
        if computing is None:
            ends = self._load_stopped
        else:
            ends = None in unread or (bool(unread and computing) and all(each in unread for each in computing))
        ends = ends or self._quitting
        if ends is not self.requested:
            self.requested = ends
            self._text[0] = b"\x01" if ends else b"\x00"
