"""The start of the window in two steps, so that people see it at once.

First comes the first picture: the window with its panels, as they are without a model and without devices. All of
`app.wiring`, and with it everything that is not in that picture (models, devices, chats, library, downloads, dialogs,
their files and databases), is imported and made after the first paint. What only that needs is imported nowhere
before it; `tests/app/test_opening.py` names what that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PySide6.QtCore import QEvent, QObject, QTimer, Signal

from app.settings import Settings
from app.theme import Theme
from app.window.arrangement import make_first_picture

UNSEEN_MS = 1000
"""A window that is never painted, as on another desktop or minimised, is made whole after this time."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the command line asks for."""

    files: Sequence[Path] = ()
    rig: Path | None = None


class Opening(QObject):
    """Shows the window, and makes the rest when it has been painted. A window closed before that stays without."""

    opened = Signal(object)  # WindowParts: everything is there and started

    def __init__(self, settings: Settings, theme: Theme, wishes: Wishes) -> None:
        self.picture = make_first_picture(settings, theme)
        super().__init__(self.picture.main)
        self._settings, self._theme, self._wishes = settings, theme, wishes
        self._is_over = False
        self.picture.main.closing.connect(self._give_up)

    def show(self) -> None:
        """Show the window."""
        self.picture.main.installEventFilter(self)
        self.picture.main.show()
        QTimer.singleShot(UNSEEN_MS, self, self._make_the_rest)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        """Wait until the window is painted; its panels are painted in the same turn, before any timer."""
        if event.type() is QEvent.Type.Paint:
            watched.removeEventFilter(self)
            QTimer.singleShot(0, self, self._make_the_rest)
        return False

    def _give_up(self) -> None:
        self._is_over = True

    def _make_the_rest(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        from app.wiring import make_window

        window = make_window(self._settings, self._theme, self.picture)
        window.start(files=self._wishes.files, rig=self._wishes.rig)
        self.opened.emit(window)
