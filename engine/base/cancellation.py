"""A cancellation token, with which one thread ends the wait or the work of another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class CancelToken:
    """Cancellation flag that is set once, from any thread. A thread that blocks subscribes a callback that wakes it, so
    nothing has to poll."""

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
        # Without the lock: a callback may take other locks, or end a subscription.
        for callback in callbacks:
            callback()

    @contextmanager
    def waking(self, callback: Callable[[], None]) -> Iterator[None]:
        """Call `callback` on cancel, or at once if the token is already set, until the context ends.

        The callback may still run shortly after the context ended, so it must do no harm then.
        """
        # Both under one lock: a cancel either shows here or calls the callback.
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
