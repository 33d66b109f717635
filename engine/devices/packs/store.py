"""Engine packs on this computer: their folders, their self-test results, and which of them are switched off.

An engine pack is a backend of llama.cpp that can be installed as files.

Installed packs are in the user's folder; packs that came with the program are in the program's folder. The self-test
loads a pack in a child process. Its result (`Verdict`) holds for one pack, one build of the engine and unchanged files.
A child loads only packs that passed the self-test.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from engine.base.errors import PackError
from engine.base.files import locked
from engine.base.json_file import read_struct, write_struct
from engine.base.texts import show
from engine.base.values import replace
from engine.devices.packs.manifest import MANIFEST, NAME, Manifest, read_archive_manifest, read_manifest, unpack
from engine.devices.packs.signing import UNSIGNED, Maker, PackKeys

PACKS_VARIABLE = "LAYERDECK_PACKS"
"""Environment variable of children: path of the file with the self-test results of engine packs, or `NO_PACKS`."""
NO_PACKS = "off"
VERSION = 1
MAX_BOOK_BYTES = 1 << 20
MAX_VERDICTS = 64


class FileState(Struct, frozen=True):
    """Size, times and inode of a file when its hash was checked. `size`: in bytes; -1: the file is missing.

    At its start, a child compares these values to find changed files, because hashing would read up to 4 GiB. A program
    that changes a file can reset the modification time, but not ctime (`changed_ns`). If it replaces the file, the
    inode changes. On Windows `changed_ns` is the time of creation, which a change does not alter.
    """

    name: str
    size: int
    modified_ns: int
    changed_ns: int = 0
    inode: int = 0
    device: int = 0


class Verdict(Struct, frozen=True):
    """The result of the self-test of an engine pack (an installable llama.cpp backend): a child process loads it.

    `engine`: build of the engine that loaded the pack.
    `library`: file of the backend library.
    `files`: size, times and inode of the pack's files at the self-test.
    `ok`: whether the pack passed.
    `reason`: a sentence: the failure, or a remark if the pack passed; may be empty.
    `devices`: devices that the pack's backend found.
    """

    name: str
    folder: str
    engine: str
    library: str
    files: tuple[FileState, ...]
    ok: bool
    reason: str = ""
    devices: tuple[str, ...] = ()

    @property
    def is_current(self) -> bool:
        """Whether the files of the engine pack (an installable llama.cpp backend) are unchanged since the self-test."""
        return file_states(Path(self.folder), (file.name for file in self.files)) == self.files


class PackBook(Struct, frozen=True):
    """Content of the file with the self-test results of engine packs (installable llama.cpp backends).

    `verdicts`: the results, newest last. `off`: names of packs that the user switched off.
    """

    version: int = VERSION
    verdicts: tuple[Verdict, ...] = ()
    off: tuple[str, ...] = ()

    def verdict_on(self, folder: Path, engine: str) -> Verdict | None:
        """Return the self-test result of the engine pack (an installable llama.cpp backend) in `folder`.

        None if there is no result for this build of the engine, or if the files have changed since the self-test.
        """
        found = (each for each in reversed(self.verdicts) if (each.folder, each.engine) == (str(folder), engine))
        verdict = next(found, None)
        return verdict if verdict is not None and verdict.is_current else None

    def with_verdict(self, verdict: Verdict) -> PackBook:
        """Return a copy in which the self-test result `verdict` replaces earlier ones of the same engine pack.

        An engine pack is an installable llama.cpp backend. Only results with the same build of the engine are replaced.
        """
        same = (verdict.folder, verdict.engine)
        others = [each for each in self.verdicts if (each.folder, each.engine) != same]
        return replace(self, verdicts=(*others, verdict)[-MAX_VERDICTS:])

    def without(self, folder: Path) -> PackBook:
        """Return a copy without the self-test results of the engine pack (a llama.cpp backend) in `folder`."""
        return replace(self, verdicts=tuple(v for v in self.verdicts if v.folder != str(folder)))

    def switched(self, name: str, *, on: bool) -> PackBook:
        """Return a copy in which the engine pack (an installable llama.cpp backend) `name` is switched on or off."""
        others = tuple(each for each in self.off if each != name)
        return replace(self, off=others if on else (*others, name))

    def in_use(self, engine: str) -> tuple[Verdict, ...]:
        """Return the self-test results of the engine packs (llama.cpp backends) that a child process loads.

        These packs passed the self-test, are unchanged since then, and are not switched off.

        `engine`: build of the engine that the child uses.
        """
        # Verdicts are in the order of their checks, so the last one of a name counts.
        newest = {verdict.name: verdict for verdict in self.verdicts if verdict.engine == engine}
        return tuple(each for each in newest.values() if each.ok and each.name not in self.off and each.is_current)


class PackLibrary(Struct, frozen=True):
    """A library with a llama.cpp backend that a child process loads.

    `pack`: name of the engine pack that contains the library.
    """

    pack: str
    path: Path


def libraries_to_load(environment: Mapping[str, str], engine: Callable[[], str]) -> tuple[PackLibrary, ...]:
    """Return the libraries of engine packs (installable llama.cpp backends) that a child process must load.

    `environment`: the child's environment; `PACKS_VARIABLE` has the path of the file with the self-test results.
    `engine`: returns the build of the engine; called only if there are results.
    """
    named = environment.get(PACKS_VARIABLE, NO_PACKS)
    if named == NO_PACKS:
        return ()
    book = read_book(Path(named))
    # The build is a digest of installed files, so it is only computed if there is a verdict to compare.
    verdicts = book.in_use(engine()) if book.verdicts else ()
    return tuple(PackLibrary(each.name, Path(each.folder, each.library)) for each in verdicts)


def file_states(folder: Path, names: Iterable[str]) -> tuple[FileState, ...]:
    """Return size, times and inode of the named files in `folder`, sorted by name. A missing file has the size -1."""
    states = []
    # Sorted, because the states of two checks are compared as a whole.
    for name in sorted(names):
        try:
            state = (folder / name).stat(follow_symlinks=False)
        except (OSError, ValueError):
            states.append(FileState(name, -1, 0))
        else:
            # `st_ctime` is the time of creation on Windows, and stays as it is there.
            times = state.st_mtime_ns, state.st_ctime_ns
            states.append(FileState(name, state.st_size, *times, state.st_ino, state.st_dev))
    return tuple(states)


def read_book(path: Path) -> PackBook:
    """Return the saved self-test results of engine packs (installable llama.cpp backends).

    The result is empty if the file is missing, damaged or of another version.
    """
    return read_struct(path, PackBook, MAX_BOOK_BYTES, version=VERSION) or PackBook()


def write_book(path: Path, book: PackBook) -> None:
    """Write `book` to the file `path`: self-test results of engine packs (installable llama.cpp backends).

    Raises:
        PackError: the file cannot be written.
    """

    def fail(reason: str, *, location: str = "", source: str = "") -> PackError:
        return PackError(": ".join(filter(None, (source, location, reason))))

    write_struct(path, book, what="engine packs", fail=fail)


PackState = Literal["used", "off", "broken", "unchecked"]


class ListedPack(Struct, frozen=True):
    """State and remarks of one engine pack (an installable llama.cpp backend), to be shown in a list.

    `state`: `used` by children, switched `off`, `broken`, or `unchecked`.
    `reason`: why the pack is not used, or a remark; may be empty.
    `devices`: devices that the pack's backend found.
    `needs`: remark on the pack's requirements.
    `ours`: whether the pack is in the user's folder and can be removed.
    `maker`: who signed the pack.
    """

    name: str
    backend: str
    engine: str
    folder: str
    size_bytes: int
    state: PackState
    reason: str
    devices: tuple[str, ...]
    needs: str
    ours: bool
    maker: Maker = UNSIGNED

    @property
    def words(self) -> str:
        """State and remarks of the engine pack (an installable llama.cpp backend) on one line."""
        match self.state:
            case "used":
                what = f"In use: {', '.join(self.devices)}" if self.devices else "In use"
            case "off":
                what = "Turned off"
            case "broken":
                what = "Not used"
            case "unchecked":
                what = "Not checked yet"
        # As long as it may be loaded, everyone is told that nobody vouches for it.
        warning = "" if self.state in ("off", "broken") or self.maker.is_trusted else self.maker.words
        parts = (what, self.reason, self._needed, warning)
        return ". ".join(part.removesuffix(".") for part in parts if part) + "."

    @property
    def _needed(self) -> str:
        return f"It needs {self.needs}" if self.needs and self.state == "broken" else ""

    def document(self) -> dict[str, object]:
        """Return the name, state and remarks of the engine pack (an installable llama.cpp backend) as JSON values."""
        return {
            "name": self.name,
            "backend": self.backend,
            "engine": self.engine,
            "folder": self.folder,
            "size_bytes": self.size_bytes,
            "state": self.state,
            "reason": self.reason,
            "devices": list(self.devices),
            "removable": self.ours,
            "maker": {"kind": self.maker.kind, "key": self.maker.key, "name": self.maker.name},
        }


def list_packs(store: PackStore, book: PackBook, engine: str) -> tuple[ListedPack, ...]:
    """Return the state of each engine pack (an installable llama.cpp backend) that `store` finds.

    `book`: self-test results of the packs.
    `engine`: build of the engine that would load the packs.
    """
    return tuple(_listed(pack, book, engine) for pack in store.packs())


def _listed(pack: Pack, book: PackBook, engine: str) -> ListedPack:
    manifest, verdict = pack.manifest, book.verdict_on(pack.folder, engine)
    state: PackState = "unchecked"
    if pack.name in book.off:
        state = "off"
    elif manifest is None or (verdict is not None and not verdict.ok):
        state = "broken"
    elif verdict is not None:
        state = "used"
    return ListedPack(
        name=pack.name,
        backend="" if manifest is None else show(manifest.backend, 40),
        engine="" if manifest is None else show(manifest.engine, 60),
        folder=str(pack.folder),
        size_bytes=0 if manifest is None else manifest.total_bytes,
        state=state,
        reason=pack.fault if verdict is None else verdict.reason,
        devices=() if verdict is None else verdict.devices,
        needs="" if manifest is None else show(manifest.needs.words),
        ours=pack.ours,
        maker=pack.maker,
    )


_UNFINISHED = ".installing-"
_REPLACED = "replaced"
"""Folders of an installation: prefix of its temporary folder, and the folder in it that holds the old pack."""


class Pack(Struct, frozen=True):
    """An engine pack (an installable llama.cpp backend) on the disk.

    `manifest`: the pack's manifest; None: the pack cannot be used.
    `fault`: why the pack cannot be used; empty: it can be used.
    `ours`: whether the pack is in the user's folder and can be removed.
    `maker`: who signed the pack.
    """

    name: str
    folder: Path
    manifest: Manifest | None
    fault: str = ""
    ours: bool = True
    maker: Maker = UNSIGNED


class PackStore(Struct, frozen=True):
    """Finds, installs and removes engine packs (installable llama.cpp backends).

    `user`: folder of installed packs.
    `read_only`: further folders with packs; they are only read.
    `keys`: known keys for the signatures of packs; None: no key is known.
    """

    user: Path
    read_only: Sequence[Path] = ()
    keys: PackKeys | None = None

    def packs(self) -> tuple[Pack, ...]:
        """Return all engine packs (installable llama.cpp backends), sorted by name.

        Of two packs with the same name, the pack in the user's folder is returned.
        """
        found: dict[str, Pack] = {}
        for parent in (self.user, *self.read_only):
            for folder in _folders(parent):
                found.setdefault(folder.name, self._pack(folder, ours=parent == self.user))
        return tuple(found[name] for name in sorted(found))

    def pack(self, name: str) -> Pack:
        """Return the engine pack (an installable llama.cpp backend) called `name`.

        Raises:
            PackError: if there is no such pack.
        """
        packs = self.packs()
        found = next((pack for pack in packs if pack.name == name), None)
        if found is None:
            there = ", ".join(pack.name for pack in packs) or "none"
            raise PackError(f"There is no engine pack {show(name, 40)}; there are: {there}.")
        return found

    def read_archive(self, archive: Path) -> tuple[Manifest, Maker]:
        """Return the manifest of the engine pack (an installable llama.cpp backend) in an archive, and who signed it.

        Raises:
            PackError: if the archive is not a pack, or its signature is wrong.
        """
        manifest = read_archive_manifest(archive)
        return manifest, self._maker(manifest)

    def _maker(self, manifest: Manifest) -> Maker:
        keys = self.keys or PackKeys(self.user / ".no-key", self.user / ".no-keys")
        return keys.maker(manifest)

    def _pack(self, folder: Path, *, ours: bool) -> Pack:
        try:
            manifest = read_manifest(folder)
            if manifest.name != folder.name:
                raise PackError(f'The pack is named "{manifest.name}", but its folder has another name.')
            maker = self._maker(manifest) if ours else Maker("program")
        except PackError as error:
            return Pack(folder.name, folder, None, error.summary(), ours)
        return Pack(folder.name, folder, manifest, "", ours, maker)

    def install(self, archive: Path, engine: str, agreed: Manifest | None = None) -> Pack:
        """Install the engine pack (an installable llama.cpp backend) in a .tar.gz; replace a pack of the same name.

        If the installation fails or is interrupted, the old pack stays installed. Only one process installs at a time,
        except on Windows, where nothing is locked.

        `agreed`: the manifest of the pack that the user agreed to install; None: any pack is installed.

        Raises:
            PackError: the archive is not a pack, is damaged, is for another engine or computer, or has a wrong
                signature; it is not the `agreed` one; or the folder cannot be written.
        """
        try:
            self.user.mkdir(parents=True, exist_ok=True)
            with locked(self.user.with_name(f"{self.user.name}-installing")):
                _remove_unfinished(self.user)
                return self._unpack(archive, engine, agreed)
        except OSError as error:
            raise PackError(f"{archive.name} cannot be installed: {error.strerror or error}.") from None

    def _unpack(self, archive: Path, engine: str, agreed: Manifest | None) -> Pack:
        # Inside of the folder of packs, since a rename cannot cross file systems.
        with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=self.user) as scratch:
            unfinished, replaced = Path(scratch, "new"), Path(scratch, _REPLACED)
            unfinished.mkdir()
            replaced.mkdir()
            manifest = unpack(archive, unfinished, engine)
            maker = self._maker(manifest)
            # The question may have stood for minutes, in which the file was replaced.
            if agreed not in (None, manifest):
                raise PackError(f"{archive.name} was replaced by another pack meanwhile. Install it again.")
            # Written from what was understood: what else the file had in it is not kept.
            (unfinished / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2))
            folder = self.user / manifest.name
            try:
                # The old pack goes with the scratch folder. `lexists` also sees a broken link.
                if os.path.lexists(folder):
                    folder.rename(replaced / folder.name)
                unfinished.rename(folder)
            finally:
                _restore(replaced, self.user)
        return Pack(manifest.name, folder, manifest, maker=maker)

    def remove(self, name: str) -> Path:
        """Remove the engine pack (an installable llama.cpp backend) called `name`; return the path of its folder.

        If the folder is a link, only the link is removed.

        Raises:
            PackError: no pack has this name, the pack came with the program, or its folder cannot be removed.
        """
        pack = self.pack(name)
        if not pack.ours:
            raise PackError(f"{name} came with the program and cannot be removed; turn it off instead.")
        try:
            # Only the link goes: the folder behind it was not installed by us.
            if pack.folder.is_symlink():
                pack.folder.unlink()
            else:
                shutil.rmtree(pack.folder)
        except OSError as error:
            raise PackError(f"{name} cannot be removed: {error.strerror or error}.") from None
        return pack.folder


def bundled_packs() -> tuple[Path, ...]:
    """Return the folder of the engine packs (llama.cpp backends) that came with the program.

    It is the folder `packs` next to the bundled executable.
    Empty if the program is not bundled.
    """
    return (Path(sys.executable).parent / "packs",) if getattr(sys, "frozen", False) else ()


def _restore(replaced: Path, user: Path) -> None:
    """Move engine packs (llama.cpp backends) back to the folder `user` after an installation that did not finish.

    `replaced`: folder into which the installation moved the old packs. A pack stays there if `user` has a new pack of
    the same name.
    """
    for pack in replaced.iterdir() if replaced.is_dir() else ():
        if not os.path.lexists(user / pack.name):
            pack.rename(user / pack.name)


def _remove_unfinished(user: Path) -> None:
    """Remove the temporary folders of interrupted installations of engine packs (llama.cpp backends).

    Before that, move the old packs in these folders back to the folder `user`.
    """
    if os.name == "nt":
        # Nothing is locked there, so an installation may still run.
        return
    for scratch in user.glob(f"{_UNFINISHED}*"):
        _restore(scratch / _REPLACED, user)
        shutil.rmtree(scratch, ignore_errors=True)


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            # Unfinished installations begin with a dot, which no name of a pack does.
            return sorted(Path(entry.path) for entry in entries if NAME.fullmatch(entry.name) and entry.is_dir())
    except OSError:
        return []
