"""A token with which one thread tells another that nobody waits for its result any more."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class CancelToken:
    """Set once, from any thread. Whoever blocks subscribes a callback that wakes it, so that nobody polls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False
        self._callbacks: list[Callable[[], None]] = []

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> None:
        """Set the token and wake all subscribers; later calls do nothing."""
        with self._lock:
            if self._cancelled:
                return
            self._cancelled = True
            callbacks = tuple(self._callbacks)
        for callback in callbacks:
            callback()

    @contextmanager
    def waking(self, callback: Callable[[], None]) -> Iterator[None]:
        """Call `callback` on cancel (at once if that already happened) as long as the context lasts.

        The callback may still run just after the context ended, so it must be harmless then.
        """
        with self._lock:
            self._callbacks.append(callback)
            cancelled = self._cancelled
        try:
            if cancelled:
                callback()
            yield
        finally:
            with self._lock:
                self._callbacks.remove(callback)
