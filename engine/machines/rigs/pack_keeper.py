"""Engine packs installed, switched, removed, and checked before anything uses them: in children of their own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.base.cancellation import CancelToken
from engine.base.engine_build import engine_build, engine_version
from engine.base.errors import EngineError, WorkerCrashedError, WorkerStalledError
from engine.devices.device import Device, Rig
from engine.devices.packs.manifest import find_damage
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
from engine.machines.rigs.discovery import devices_of, host_device
from engine.machines.rigs.engine_checks import Checked, Checker, cases_of, how_it_ended, write_source
from engine.runtime.process.questions import Questions, raise_if_cancelled
from engine.runtime.protocol.messages import DeviceList, ListDevices, PackLoad

NO_DEVICE = "No device for it was found: is the card's driver installed?"
TIMEOUT_S = 60.0
"""For a driver of many cards to come up."""
_TYPE = "F16"
"""Weights that are tried: what fails with other types is the business of the engine's check of itself."""


@dataclass(frozen=True, slots=True)
class PackKeeper:
    """Keeps the packs of `store`, and what it finds out about them in the `book`. `argv`: another child than ours."""

    store: PackStore
    book: Path
    cancel: CancelToken | None = None
    argv: Sequence[str] | None = None

    def listed(self) -> tuple[ListedPack, ...]:
        """Return what is there, and whether it is used."""
        return list_packs(self.store, read_book(self.book), engine_build())

    def install(self, archive: Path) -> Verdict:
        """Install the pack in a file, switch it on and check it.

        Raises:
            EngineError: as `PackStore.install`, and as `check`.
        """
        pack = self.store.install(archive, engine_version())
        self._write(read_book(self.book).switched(pack.name, on=True))
        return self.check(pack)

    def remove(self, name: str) -> None:
        """Remove a pack, and what is known of it; raises as `PackStore.remove`."""
        folder = self.store.remove(name)
        self._write(read_book(self.book).without(folder).switched(name, on=True))

    def switch(self, name: str, *, on: bool) -> None:
        """Have a pack used, or not; raises `PackError` where there is none of that name."""
        self._write(read_book(self.book).switched(self.store.pack(name).name, on=on))

    def check_new(self) -> tuple[Verdict, ...]:
        """Check the packs that are switched on and were not checked yet, as they are and with this engine."""
        book = read_book(self.book)
        packs = (pack for pack in self.store.packs() if pack.name not in book.off)
        return tuple(self.check(pack) for pack in packs if book.verdict_on(pack.folder, engine_build()) is None)

    def check_all(self, tell: Callable[[Pack], None] = lambda _pack: None) -> tuple[Verdict, ...]:
        """Check every pack anew; `tell` is told of each before.

        Raises:
            EngineError: after the cancel, or where the book cannot be written.
        """
        found = []
        for pack in self.store.packs():
            tell(pack)
            found.append(self.check(pack))
        return tuple(found)

    def check(self, pack: Pack) -> Verdict:
        """Check one pack, keep the verdict and return it.

        Raises:
            EngineError: after the cancel, or where the book cannot be written.
        """
        verdict = self._judged(pack)
        self._write(read_book(self.book).with_verdict(verdict))
        return verdict

    def _write(self, book: PackBook) -> None:
        write_book(self.book, book)

    def _judged(self, pack: Pack) -> Verdict:
        manifest = pack.manifest
        names = () if manifest is None else manifest.files
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
        if fault := manifest.misfit(engine_version()) or find_damage(pack.folder, manifest):
            return msgspec.structs.replace(verdict, reason=fault)
        with _alone(verdict) as environment:
            loaded, devices = self._loaded(pack, environment)
            if not loaded.reason and devices:
                loaded = self._computing(loaded, devices, environment)
        reason = loaded.reason or ("" if devices else NO_DEVICE)
        return msgspec.structs.replace(verdict, ok=not loaded.reason, reason=reason, devices=loaded.devices)

    def _loaded(self, pack: Pack, environment: Mapping[str, str]) -> tuple[PackLoad, tuple[Device, ...]]:
        try:
            with self._child(environment) as child:
                answer = child.ask(ListDevices(), DeviceList)
        except (WorkerCrashedError, WorkerStalledError) as error:
            return PackLoad(name=pack.name, reason=f"The engine {how_it_ended(error)} when it loads the pack."), ()
        except EngineError as error:
            raise_if_cancelled(self.cancel)
            return PackLoad(name=pack.name, reason=error.summary()), ()
        loaded = next((each for each in answer.packs if each.name == pack.name), None)
        if loaded is None:
            return PackLoad(name=pack.name, reason="The engine did not load it."), ()
        names = set(loaded.devices)
        return loaded, tuple(device for device in devices_of(answer.devices) if device.id in names)

    def _computing(self, loaded: PackLoad, devices: tuple[Device, ...], environment: Mapping[str, str]) -> PackLoad:
        """Return `loaded`, with the reason where a device of the pack computes something else than it should."""
        checker = Checker(Rig(devices, host_device()), self.argv, self.cancel, environment)
        with tempfile.TemporaryDirectory(prefix="layerdeck-pack-") as scratch:
            source = Path(scratch, "source.gguf")
            write_source(source)
            cases = [
                case for device in devices for case in cases_of(device, {_TYPE: source}) if case.feature == "weights"
            ]
            failed = next((checked for checked in checker.run(cases) if _fails(checked)), None)
        if failed is None:
            return loaded
        return msgspec.structs.replace(loaded, reason=f"{failed.case.devices[0]}: {failed.reason}")

    def _child(self, environment: Mapping[str, str]) -> Questions:
        return Questions(
            timeout_s=TIMEOUT_S, argv=self.argv, cancel=self.cancel, name="pack check", environment=environment
        )


@contextmanager
def _alone(verdict: Verdict) -> Iterator[Mapping[str, str]]:
    """Yield the environment of a child that loads this pack and no other."""
    with tempfile.TemporaryDirectory(prefix="layerdeck-pack-") as scratch:
        book = Path(scratch, "packs.json")
        write_book(book, PackBook(verdicts=(msgspec.structs.replace(verdict, ok=True),)))
        yield {PACKS_VARIABLE: str(book)}


def _fails(checked: Checked) -> bool:
    # A pack that is not used costs less than one that every load waits for.
    return not checked.ok and (checked.is_known or checked.is_stalled)
