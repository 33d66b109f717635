"""Computes the SHA-256 of a file in order while it is downloaded, including the bytes of an earlier transfer.

During the download the thread has the lowest priority, because hashing takes four times the processor time of fetching.
When the file is complete, the user waits for the hash: a second thread with normal priority computes the rest, since a
thread cannot raise its priority again.
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
    """Hashes a growing file in a thread of its own, from the constructor until `finish` or `close`.

    `read`: reads the file; its arguments are an offset and the largest number of bytes to return.
    `end`: returns the number of bytes up to which the file has arrived without a gap.
    `hashed_bytes`: number of bytes hashed so far.
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
        """Tell the hashing thread that more bytes of the file have arrived."""
        with self._condition:
            self._condition.notify()

    def finish(self, timeout_s: float) -> str | None:
        """Return the SHA-256 of the complete file in hexadecimal, or None if it is not done within `timeout_s` seconds.

        May be called again after None.

        Raises:
            Exception: the error of reading the file.
        """
        with self._condition:
            is_first, self._last = not self._last, True
            self._condition.notify()
        if is_first:
            self._rest.start()
        # A short wait: the caller reports progress in between.
        self._rest.join(timeout_s)
        if self._rest.is_alive():
            return None
        if self.error is not None:
            raise self.error
        return self._hash.hexdigest()

    def close(self) -> None:
        """Stop hashing, and wait for the thread to end."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        # `_rest` itself waits for `_thread`.
        (self._rest if self._last else self._thread).join()

    def _run(self, hash_all: Callable[[], None]) -> None:
        try:
            hash_all()
        except Exception as error:  # Told to whoever waits for the digest.
            self.error = error

    def _follow(self) -> None:
        """Hash new bytes at low priority until `finish` or `close` is called."""
        _step_behind()
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._closing or self._last or self._end() > self.hashed_bytes)
            if self._closing or self._last:
                return
            self._hash_to(self._end(), lambda: self._closing or self._last)

    def _finish(self) -> None:
        """Hash the remaining bytes at normal priority."""
        # Only one thread at a time may update the hash.
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
    """Set the lowest priority (niceness 19) for this thread. Only Linux supports that."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
