"""One thread that does one thing after another: what others hand in, and one thing that is due later."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

_log = logging.getLogger("layerdeck.engine")


class Inbox:
    """Runs commands in the order of `put`, in a thread that starts with the first and ends once `is_over` says so.

    An exception in a command is a bug of ours: it is logged, `on_bug` is called, and the thread goes on.
    """

    def __init__(self, name: str, *, is_over: Callable[[], bool], on_bug: Callable[[], None]) -> None:
        self._name = name
        self._is_over = is_over
        self._on_bug = on_bug
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._due: tuple[float, Callable[[], None]] | None = None

    def put(self, command: Callable[[], None]) -> bool:
        """Hand in a command from any thread; False after `close`."""
        with self._lock:
            if self._closed:
                return False
            self._commands.put(command)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        return True

    def put_result(self, command: Callable[[], None]) -> None:
        """Hand in what came of an earlier command; taken after `close` as well."""
        self._commands.put(command)

    def close(self, last: Callable[[], None], timeout_s: float) -> None:
        """Hand in the last command and wait at most `timeout_s` for the thread. Later calls only wait."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._commands.put(last)
            thread = self._thread
        if thread is not None and not self.is_own_thread():
            thread.join(timeout_s)

    def is_own_thread(self) -> bool:
        """Whether this is called from a command."""
        return threading.current_thread() is self._thread

    def call_later(self, delay_s: float, command: Callable[[], None]) -> None:
        """Run `command` after `delay_s`, instead of what was due before. From the inbox's thread."""
        self._due = (time.monotonic() + delay_s, command)

    def forget_later(self) -> None:
        """Run nothing later. From the inbox's thread."""
        self._due = None

    def _run(self) -> None:
        while not self._is_over():
            command = self._next()
            try:
                command()
            except Exception:
                _log.exception("a command of %s failed", self._name)
                self._on_bug()

    def _next(self) -> Callable[[], None]:
        """Return what is due, even when commands keep coming, or the next command."""
        if self._due is None:
            return self._commands.get()
        due_s, due = self._due
        try:
            left_s = due_s - time.monotonic()
            if left_s > 0:
                return self._commands.get(timeout=left_s)
        except queue.Empty:
            pass
        self._due = None
        return due
