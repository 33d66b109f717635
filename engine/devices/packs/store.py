"""Installed packs: their folders, what checks found, which are switched off, and how people see them.

Packs lie in the user's folder, which they are installed to, and in the program's own. A verdict holds for one pack, one
build of the engine and these very files; a child loads no pack without one.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from engine.base.errors import PackError
from engine.base.json_file import read_kept, write_kept
from engine.base.texts import show
from engine.devices.packs.manifest import MANIFEST, NAME, Manifest, read_manifest, unpack

PACKS_VARIABLE = "LAYERDECK_PACKS"
"""In the environment of children: the path of the book, or `NO_PACKS`."""
NO_PACKS = "off"
VERSION = 1
MAX_BOOK_BYTES = 1 << 20
KEPT_VERDICTS = 64


class FileState(msgspec.Struct, frozen=True):
    """A file as the check saw it, with its hash right."""

    name: str
    size: int
    modified_ns: int


class Verdict(msgspec.Struct, frozen=True):
    """What a check found. `reason`: a sentence where it is not `ok`, or what there is to know where it is."""

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
        """Whether the files are still those that were checked."""
        return file_states(Path(self.folder), (file.name for file in self.files)) == self.files


class PackBook(msgspec.Struct, frozen=True):
    """Verdicts, the newest last, and the names of packs that people switched off."""

    version: int = VERSION
    verdicts: tuple[Verdict, ...] = ()
    off: tuple[str, ...] = ()

    def verdict_on(self, folder: Path, engine: str) -> Verdict | None:
        """Return the verdict on the pack in `folder` as it is now, None where it is yet to be checked."""
        found = (each for each in reversed(self.verdicts) if (each.folder, each.engine) == (str(folder), engine))
        verdict = next(found, None)
        return verdict if verdict is not None and verdict.is_current else None

    def with_verdict(self, verdict: Verdict) -> PackBook:
        """Return the book with a verdict in place of earlier ones on the same pack and engine."""
        same = (verdict.folder, verdict.engine)
        others = [each for each in self.verdicts if (each.folder, each.engine) != same]
        return msgspec.structs.replace(self, verdicts=(*others, verdict)[-KEPT_VERDICTS:])

    def without(self, folder: Path) -> PackBook:
        """Return the book without the pack in `folder`."""
        return msgspec.structs.replace(self, verdicts=tuple(v for v in self.verdicts if v.folder != str(folder)))

    def switched(self, name: str, *, on: bool) -> PackBook:
        """Return the book with a pack switched on or off."""
        others = tuple(each for each in self.off if each != name)
        return msgspec.structs.replace(self, off=others if on else (*others, name))

    def in_use(self, engine: str) -> tuple[Verdict, ...]:
        """Return the verdicts on the packs that a child of this build of the engine is to load."""
        newest = {verdict.name: verdict for verdict in self.verdicts if verdict.engine == engine}
        return tuple(each for each in newest.values() if each.ok and each.name not in self.off and each.is_current)


@dataclass(frozen=True, slots=True)
class PackLibrary:
    """A backend's library that a child is to load."""

    pack: str
    path: Path


def libraries_to_load(environment: Mapping[str, str], engine: Callable[[], str]) -> tuple[PackLibrary, ...]:
    """Return what a child loads by the book that its environment names; `engine` tells which build it is of."""
    named = environment.get(PACKS_VARIABLE, NO_PACKS)
    if named == NO_PACKS:
        return ()
    book = read_book(Path(named))
    verdicts = book.in_use(engine()) if book.verdicts else ()
    return tuple(PackLibrary(each.name, Path(each.folder, each.library)) for each in verdicts)


def file_states(folder: Path, names: Iterable[str]) -> tuple[FileState, ...]:
    """Return the states of files in `folder`, in the order of their names; one that is not there has size -1."""
    states = []
    for name in sorted(names):
        try:
            state = (folder / name).stat(follow_symlinks=False)
        except (OSError, ValueError):
            states.append(FileState(name, -1, 0))
        else:
            states.append(FileState(name, state.st_size, state.st_mtime_ns))
    return tuple(states)


def read_book(path: Path) -> PackBook:
    """Return what was kept; a file that is missing, damaged or of another version holds nothing."""
    book = read_kept(path, PackBook, MAX_BOOK_BYTES)
    return book if book is not None and book.version == VERSION else PackBook()


def write_book(path: Path, book: PackBook) -> None:
    """Keep the book.

    Raises:
        PackError: where it cannot be written.
    """

    def fail(reason: str, *, place: str = "", source: str = "") -> PackError:
        return PackError(": ".join(filter(None, (source, place, reason))))

    write_kept(path, book, what="engine packs", fail=fail)


PackState = Literal["used", "off", "broken", "unchecked"]


@dataclass(frozen=True, slots=True)
class ListedPack:
    """`state`: whether children load it; `reason`: why not, or what there is to know; `ours`: it can be removed."""

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

    @property
    def words(self) -> str:
        """What there is to say about it, on one line."""
        match self.state:
            case "used":
                what = f"In use: {', '.join(self.devices)}" if self.devices else "In use"
            case "off":
                what = "Switched off"
            case "broken":
                what = "Not used"
            case "unchecked":
                what = "Not checked yet"
        return ". ".join(part.removesuffix(".") for part in (what, self.reason, self._needed) if part) + "."

    @property
    def _needed(self) -> str:
        return f"It needs {self.needs}" if self.needs and self.state == "broken" else ""

    def document(self) -> dict[str, object]:
        """Return it for programs."""
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
        }


def list_packs(store: PackStore, book: PackBook, engine: str) -> tuple[ListedPack, ...]:
    """Return the packs that are there, for this build of the engine."""
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
    )


_UNFINISHED = ".installing-"


@dataclass(frozen=True, slots=True)
class Pack:
    """A pack that is there. Without a `manifest` it cannot be used, and `fault` says why; `ours`: the user's."""

    name: str
    folder: Path
    manifest: Manifest | None
    fault: str = ""
    ours: bool = True


@dataclass(frozen=True, slots=True)
class PackStore:
    """`user` is the folder of installed packs; `beside` are further ones, which are read only."""

    user: Path
    beside: Sequence[Path] = ()

    def packs(self) -> tuple[Pack, ...]:
        """Return what is there by name; of two packs of one name the user's counts."""
        found: dict[str, Pack] = {}
        for place in (self.user, *self.beside):
            for folder in _folders(place):
                found.setdefault(folder.name, _pack(folder, ours=place == self.user))
        return tuple(found[name] for name in sorted(found))

    def pack(self, name: str) -> Pack:
        """Return the pack called `name`.

        Raises:
            PackError: where there is none.
        """
        packs = self.packs()
        found = next((pack for pack in packs if pack.name == name), None)
        if found is None:
            there = ", ".join(pack.name for pack in packs) or "none"
            raise PackError(f"No engine pack is called {show(name, 40)}; there are: {there}.")
        return found

    def install(self, archive: Path, engine: str) -> Pack:
        """Install the pack in a .tar.gz for the engine that is here, in place of one of its name: whole or not at all.

        Raises:
            PackError: as `unpack`, and where the folder cannot be written.
        """
        try:
            self.user.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=self.user) as scratch:
                unfinished, before = Path(scratch, "new"), Path(scratch, "before")
                unfinished.mkdir()
                manifest = unpack(archive, unfinished, engine)
                # Written from what was understood: what else the file had in it is not kept.
                (unfinished / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2))
                folder = self.user / manifest.name
                if os.path.lexists(folder):
                    folder.rename(before)
                unfinished.rename(folder)
        except OSError as error:
            raise PackError(f"{archive.name} cannot be installed: {error.strerror or error}.") from None
        return Pack(manifest.name, folder, manifest)

    def remove(self, name: str) -> Path:
        """Remove an installed pack; return the folder that it was in.

        Raises:
            PackError: where it is not there, not the user's, or cannot be removed.
        """
        pack = self.pack(name)
        if not pack.ours:
            raise PackError(f"{name} came with the program and stays; switch it off instead.")
        try:
            if pack.folder.is_symlink():
                pack.folder.unlink()
            else:
                shutil.rmtree(pack.folder)
        except OSError as error:
            raise PackError(f"{name} cannot be removed: {error.strerror or error}.") from None
        return pack.folder


def packs_beside_program() -> tuple[Path, ...]:
    """Return the folders of packs that came with the program: `packs` beside the bundle's executable."""
    return (Path(sys.executable).parent / "packs",) if getattr(sys, "frozen", False) else ()


def _folders(place: Path) -> list[Path]:
    try:
        with os.scandir(place) as entries:
            return sorted(Path(entry.path) for entry in entries if NAME.fullmatch(entry.name) and entry.is_dir())
    except OSError:
        return []


def _pack(folder: Path, *, ours: bool) -> Pack:
    try:
        manifest = read_manifest(folder)
        if manifest.name != folder.name:
            raise PackError(f'It calls itself "{manifest.name}" and lies in a folder of another name.')
    except PackError as error:
        return Pack(folder.name, folder, None, error.summary(), ours)
    return Pack(folder.name, folder, manifest, "", ours)
