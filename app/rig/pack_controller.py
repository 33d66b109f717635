"""Installs, switches, removes and checks engine packs (backends of llama.cpp that can be installed as files).

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
    """The installed engine packs (installable llama.cpp backends), and the action on them that runs now.

    `listed`: the packs, each with its state.
    `under_way`: description of the action for the user; empty if none runs.
    `fresh`: name of the pack that was just installed and has passed its check; empty: no pack was.
    """

    listed: tuple[ListedPack, ...] = ()
    under_way: str = ""
    fresh: str = ""

    @property
    def in_use(self) -> frozenset[str]:
        """Names of the engine packs (installable llama.cpp backends) that child processes load."""
        return frozenset(pack.name for pack in self.listed if pack.state == "used")


class UntrustedPack(Struct, frozen=True):
    """An engine pack (an installable llama.cpp backend) whose publisher the user does not trust.

    `path`: file of the pack.
    `words`: a sentence about the publisher, for the user.
    """

    path: Path
    words: str


class PackController(QObject):
    """Installs, switches, checks and removes engine packs (installable llama.cpp backends) in the background.

    Each change is emitted as `changed`. Devices are searched again if an action has changed which packs are in use.
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
        """Manifests (descriptions of engine packs) that `inspect` has read, by the path of the pack's file."""
        self.packs = Packs()

    def check_new(self) -> None:
        """Check in the background the engine packs that were never checked with this version of the engine.

        An engine pack is an installable llama.cpp backend. The check loads it in a child process.
        """
        self._do(tr("Checking engine packs"), lambda keeper: keeper.check_new(), quiet=True)

    def refresh(self) -> None:
        """Read the list of engine packs again in the background, and emit it as `changed`.

        An engine pack is an installable llama.cpp backend.
        """
        self._do(tr("Looking for engine packs"), lambda keeper: keeper.listed(), quiet=True)

    def inspect(self, path: Path) -> None:
        """Read in the background who signed the engine pack (an installable llama.cpp backend) in the file `path`.

        If the user trusts that publisher, the pack is installed. Else `asked` is emitted, so that the user decides.
        """

        def ask(found: tuple[Manifest, Maker]) -> None:
            manifest, maker = found
            self._read[path] = manifest
            if maker.is_trusted:
                self.install(path)
            else:
                self.asked.emit(UntrustedPack(path, maker.words))

        what = tr("Checking the signature of {name}", name=path.name)
        self._background.run(
            what, lambda: pack_installer().store.read_archive(path), ask, self._notices.show_error, quiet=True
        )

    def install(self, path: Path) -> None:
        """Install and check in the background the engine pack (an installable llama.cpp backend) in the file `path`.

        `inspect` may have read the file before. If the file contains another pack since then, the installation fails.
        """
        agreed = self._read.pop(path, None)

        def work(keeper: PackInstaller) -> str:
            verdict = keeper.install(path, agreed)
            return verdict.name if verdict.ok and verdict.devices else ""

        self._do(tr("Installing {name} and checking it", name=path.name), work)

    def remove(self, name: str) -> None:
        """Remove in the background the engine pack (an installable llama.cpp backend) that is called `name`."""
        self._do(tr("Removing {name}", name=name), lambda keeper: keeper.remove(name))

    def switch(self, name: str, *, on: bool) -> None:
        """Switch an engine pack (an installable llama.cpp backend) on or off, in the background.

        Child processes load only packs that are on. After the switch, packs that were never checked are checked.

        `name`: name of the pack.
        """

        def work(keeper: PackInstaller) -> None:
            keeper.switch(name, on=on)
            keeper.check_new()

        self._do(tr("Turning {name} on", name=name) if on else tr("Turning {name} off", name=name), work)

    def check(self, name: str) -> None:
        """Check in the background again whether a child process can load the engine pack called `name`.

        An engine pack is an installable llama.cpp backend.
        """
        self._do(tr("Checking {name}", name=name), lambda keeper: keeper.check(keeper.store.pack(name)))

    def close(self) -> None:
        """Cancel the running action on engine packs (installable llama.cpp backends), if there is one."""
        self._cancel.cancel()

    def _do(self, what: str, work: Callable[[PackInstaller], object], *, quiet: bool = False) -> None:
        """Run an action on engine packs (installable llama.cpp backends) in the background, then emit the new list.

        If another action runs already, only show a notice.

        `what`: name of the action, for notices.
        `work`: the action. If it returns the name of a pack, that pack is shown as just installed.
        `quiet`: True keeps the action off the status line.
        """
        if self.packs.under_way:
            self._notices.show(tr("Wait until this is done: {under_way}.", under_way=self.packs.under_way))
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
                self._notices.show_error(error)
            if self._used != self.packs.in_use:
                self._used = self.packs.in_use
                self._search.judge_again()

        self._background.run(what, run, show, self._notices.show_error, quiet=quiet)

    def _show(self, packs: Packs) -> None:
        self.packs = packs
        self.changed.emit(packs)
