"""SHA-256 of a file while it grows: what is here in order is hashed, what was here before as well.

As long as bytes come, hashing takes what processor time nobody else wants: it costs four times as much of it as
fetching. Once all are here people wait for it, and the rest is hashed by a thread like any other; a thread cannot get
back the priority that it gave up.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from engine.base.units import MIB

_READ_BYTES = MIB
_NICENESS = 19


class Hasher:
    """A thread that hashes up to `end()` as that moves on, until `finish` or `close`.

    `read` returns bytes from a place, as many as asked for or fewer; `end` is up to where they are here in order.
    """

    def __init__(self, read: Callable[[int, int], bytes], end: Callable[[], int]) -> None:
        self._read = read
        self._end = end
        self._hash = hashlib.sha256(usedforsecurity=False)
        self._condition = threading.Condition()
        self._closing = False
        self._last = False
        self.hashed_bytes = 0
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(self._follow,), name="hash", daemon=True)
        self._rest = threading.Thread(target=self._run, args=(self._finish,), name="hash rest", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Say that there is more."""
        with self._condition:
            self._condition.notify()

    def finish(self, timeout_s: float) -> str | None:
        """Wait at most `timeout_s` for all that is here to be hashed; return the digest, None while it goes on.

        Raises:
            Exception: what reading raised.
        """
        with self._condition:
            is_first, self._last = not self._last, True
            self._condition.notify()
        if is_first:
            self._rest.start()
        self._rest.join(timeout_s)
        if self._rest.is_alive():
            return None
        if self.error is not None:
            raise self.error
        return self._hash.hexdigest()

    def close(self) -> None:
        """End the thread."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        (self._rest if self._last else self._thread).join()

    def _run(self, hash_all: Callable[[], None]) -> None:
        try:
            hash_all()
        except Exception as error:  # Told to whoever waits for the digest.
            self.error = error

    def _follow(self) -> None:
        """Hash what comes, until it is the last."""
        _step_behind()
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._closing or self._last or self._end() > self.hashed_bytes)
            if self._closing or self._last:
                return
            self._hash_to(self._end(), lambda: self._closing or self._last)

    def _finish(self) -> None:
        """Hash the rest."""
        self._thread.join()
        if self.error is None:
            self._hash_to(self._end(), lambda: self._closing)

    def _hash_to(self, end: int, is_over: Callable[[], bool]) -> None:
        while self.hashed_bytes < end and not is_over():
            data = self._read(self.hashed_bytes, min(_READ_BYTES, end - self.hashed_bytes))
            if not data:
                raise OSError("the file became shorter while it was read")
            self._hash.update(data)
            self.hashed_bytes += len(data)


def _step_behind() -> None:
    """Let the threads that fetch have the processor first, where a thread can have a priority of its own."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
