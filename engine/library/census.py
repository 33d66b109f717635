"""The result of a scan: the files found, before any header is read, and the differences to the previous scan."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from engine.base.language import tr
from engine.library.facts import Facts
from engine.library.names import FileName, Role, parse_name
from engine.library.stores import Store


class FoundFile(msgspec.Struct, frozen=True, gc=False):
    """A model file, or a file that belongs to one.

    `name`: the file's own name. In stores with numbered blobs, the name of the model.
    `title`: name of the repository or folder that the file belongs to, empty if it has none.
    `device`, `inode`: those of the file itself, after links are followed.
    `sha256`: the hash that the store states, else None.
    `role`: the role that the store states, else None.
    `beside`: the model that the store lists the file with, else None.
    `texts`: kinds and paths of texts that the store has for the model, such as its template.
    `is_missing`: whether an earlier scan found the file and the last one did not.
    """

    path: Path
    store: Store
    name: str
    title: str
    size_bytes: int
    mtime_ns: int
    device: int
    inode: int
    sha256: str | None = None
    role: Role | None = None
    beside: Path | None = None
    texts: tuple[tuple[str, Path], ...] = ()
    is_missing: bool = False

    @property
    def state(self) -> tuple[int, int, int]:
        """Size, modification time (ns) and inode. A change means that the file has to be read again."""
        return self.size_bytes, self.mtime_ns, self.inode

    @property
    def content(self) -> tuple[int, int]:
        """Device and inode, which are equal for all links to one file."""
        return self.device, self.inode

    @property
    def parsed(self) -> FileName:
        """The parts of the name."""
        return parse_name(self.name)


def found_file(path: Path, state: os.stat_result, store: Store, name: str, title: str) -> FoundFile:
    """Return a `FoundFile` for `path` with the given `stat` result."""
    return FoundFile(path, store, name, title, state.st_size, state.st_mtime_ns, state.st_dev, state.st_ino)


@dataclass(frozen=True, slots=True)
class Problem:
    """A folder or file that could not be scanned. `sentence` names it and says what to do."""

    store: Store
    sentence: str


@dataclass(frozen=True, slots=True)
class Census:
    """Result of one scan of `stores`.

    `folders`: each scanned folder with its modification time (ns), for `is_stale`.
    """

    stores: tuple[Store, ...] = ()
    files: tuple[FoundFile, ...] = ()
    problems: tuple[Problem, ...] = ()
    folders: tuple[tuple[str, int], ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Changes:
    """Differences between two scans.

    `moved`: pairs of the old file and the new one with the same content.
    `gone`: files that are no longer in another program's store.
    `missing`: files that are no longer in a folder of the user. They stay listed until the user removes them.
    """

    moved: tuple[tuple[FoundFile, FoundFile], ...] = ()
    gone: tuple[FoundFile, ...] = ()
    missing: tuple[FoundFile, ...] = ()

    def sentence(self) -> str:
        """Return one sentence about the changes; empty if there are none."""
        parts = [
            _phrase(
                [tr("{name} was moved to {parent}", name=old.name, parent=new.path.parent) for old, new in self.moved]
            ),
            _phrase([tr("{name} is gone ({words})", name=file.name, words=file.store.words) for file in self.gone]),
            _phrase(
                [
                    tr("{name} is no longer in {parent}", name=file.name, parent=file.path.parent)
                    for file in self.missing
                    if not file.is_missing
                ]
            ),
        ]
        return " ".join(part for part in parts if part)


def compare(before: Census, after: Census, facts: Mapping[Path, Facts], marks: Mapping[Path, str]) -> Changes:
    """Return the differences between two scans. `marks`: fingerprints of new files, by path."""
    there = {file.path for file in after.files}
    looked_at = {store.root for store in after.stores}
    lost = [file for file in before.files if file.path not in there and file.store.root in looked_at]
    known = {file.path for file in before.files}
    arrived = {mark: file for file in after.files if file.path not in known and (mark := marks.get(file.path, ""))}
    moved, gone, missing = [], [], []
    for file in lost:
        mark = facts[file.path].fingerprint if file.path in facts else ""
        elsewhere = arrived.get(mark)
        if elsewhere is not None:
            moved.append((file, elsewhere))
        elif file.store.is_ours:
            missing.append(file)
        else:
            gone.append(file)
    return Changes(tuple(moved), tuple(gone), tuple(missing))


def with_missing(after: Census, changes: Changes) -> Census:
    """Return the scan `after` with the missing files added."""
    return replace(
        after, files=(*after.files, *(msgspec.structs.replace(file, is_missing=True) for file in changes.missing))
    )


def _phrase(sentences: list[str]) -> str:
    if not sentences:
        return ""
    more = tr(", and {count} more", count=len(sentences) - 1) if len(sentences) > 1 else ""
    return f"{sentences[0]}{more}."
