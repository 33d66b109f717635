"""Engine packs (ggml backends as files that can be installed): install, switch, remove and check them.

The actions run in the background, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from msgspec import Struct
from PySide6.QtCore import QObject, Signal

from app.background import Background
from app.notices import Notices
from app.packs import pack_installer
from app.rig.device_search import DeviceSearch
from engine.base.cancellation import CancelToken
from engine.base.errors import EngineError
from engine.base.language import tr
from engine.devices.packs.manifest import Manifest
from engine.devices.packs.signing import Maker
from engine.devices.packs.store import ListedPack
from engine.machines.rigs.pack_installer import PackInstaller


class Packs(Struct, frozen=True):
    """The installed engine packs (ggml backends as files), and the action on them that runs now.

    `listed`: the packs, each with its state.
    `under_way`: description of the action for the user; empty if none runs.
    `fresh`: name of a pack that was just installed and has passed its check; empty if there is none.
    """

    listed: tuple[ListedPack, ...] = ()
    under_way: str = ""
    fresh: str = ""

    @property
    def in_use(self) -> frozenset[str]:
        """Names of the engine packs whose backends child processes load."""
        return frozenset(pack.name for pack in self.listed if pack.state == "used")


class UntrustedPack(Struct, frozen=True):
    """An engine pack whose publisher the user does not trust.

    `path`: file of the pack. `words`: a sentence about the publisher.
    """

    path: Path
    words: str


class PackController(QObject):
    """Installs, switches, checks and removes engine packs in the background, and emits each change.

    Devices are searched again if an action has changed which packs are in use.
    """

    changed = Signal(Packs)
    asked = Signal(UntrustedPack)

    def __init__(
        self, search: DeviceSearch, background: Background, notices: Notices, parent: QObject | None = None
    ) -> None:
        super().__init__(parent)
        self._search = search
        self._background = background
        self._notices = notices
        self._cancel = CancelToken()
        self._used: frozenset[str] | None = None
        self._read: dict[Path, Manifest] = {}
        """Manifests that `inspect` has read, by the path of the file."""
        self.packs = Packs()

    def check_new(self) -> None:
        """Check the packs that were never checked with this version of the engine."""
        self._do(tr("Checking engine packs"), lambda keeper: keeper.check_new(), quiet=True)

    def refresh(self) -> None:
        """Read the list of engine packs again in the background, and emit it."""
        self._do(tr("Looking for engine packs"), lambda keeper: keeper.listed(), quiet=True)

    def inspect(self, path: Path) -> None:
        """Read in the background who signed the engine pack in the file `path`.

        If the user trusts that publisher, the pack is installed; else `asked` is emitted.
        """

        def told(found: tuple[Manifest, Maker]) -> None:
            manifest, maker = found
            self._read[path] = manifest
            if maker.is_trusted:
                self.install(path)
            else:
                self.asked.emit(UntrustedPack(path, maker.words))

        what = tr("Checking the signature of {name}", name=path.name)
        self._background.run(
            what, lambda: pack_installer().store.read_archive(path), told, self._notices.tell, quiet=True
        )

    def install(self, path: Path) -> None:
        """Install the engine pack in the file `path`, and check it, in the background.

        If `inspect` has read the file before, and the file has another pack now, that pack is refused.
        """
        agreed = self._read.pop(path, None)

        def work(keeper: PackInstaller) -> str:
            verdict = keeper.install(path, agreed)
            return verdict.name if verdict.ok and verdict.devices else ""

        self._do(tr("Installing {name} and checking it", name=path.name), work)

    def remove(self, name: str) -> None:
        """Remove the installed engine pack `name` in the background."""
        self._do(tr("Removing {name}", name=name), lambda keeper: keeper.remove(name))

    def switch(self, name: str, *, on: bool) -> None:
        """Enable or disable the engine pack `name`, so that child processes load it or not."""

        def work(keeper: PackInstaller) -> None:
            keeper.switch(name, on=on)
            keeper.check_new()

        self._do(tr("Turning {name} on", name=name) if on else tr("Turning {name} off", name=name), work)

    def check(self, name: str) -> None:
        """Check the engine pack `name` again in the background."""
        self._do(tr("Checking {name}", name=name), lambda keeper: keeper.check(keeper.store.pack(name)))

    def close(self) -> None:
        """Cancel the running action on engine packs."""
        self._cancel.cancel()

    def _do(self, what: str, work: Callable[[PackInstaller], object], *, quiet: bool = False) -> None:
        """Run `work` in the background, then emit the new list of packs. If another action runs, only show a notice.

        `what`: name of the action, for notices. `quiet`: True keeps the action off the status line.
        `work`: if it returns the name of a pack, that pack is shown as just installed.
        """
        if self.packs.under_way:
            self._notices.say(tr("Wait until this is done: {under_way}.", under_way=self.packs.under_way))
            return
        self._show(Packs(self.packs.listed, what))

        def run() -> tuple[Packs, EngineError | None]:
            keeper = pack_installer(self._cancel)
            # Read before the work: the first action has nothing to compare its result with otherwise.
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
                self._search.judge_again()

        self._background.run(what, run, show, self._notices.tell, quiet=quiet)

    def _show(self, packs: Packs) -> None:
        self.packs = packs
        self.changed.emit(packs)
