"""Result of a scan for model files, and the differences between two scans. No header is read.

The scan searches the stores: folders that the user added, and the model folders of other programs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from engine.base.language import tr
from engine.base.values import replace
from engine.library.facts import Facts
from engine.library.names import FileName, Role, parse_name
from engine.library.stores import Store


class FoundFile(Struct, frozen=True, gc=False):
    """A model file on the disk, or a side file such as a projector.

    `name`: file name. In Ollama's store, whose files are named by their hash, the name of the model.
    `title`: name of the repository or folder that the file belongs to, empty if it has none.
    `mtime_ns`: modification time in nanoseconds.
    `device`, `inode`: device and inode numbers of the file itself, after links are followed.
    `store`: the folder of the user, or the model folder of another program, in which the file was found.
    `sha256`: SHA-256 that the file name or manifest in another program's store contains, None if there is none.
    `role`: kind of file (model, projector, adapter, ...) that Ollama's manifest states, None in other stores.
    `beside`: path of the model whose manifest in Ollama's store names this side file, None in other stores.
    `texts`: (kind, path) of further files of the model in the store, such as chat template and manifest.
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
        """Size, modification time (ns) and inode. The header is read again if they change."""
        return self.size_bytes, self.mtime_ns, self.inode

    @property
    def content(self) -> tuple[int, int]:
        """Device and inode numbers of the file. They are equal for all links to one file."""
        return self.device, self.inode

    @property
    def parsed(self) -> FileName:
        """The parts of `name`: base name, quantisation, number of the part, role."""
        return parse_name(self.name)


def found_file(path: Path, state: os.stat_result, store: Store, name: str, title: str) -> FoundFile:
    """Return a `FoundFile` for `path` with its `stat` result.

    `name`, `title`: file name, and name of the repository or folder, as in `FoundFile`.
    """
    return FoundFile(path, store, name, title, state.st_size, state.st_mtime_ns, state.st_dev, state.st_ino)


class Problem(Struct, frozen=True):
    """A folder or file that could not be scanned.

    `sentence`: text for the user that names the folder or file and a remedy.
    """

    store: Store
    sentence: str


class Census(Struct, frozen=True):
    """Result of one scan of `stores`.

    `files`: the model files and side files found.
    `problems`: the folders and files that could not be scanned.
    `folders`: path of each scanned folder with its modification time (ns), for `is_stale`.
    """

    stores: tuple[Store, ...] = ()
    files: tuple[FoundFile, ...] = ()
    problems: tuple[Problem, ...] = ()
    folders: tuple[tuple[str, int], ...] = ()


class Changes(Struct, frozen=True):
    """Differences between two scans: files that were moved or are no longer at their path.

    `moved`: pairs of the file in the earlier scan and the file with the same fingerprint in the later one.
    `removed`: files that are no longer in another program's store.
    `missing`: files that are no longer in a folder of the user. They stay listed until the user removes them.
    """

    moved: tuple[tuple[FoundFile, FoundFile], ...] = ()
    removed: tuple[FoundFile, ...] = ()
    missing: tuple[FoundFile, ...] = ()

    def sentence(self) -> str:
        """Return a text with one sentence for each kind of change; empty if there are no changes."""
        parts = [
            _phrase(
                [tr("{name} was moved to {parent}", name=old.name, parent=new.path.parent) for old, new in self.moved]
            ),
            _phrase(
                [tr("{name} was removed ({store})", name=file.name, store=file.store.words) for file in self.removed]
            ),
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
    """Return the differences between the scans `before` and `after`.

    `facts`: header values of the files in `before` by path; their fingerprints are compared.
    `marks`: fingerprints of the files that are only in `after`, by path.
    """
    there = {file.path for file in after.files}
    # A file is not lost if its store was not scanned this time.
    looked_at = {store.root for store in after.stores}
    lost = [file for file in before.files if file.path not in there and file.store.root in looked_at]
    known = {file.path for file in before.files}
    arrived = {mark: file for file in after.files if file.path not in known and (mark := marks.get(file.path, ""))}
    moved, removed, missing = [], [], []
    for file in lost:
        mark = facts[file.path].fingerprint if file.path in facts else ""
        elsewhere = arrived.get(mark)
        if elsewhere is not None:
            moved.append((file, elsewhere))
        elif file.store.is_ours:
            missing.append(file)
        else:
            removed.append(file)
    return Changes(tuple(moved), tuple(removed), tuple(missing))


def with_missing(after: Census, changes: Changes) -> Census:
    """Return the scan `after` with the files of `changes.missing` added, each marked as missing."""
    return replace(after, files=(*after.files, *(replace(file, is_missing=True) for file in changes.missing)))


def _phrase(sentences: list[str]) -> str:
    if not sentences:
        return ""
    more = tr(", and {count} more", count=len(sentences) - 1) if len(sentences) > 1 else ""
    return f"{sentences[0]}{more}."
