"""One thread for small pieces of work in their order, there while there is any."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

_log = logging.getLogger("layerdeck.background")


class Worker:
    """Its thread ends when nothing is left to do, and begins anew with the next piece."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._runs = False

    def submit(self, work: Callable[[], None]) -> None:
        """Do `work` after what was given before."""
        with self._lock:
            self._waiting.append(work)
            if self._runs:
                return
            self._runs = True
        threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def close(self) -> None:
        """Leave what has not begun."""
        with self._lock:
            self._waiting.clear()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._runs = False
                    return
                work = self._waiting.popleft()
            try:
                work()
            except Exception:
                _log.exception("bug in %s", self._name)
