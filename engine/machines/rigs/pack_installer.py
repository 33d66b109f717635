"""Installs, removes and switches engine packs, and checks each in a child process of its own before it is used."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from engine.base.cancellation import CancelToken
from engine.base.engine_build import engine_build, engine_version
from engine.base.errors import EngineError, PackError, WorkerCrashedError, WorkerStalledError
from engine.base.files import locked
from engine.base.values import replace
from engine.devices.device import Device, Rig
from engine.devices.packs.manifest import MANIFEST, Manifest, find_damage
from engine.devices.packs.store import (
    PACKS_VARIABLE,
    ListedPack,
    Pack,
    PackBook,
    PackStore,
    Verdict,
    file_states,
    list_packs,
    read_book,
    write_book,
)
from engine.machines.rigs.discovery import devices_of, find_devices, host_device
from engine.machines.rigs.engine_checks import Checked, Checker, cases_of, how_it_ended, write_source
from engine.runtime.process.blocking_child import BlockingChild, raise_if_cancelled
from engine.runtime.protocol.messages import DeviceList, PackLoad
from engine.runtime.protocol.requests import ListDevices

NO_DEVICE = "No device for it was found: is the card's driver installed?"
TIMEOUT_S = 60.0
"""Time-out in seconds for loading a pack: drivers with many cards start slowly."""
_TYPE = "F16"
"""Type of weights of the small model with which a pack is checked.

Faults of other types are found by the engine's self-check.
"""


class PackInstaller(Struct, frozen=True):
    """Installs, removes and checks the engine packs of `store`, and switches them on and off.

    The check of a pack loads it in a child process and computes with it, which takes some seconds. Its result is a
    `Verdict`.

    `book`: path of the file that stores the results of checks, and which packs are off.
    """

    store: PackStore
    book: Path
    cancel: CancelToken | None = None

    def listed(self) -> tuple[ListedPack, ...]:
        """Return all installed packs with their states."""
        return list_packs(self.store, read_book(self.book), engine_build())

    def install(self, archive: Path, agreed: Manifest | None = None) -> Verdict:
        """Install the pack of an archive file, switch it on, check it, and return the result of the check.

        `agreed`: the manifest of the pack that the user agreed to install; None: any pack is installed.

        Raises:
            EngineError: if the pack cannot be installed, the result cannot be written, or `cancel` is cancelled.
        """
        # Switched on before the check: a pack of the same name may have been switched off once.
        pack = self.store.install(archive, engine_version(), agreed)
        self._change(lambda book: book.switched(pack.name, on=True))
        return self.check(pack)

    def remove(self, name: str) -> None:
        """Remove the pack with this name, and the results of its checks. Raises `PackError` if that fails."""
        folder = self.store.remove(name)
        # Switched on, so that the book forgets it: installed again later, it is on.
        self._change(lambda book: book.without(folder).switched(name, on=True))

    def switch(self, name: str, *, on: bool) -> None:
        """Switch the pack with this name on or off. Raises `PackError` if there is none."""
        pack = self.store.pack(name)
        self._change(lambda book: book.switched(pack.name, on=on))

    def check_new(self) -> tuple[Verdict, ...]:
        """Check the packs that are switched on and have no result yet, and return the new results.

        A result is void if the pack's files or the engine build have changed since.
        """
        book = read_book(self.book)
        packs = (pack for pack in self.store.packs() if pack.name not in book.off)
        return tuple(self.check(pack) for pack in packs if book.verdict_on(pack.folder, engine_build()) is None)

    def check_all(self, on_pack: Callable[[Pack], None] = lambda _pack: None) -> tuple[Verdict, ...]:
        """Check all installed packs again, and return the results. `on_pack`: called with each pack before its check.

        Raises:
            EngineError: if `cancel` is cancelled, or if the results cannot be written.
        """
        found = []
        for pack in self.store.packs():
            on_pack(pack)
            found.append(self.check(pack))
        return tuple(found)

    def check(self, pack: Pack) -> Verdict:
        """Check one pack, store the result, and return it.

        Raises:
            EngineError: if `cancel` is cancelled, or if the result cannot be written.
        """
        verdict = self._judged(pack)
        self._change(lambda book: book.with_verdict(verdict))
        return verdict

    def _change(self, change: Callable[[PackBook], PackBook]) -> None:
        # Locked: the window and a command may change it at the same time.
        try:
            self.book.parent.mkdir(parents=True, exist_ok=True)
            with locked(self.book):
                write_book(self.book, change(read_book(self.book)))
        except OSError as error:
            raise PackError(f"{self.book} cannot be written: {error.strerror or error}.") from None

    def _judged(self, pack: Pack) -> Verdict:
        manifest = pack.manifest
        # With the manifest: it names the hashes and the maker.
        names = () if manifest is None else (*manifest.files, MANIFEST)
        verdict = Verdict(
            name=pack.name,
            folder=str(pack.folder),
            engine=engine_build(),
            library="" if manifest is None else manifest.library,
            files=file_states(pack.folder, names),
            ok=False,
            reason=pack.fault,
        )
        if manifest is None:
            return verdict
        # Version and hashes before any code of the pack runs.
        if fault := manifest.misfit(engine_version()) or find_damage(pack.folder, manifest):
            return replace(verdict, reason=fault)
        with _alone(verdict) as environment:
            loaded, devices = self._loaded(pack, environment)
            if not loaded.reason and devices:
                loaded = self._computing(loaded, devices, environment)
        reason = loaded.reason or ("" if devices else NO_DEVICE)
        return replace(verdict, ok=not loaded.reason, reason=reason, devices=loaded.devices)

    def _loaded(self, pack: Pack, environment: Mapping[str, str]) -> tuple[PackLoad, tuple[Device, ...]]:
        try:
            with self._child(environment) as child:
                answer = child.ask(ListDevices(), DeviceList)
        # A crash while loading is the pack's fault: nothing else is loaded in this child.
        except (WorkerCrashedError, WorkerStalledError) as error:
            return PackLoad(name=pack.name, reason=f"The engine {how_it_ended(error)} when it loads the pack."), ()
        except EngineError as error:
            # A cancel ends the child with an `EngineError` too, and is no fault of the pack.
            raise_if_cancelled(self.cancel)
            return PackLoad(name=pack.name, reason=error.summary()), ()
        loaded = next((each for each in answer.packs if each.name == pack.name), None)
        if loaded is None:
            return PackLoad(name=pack.name, reason="The engine did not load it."), ()
        names = set(loaded.devices)
        return loaded, tuple(device for device in devices_of(answer.devices) if device.id in names)

    def _computing(self, loaded: PackLoad, devices: tuple[Device, ...], environment: Mapping[str, str]) -> PackLoad:
        """Check that the devices of a pack compute correct logits. Return `loaded`, with a `reason` if one does not.

        `loaded`: result of loading the pack.
        `environment`: environment variables that make the child load only this pack.
        """
        checker = Checker(Rig(devices, host_device()), cancel=self.cancel, environment=environment)
        with tempfile.TemporaryDirectory(prefix="layerdeck-pack-") as scratch:
            source = Path(scratch, "source.gguf")
            write_source(source)
            cases = [
                case for device in devices for case in cases_of(device, {_TYPE: source}) if case.feature == "weights"
            ]
            failed = next((checked for checked in checker.run(cases) if _fails(checked)), None)
        if failed is None:
            return loaded
        return replace(loaded, reason=f"{failed.case.devices[0]}: {failed.reason}")

    def _child(self, environment: Mapping[str, str]) -> BlockingChild:
        return BlockingChild(timeout_s=TIMEOUT_S, cancel=self.cancel, name="pack check", environment=environment)


@contextmanager
def _alone(verdict: Verdict) -> Iterator[Mapping[str, str]]:
    """Context manager that yields environment variables; they make a child load only the pack of `verdict`."""
    with tempfile.TemporaryDirectory(prefix="layerdeck-pack-") as scratch:
        # A file with this pack alone and a good verdict on it, because a child loads only packs with a good verdict.
        book = Path(scratch, "packs.json")
        write_book(book, PackBook(verdicts=(replace(verdict, ok=True),)))
        yield {PACKS_VARIABLE: str(book)}


def _fails(checked: Checked) -> bool:
    # A stalled check counts as a failure: not using the pack costs less than every load waiting for it.
    return not checked.ok and (checked.is_known or checked.is_stalled)


def find_packed_devices(
    packs: PackInstaller,
    verdicts: Path,
    rpc_endpoints: Sequence[str] = (),
    *,
    checks: Path | None = None,
) -> Rig:
    """Return the devices of this machine, of engine packs and of RPC endpoints (`find_devices`).

    If the search fails while packs are in use, all packs are checked, and devices are searched again. A pack that
    fails its check, for instance after a driver update, is not loaded any more. Blocks for seconds, and longer if
    packs are checked.

    `verdicts`: file with the results of testing whether a device may be used several times in one layout.
    `rpc_endpoints`: addresses (host:port) of RPC workers.
    `checks`: file with the results of the engine's self-check, None to ignore them.

    Raises:
        ArgumentError: if one of `rpc_endpoints` is not an address host:port, or is listed twice.
        EngineError: if an endpoint does not answer or is busy, or if the child process that lists devices crashes or
            stalls, even without the packs that failed their check.
    """
    try:
        return find_devices(verdicts, rpc_endpoints, checks=checks)
    except (WorkerCrashedError, WorkerStalledError):
        before = read_book(packs.book).in_use(engine_build())
        if not before:
            raise
        packs.check_all()
        if read_book(packs.book).in_use(engine_build()) == before:
            raise
        return find_devices(verdicts, rpc_endpoints, checks=checks)
