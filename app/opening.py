"""The start of the window: its parts are constructed first, then the window is shown.

A window that is shown before its parts exist stays an empty frame while modules are imported: 2 s on an idle computer
with 2 cores, 5 s on a busy one. Imports and construction run in the event loop. Meanwhile a second start of the program
can pass its files to this process, and a signal can end the program.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from PySide6.QtCore import QObject, QTimer, Signal

from app.settings import Settings
from app.theme import Theme
from app.window.arrangement import make_window_frame

if TYPE_CHECKING:
    from app.wiring import WindowObjects


class StartOptions(Struct, frozen=True):
    """Files and rig of the command line. `files`: models or a layout to open. `rig`: a rig file, or None."""

    files: Sequence[Path] = ()
    rig: Path | None = None


class Opening(QObject):
    """Constructs the window and its objects in the event loop, then shows it.

    If the window is closed before it is shown, nothing is shown. If it is closed right after that, nothing is started.
    """

    opened = Signal(object)  # WindowObjects: the window is shown, and has begun to look for devices

    def __init__(self, settings: Settings, theme: Theme, options: StartOptions) -> None:
        # Before `super().__init__`, since the window is the parent.
        self.frame = make_window_frame(settings, theme)
        super().__init__(self.frame.main)
        self._settings, self._theme, self._options = settings, theme, options
        self._is_closed = False
        self.frame.main.closing.connect(self._on_closing)

    def show(self) -> None:
        """Construct the objects of the window in the next pass of the event loop, then show the window."""
        # `self` is the context: the call is dropped if the window is deleted first.
        QTimer.singleShot(0, self, self._open)

    def _on_closing(self) -> None:
        self._is_closed = True

    def _open(self) -> None:
        if self._is_closed:
            return
        from app.wiring import make_window

        window = make_window(self._settings, self._theme, self.frame)
        window.main.show()
        # Threads that look for devices would take turns with the first paint.
        QTimer.singleShot(0, self, partial(self._start, window))

    def _start(self, window: WindowObjects) -> None:
        if self._is_closed:
            return
        window.start(files=self._options.files, rig=self._options.rig)
        self.opened.emit(window)
