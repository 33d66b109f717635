"""The result of a scan: the files found, nothing read from them yet, and the differences to the scan before."""

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
    """A file of a model.

    `name` is what people know it by: its own name, or the model's in a store whose files are named by numbers.
    `title` names the repository or folder that it belongs to, empty where that says nothing. `device` and `inode` are
    those of the file itself, whatever links lead to it. `sha256` where the store tells it. `role` where the store
    tells it, else None. `beside`: the model that the store has it for. `texts`: template, parameters and the like.
    `is_missing`: it was there at an earlier look.
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
        """What tells whether the file is as it was read: size, time of change (ns) and inode."""
        return self.size_bytes, self.mtime_ns, self.inode

    @property
    def content(self) -> tuple[int, int]:
        """Device and inode: the same for all links to one file."""
        return self.device, self.inode

    @property
    def parsed(self) -> FileName:
        """The name taken apart."""
        return parse_name(self.name)


def found_file(path: Path, state: os.stat_result, store: Store, name: str, title: str) -> FoundFile:
    """Return the file at `path` as a look found it."""
    return FoundFile(path, store, name, title, state.st_size, state.st_mtime_ns, state.st_dev, state.st_ino)


@dataclass(frozen=True, slots=True)
class Problem:
    """A place that could not be looked into, or something in it: `sentence` names it and what to do."""

    store: Store
    sentence: str


@dataclass(frozen=True, slots=True)
class Census:
    """One look at `stores`. `folders` are those looked into, with their times of change (ns): see `is_stale`."""

    stores: tuple[Store, ...] = ()
    files: tuple[FoundFile, ...] = ()
    problems: tuple[Problem, ...] = ()
    folders: tuple[tuple[str, int], ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Changes:
    """`moved`: from where to where. `gone`: what is no longer in other programs' stores. `missing`: what people put
    in a folder and is not there any more; it stays listed until they forget it."""

    moved: tuple[tuple[FoundFile, FoundFile], ...] = ()
    gone: tuple[FoundFile, ...] = ()
    missing: tuple[FoundFile, ...] = ()

    def sentence(self) -> str:
        """Return what to tell of it, empty where there is nothing."""
        parts = [
            _phrase(
                [tr("{name} is in {parent} now", name=old.name, parent=new.path.parent) for old, new in self.moved]
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
    """Return what became of the files of `before`. `marks`: fingerprints of new files, where they were read."""
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
    """Return a look at the stores with what is missing still listed."""
    return replace(
        after, files=(*after.files, *(msgspec.structs.replace(file, is_missing=True) for file in changes.missing))
    )


def _phrase(sentences: list[str]) -> str:
    if not sentences:
        return ""
    more = tr(", and {count} more", count=len(sentences) - 1) if len(sentences) > 1 else ""
    return f"{sentences[0]}{more}."
