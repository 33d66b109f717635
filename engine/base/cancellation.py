"""A cancellation token: one thread cancels it to end the wait or the work of another thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


class CancelToken:
    """A cancellation flag that any thread, or a signal handler, can set once.

    A blocking thread registers a callback that wakes it, so it need not poll. A signal handler must not set a
    `threading.Event`: its lock is not reentrant, and the main thread may hold it in `wait`.
    """

    def __init__(self) -> None:
        # Reentrant: a signal handler of the main thread may cancel while the same thread is in `waking`.
        self._lock = threading.RLock()
        self._cancelled = False
        self._callbacks: list[Callable[[], None]] = []

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> None:
        """Set the flag and call all registered callbacks. Later calls have no effect."""
        with self._lock:
            if self._cancelled:
                return
            self._cancelled = True
            callbacks = tuple(self._callbacks)
        # Without the lock: a callback may take other locks, or end a subscription.
        for callback in callbacks:
            callback()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the token is cancelled. Return whether it was.

        `timeout_s`: longest wait in seconds; None: no limit.
        """
        # `SimpleQueue.put` is reentrant.
        woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        with self.waking(lambda: woken.put(None)), suppress(queue.Empty):
            woken.get(timeout=None if timeout_s is None else max(0.0, timeout_s))
        return self._cancelled

    @contextmanager
    def waking(self, callback: Callable[[], None]) -> Iterator[None]:
        """Context manager: call `callback` if the token is cancelled in the context, or at once if it is already.

        The callback may still run shortly after the end of the context, so it must do no harm then. If a signal handler
        cancels the token, the callback may run twice.
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
