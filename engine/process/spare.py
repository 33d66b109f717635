"""A child that has started and was asked nothing yet: the next probe need not wait for a process to come up."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from engine.process.one_shot import Questions


class SpareChild:
    """At most one child in waiting. It has not touched a device: it holds the engine's code and no device memory.

    For any thread. `prepare` starts a process and waits for the system to do that, nothing else waits but `close`.
    """

    def __init__(self, *, timeout_s: float, argv: Sequence[str] | None = None, name: str = "probe") -> None:
        self._timeout_s = timeout_s
        self._argv = argv
        self._name = name
        self._lock = threading.Lock()
        self._child: Questions | None = None
        self._closed = False

    def prepare(self) -> None:
        """Have a child in waiting. One that waits: nothing. One that has ended: a new one. Closed: nothing."""
        with self._lock:
            if self._closed or (self._child is not None and not self._child.has_ended):
                return
            self._child = Questions(timeout_s=self._timeout_s, argv=self._argv, name=self._name)
            self._child.start_ahead()

    def take(self, environment: Mapping[str, str] | None = None) -> Questions:
        """Return the child in waiting, else one that is yet to be started; to be used in a `with` statement.

        With an `environment` it is one that is yet to be started: the engine reads it before anything is asked.
        """
        if environment:
            return Questions(timeout_s=self._timeout_s, argv=self._argv, name=self._name, environment=environment)
        with self._lock:
            child, self._child = self._child, None
        if child is None or child.has_ended:
            return Questions(timeout_s=self._timeout_s, argv=self._argv, name=self._name)
        return child

    def close(self) -> None:
        """End the child in waiting, waiting for it a bounded time; nothing is prepared any more."""
        with self._lock:
            self._closed = True
            child, self._child = self._child, None
        if child is not None:
            child.end()
