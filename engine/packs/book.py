"""What is known of packs: what their checks found, and which are switched off. Children read it before they load any.

A verdict holds for one pack, one build of the engine and these very files; a child loads nothing without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.errors import PackError
from engine.json_file import read_kept, write_kept

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
