"""Python's garbage collector, run in the GUI thread alone.

An automatic collection runs in the thread that happens to allocate, and deletes the objects of reference cycles there.
PySide moves the deletion of Qt's own widgets to the GUI thread, but not that of subclasses and of plain `QObject`s. So
a background thread would delete dialogs and timers while the GUI thread uses them.
"""

from __future__ import annotations

import gc

from PySide6.QtCore import QObject, Qt, QTimer

INTERVAL_MS = 2000
_YOUNG_OBJECTS = 5000
"""Number of new objects below which no collection runs: a window at rest makes some hundred in two seconds."""
_ROUNDS = 10
"""Number of collections of one generation after which the next older one is collected too, as in Python."""


class GarbageCollector(QObject):
    """Runs Python's garbage collector in the thread of this object only; automatic collections are turned off.

    Construct it before the window. Collections start with `begin`: while the window is constructed, they find nothing
    to delete, but would take 8 % of the processor time until the first paint.
    """

    def __init__(self, parent: QObject) -> None:
        super().__init__(parent)
        gc.disable()
        self._timer = QTimer(self)
        self._timer.setTimerType(Qt.TimerType.VeryCoarseTimer)
        self._timer.timeout.connect(self.collect)

    def begin(self) -> None:
        """Start the timer of the collections. Objects that exist now are never collected (`gc.freeze`).

        Call it when the window is complete.
        """
        gc.freeze()
        self._timer.start(INTERVAL_MS)

    def collect(self) -> None:
        """Collect the youngest generation if it has many objects; from time to time older ones too."""
        young, middle, old = gc.get_count()
        if young > _YOUNG_OBJECTS:
            gc.collect(0 if middle < _ROUNDS else 1 if old < _ROUNDS else 2)
