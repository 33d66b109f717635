"""What a look at the stores found: files as they lie on disk, nothing read from them yet.

Values of which a library has thousands are structs that the collector of cycles does not look at (`gc=False`): going
through them would hold up the window for as long as drawing ten frames, and frozen values make no cycles.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

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
