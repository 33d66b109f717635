"""Looks into the stores once people open the library, and again where something has changed on disk."""

from __future__ import annotations

from PySide6.QtCore import QObject, QTimer, Signal

from app.library.shelf import Shelf
from app.library.shown import ShownLibrary
from engine.cancellation import CancelToken
from engine.language import tr
from engine.library.changes import Changes

WATCH_EVERY_MS = 10_000


class Looker(QObject):
    """Steps run beside the GUI thread: what is known, a look, the headers that are new."""

    begun = Signal()
    """A look begins: what was found before is no longer worth working on."""
    finished = Signal()
    """All headers of what is there are read."""

    def __init__(self, shown: ShownLibrary, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.is_looking = False
        self._shown, self._stock = shown, shown.stock
        self._token = CancelToken()
        self._watch = QTimer(self)
        self._watch.setInterval(WATCH_EVERY_MS)
        self._watch.timeout.connect(self._check)

    def close(self) -> None:
        """End what is under way."""
        self._watch.stop()
        self._token.cancel()

    def wake(self) -> None:
        """Show what is known, then look; from now on what changes is seen."""
        if self._shown.is_awake:
            self._check()
            return
        self._shown.is_awake = True
        self._watch.start()

        def show(shelf: Shelf) -> None:
            if shelf.aside:
                sentence = tr("The library's index could not be used; it was kept as {aside}.", aside=shelf.aside)
                self._shown.notices.say(sentence, bad=True)
            self._shown.show(shelf)
            self.look()

        self._shown.run(tr("Opening the library"), self._stock.known, show)

    def look(self) -> None:
        """Look into all stores and read what is new."""
        self._token.cancel()
        token = self._token = CancelToken()
        self.is_looking = True
        self.begun.emit()

        def found(answer: tuple[Changes, Shelf]) -> None:
            if token.cancelled:
                return
            changes, shelf = answer
            self._shown.show(shelf)
            if sentence := changes.sentence():
                self._shown.notices.say(sentence)
            self._read(token)

        self._shown.progress.emit(tr("Looking for models"))
        self._shown.run(tr("Looking for models"), lambda: (self._stock.look(), self._stock.shelf()), found)

    def _read(self, token: CancelToken) -> None:
        def read() -> Shelf:
            self._stock.read_headers(self._shown.teller(token, tr("Reading headers: {done} of {whole}")), token)
            return self._stock.shelf()

        def done(shelf: Shelf) -> None:
            if token.cancelled:
                return
            self.is_looking = False
            self._shown.show(shelf)
            self._shown.progress.emit("")
            self.finished.emit()

        self._shown.run(tr("Reading headers"), read, done)

    def _check(self) -> None:
        """Look again where something has changed on disk."""
        if self.is_looking:
            return

        def answer(stale: bool) -> None:
            if stale and not self.is_looking:
                self.look()

        self._shown.run(tr("Watching folders"), self._stock.is_stale, answer)
