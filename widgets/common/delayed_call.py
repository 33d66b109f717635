"""A timer that calls one function, some time after a change or a pause."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QObject, QTimer


class DelayedCall(QTimer):
    """A single-shot timer that calls `call` when it expires.

    `start` restarts the delay, so that the call comes after a pause. `begin` does not, so that the call comes at most
    once per interval while changes go on.
    """

    def __init__(self, parent: QObject, call: Callable[[], object], interval_ms: int = 0) -> None:
        super().__init__(parent)
        self.setSingleShot(True)
        self.setInterval(interval_ms)
        self.timeout.connect(call)

    def begin(self) -> None:
        """Start the timer, unless it runs."""
        if not self.isActive():
            self.start()

    def flush(self) -> None:
        """Call the function at once if the timer runs."""
        if self.isActive():
            self.stop()
            # Emitted instead of called: a reference to the bound method would keep its object alive.
            self.timeout.emit()
