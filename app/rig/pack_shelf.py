"""Engine packs in the window: installed, switched, removed and checked beside the GUI thread, one after another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from PySide6.QtCore import QObject, Signal

from app.background import Background
from app.notices import Notices
from app.packs import pack_keeper
from app.rig.device_search import DeviceSearch
from engine.base.cancellation import CancelToken
from engine.base.errors import EngineError
from engine.base.language import tr
from engine.devices.packs.store import ListedPack
from engine.machines.rigs.pack_keeper import PackKeeper


@dataclass(frozen=True, slots=True)
class Packs:
    """What there is to see: the packs, and what is being done, empty where nothing is.

    `fresh`: the pack that was installed just now and works as far as that was tried, empty where there is none.
    """

    listed: tuple[ListedPack, ...] = ()
    under_way: str = ""
    fresh: str = ""

    @property
    def in_use(self) -> frozenset[str]:
        """Names of the packs whose devices there are."""
        return frozenset(pack.name for pack in self.listed if pack.state == "used")


class PackShelf(QObject):
    """Tells each change; devices are looked for again where other packs are in use than before."""

    changed = Signal(Packs)

    def __init__(
        self, search: DeviceSearch, background: Background, notices: Notices, parent: QObject | None = None
    ) -> None:
        super().__init__(parent)
        self._search = search
        self._background = background
        self._notices = notices
        self._cancel = CancelToken()
        self._used: frozenset[str] | None = None
        self.packs = Packs()

    def check_new(self) -> None:
        """Check packs that nobody has checked with this engine; the window does not wait for it."""
        self._do(tr("Checking engine packs"), lambda keeper: keeper.check_new(), quiet=True)

    def refresh(self) -> None:
        """Look at what is there."""
        self._do(tr("Looking for engine packs"), lambda keeper: keeper.listed(), quiet=True)

    def install(self, path: Path) -> None:
        """Install the pack in a file."""

        def work(keeper: PackKeeper) -> str:
            verdict = keeper.install(path)
            return verdict.name if verdict.ok and verdict.devices else ""

        self._do(tr("Installing {name} and checking it", name=path.name), work)

    def remove(self, name: str) -> None:
        """Remove an installed pack."""
        self._do(tr("Removing {name}", name=name), lambda keeper: keeper.remove(name))

    def switch(self, name: str, *, on: bool) -> None:
        """Have a pack used, or not."""

        def work(keeper: PackKeeper) -> None:
            keeper.switch(name, on=on)
            keeper.check_new()

        self._do(tr("Switching {name} on", name=name) if on else tr("Switching {name} off", name=name), work)

    def check(self, name: str) -> None:
        """Check a pack anew."""
        self._do(tr("Checking {name}", name=name), lambda keeper: keeper.check(keeper.store.pack(name)))

    def close(self) -> None:
        """End what runs."""
        self._cancel.cancel()

    def _do(self, what: str, work: Callable[[PackKeeper], object], *, quiet: bool = False) -> None:
        """Do `work` where nothing else is under way, then show what is there; a name that it returns is fresh."""
        if self.packs.under_way:
            self._notices.say(tr("{under_way}: please wait for that first.", under_way=self.packs.under_way))
            return
        self._show(Packs(self.packs.listed, what))

        def run() -> tuple[Packs, EngineError | None]:
            keeper = pack_keeper(self._cancel)
            before = frozenset(each.name for each in keeper.listed() if each.state == "used")
            if self._used is None:
                self._used = before
            try:
                fresh = work(keeper)
            except EngineError as error:
                return Packs(keeper.listed()), error
            return Packs(keeper.listed(), fresh=fresh if isinstance(fresh, str) else ""), None

        def show(found: tuple[Packs, EngineError | None]) -> None:
            packs, error = found
            self._show(packs)
            if error is not None:
                self._notices.tell(error)
            if self._used != self.packs.in_use:
                self._used = self.packs.in_use
                self._search.refresh()

        self._background.run(what, run, show, self._notices.tell, quiet=quiet)

    def _show(self, packs: Packs) -> None:
        self.packs = packs
        self.changed.emit(packs)
