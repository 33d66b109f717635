"""A timer that delays and combines calls of a function, such as those that follow each typed letter."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QObject, QTimer


class DelayedCall(QTimer):
    """A single-shot timer that calls `call` when it expires.

    `start` restarts a running timer. If each of many changes calls `start`, `call` runs once, after a pause in the
    changes.
    `begin` does not restart it. If each change calls `begin`, `call` runs at most once per interval.
    """

    def __init__(self, parent: QObject, call: Callable[[], object], interval_ms: int = 0) -> None:
        super().__init__(parent)
        self.setSingleShot(True)
        self.setInterval(interval_ms)
        self.timeout.connect(call)

    def begin(self) -> None:
        """Start the timer, unless it is already running."""
        if not self.isActive():
            self.start()

    def flush(self) -> None:
        """If the timer is running, stop it and call the function at once."""
        if self.isActive():
            self.stop()
            # Emitted instead of called: a reference to the bound method would keep its object alive.
            self.timeout.emit()
