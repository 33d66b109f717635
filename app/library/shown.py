"""The library as the window shows it, and the work that ends in showing it anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from PySide6.QtCore import QObject, Qt, Signal

from app.background import Background
from app.library.shelf import Shelf
from app.library.stock import Stock
from app.notices import Notices
from engine.cancellation import CancelToken
from engine.errors import EngineError
from engine.language import tr

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Step:
    """How far a step is: `token` tells which one."""

    token: CancelToken
    text: str


class ShownLibrary(QObject):
    """`shelf` is the latest. `progress` says in words what is under way, empty: nothing."""

    shelf_changed = Signal(Shelf)
    progress = Signal(str)

    _stepped = Signal(_Step)

    def __init__(self, stock: Stock, background: Background, notices: Notices, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.shelf = Shelf()
        self.is_awake = False
        """Whether anybody has looked at the library: until then nothing is looked into, read or planned."""
        self.notices = notices
        self.stock = stock
        self._background = background
        self._stepped.connect(self._on_step, Qt.ConnectionType.QueuedConnection)

    def show(self, shelf: Shelf) -> None:
        """Show `shelf`."""
        self.shelf = shelf
        self.shelf_changed.emit(shelf)

    def run(
        self,
        what: str,
        work: Callable[[], _T],
        done: Callable[[_T], None],
        failed: Callable[[EngineError], None] | None = None,
        *,
        quiet: bool = True,
    ) -> None:
        """Do `work` beside the GUI thread; what goes wrong is told unless `failed` takes it."""
        self._background.run(what, work, done, failed or self.notices.tell, quiet=quiet)

    def change(
        self,
        what: str,
        change: Callable[[], None],
        failed: Callable[[EngineError], None] | None = None,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Change something, and show the list anew where anybody looks at it; `then` is called after that."""

        def changed() -> Shelf | None:
            change()
            return self.stock.shelf() if self.is_awake else None

        def show(shelf: Shelf | None) -> None:
            if shelf is not None:
                self.show(shelf)
            then()

        self.run(what, changed, show, failed)

    def teller(self, token: CancelToken, words: str) -> Callable[[int, int], None]:
        """Return what a step tells, from its thread: `words`, which may have the fields `done` and `whole`."""

        def tell(n_done: int, n_all: int) -> None:
            if n_all and not token.cancelled:
                self._stepped.emit(_Step(token, words.format(done=n_done, whole=n_all)))

        return tell

    def _on_step(self, step: _Step) -> None:
        """Show how far a step is, and what it has learnt."""
        if step.token.cancelled:
            return
        self.progress.emit(step.text)

        def show(shelf: Shelf) -> None:
            if not step.token.cancelled:
                self.show(shelf)

        self.run(tr("Listing models"), self.stock.shelf, show)
