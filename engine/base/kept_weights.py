"""The folder in which an RPC worker keeps weights that clients have sent it, so that they are sent once.

llama.cpp's server writes a file there for each tensor of more than 10 MiB, named after a hash of its bytes, and takes
what is there for whole: it looks at no sum again. So this module says what is whole. A file counts once it had one
size in two looks, was forced to the disk, and the disk had room meanwhile; the list of those is a file beside them, and
whatever is not on it goes before the next worker starts. What was used least lately goes where there is too much.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from engine.base.errors import EngineError
from engine.base.files import read_at_most, write_whole
from engine.base.json_file import UNREADABLE
from engine.base.units import GIB

DEFAULT_QUOTA_BYTES = 20 * GIB
RESERVE_BYTES = GIB
"""What stays free on the disk."""
LOOK_S = 1.0
"""Between looks: what a client may send in this time is how far it can get beyond the quota."""
_NAME = re.compile(r"[0-9a-f]{16}", re.ASCII)
_LIST = "whole.json"
_MAX_LIST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class KeptFile:
    """One tensor's weights; `used_s` is when it was written or, as far as the system notes that, read."""

    path: Path
    size_bytes: int
    used_s: float


def kept_files(folder: Path) -> tuple[KeptFile, ...]:
    """Return what is kept in `folder` and the folders in it, one for each worker; nothing where there is none.

    Only what has the name of such a file is, whatever else lies there.
    """
    return tuple(_files(folder)) + tuple(file for each in _folders(folder) for file in _files(each))


def kept_bytes(folder: Path) -> int:
    """Return how much is kept in `folder` and the folders in it."""
    return sum(file.size_bytes for file in kept_files(folder))


def empty(folder: Path) -> int:
    """Remove what is kept and return its bytes. A worker that runs goes on, and is sent weights anew."""
    freed_bytes = 0
    for file in kept_files(folder):
        with suppress(OSError):
            file.path.unlink()
            freed_bytes += file.size_bytes
    return freed_bytes


@dataclass(slots=True)
class WeightKeeper:
    """Keeps the folder of one worker whole and within a quota. `begin` before the worker starts, then `look` often."""

    folder: Path
    quota_bytes: int
    reserve_bytes: int = RESERVE_BYTES
    _whole: dict[str, int] = field(default_factory=dict)
    _seen: dict[str, int] = field(default_factory=dict)

    def begin(self) -> None:
        """Remove what is not known to be whole: what a worker wrote as it ended, or as the disk was full.

        Raises:
            EngineError: where the folder cannot be used.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EngineError(f"Weights cannot be kept in {self.folder}: {error.strerror or error}.") from None
        listed = _read_list(self.folder / _LIST)
        for file in _files(self.folder):
            if listed.get(file.path.name) == file.size_bytes:
                self._whole[file.path.name] = file.size_bytes
            else:
                _remove(file.path)
        self._trim()
        self._write_list()

    def look(self) -> None:
        """Note what has become whole, and remove what is too much."""
        sizes = {file.path.name: file.size_bytes for file in _files(self.folder)}
        whole = {name: size for name, size in self._whole.items() if sizes.get(name) == size}
        if not self._has_room():
            # What was written without room may be cut off.
            for name in sizes.keys() - whole.keys():
                _remove(self.folder / name)
        else:
            settled = (name for name, size in sizes.items() if name not in whole and self._seen.get(name) == size)
            whole |= {name: sizes[name] for name in settled if _is_on_disk(self.folder / name)}
        self._seen = sizes
        changed, self._whole = whole != self._whole, whole
        if self._trim() or changed:
            self._write_list()

    def _trim(self) -> bool:
        """Remove what was used least lately until quota and disk have room; return whether anything had to go."""
        files = sorted(_files(self.folder), key=lambda file: file.used_s)
        too_many_bytes = sum(file.size_bytes for file in files) - self.quota_bytes
        too_many_bytes = max(too_many_bytes, self.reserve_bytes - _free_bytes(self.folder))
        removed = False
        for file in files:
            if too_many_bytes <= 0:
                break
            _remove(file.path)
            self._whole.pop(file.path.name, None)
            too_many_bytes -= file.size_bytes
            removed = True
        return removed

    def _has_room(self) -> bool:
        return _free_bytes(self.folder) >= self.reserve_bytes // 2

    def _write_list(self) -> None:
        # Without a list the files go at the next start, which costs time and nothing else.
        with suppress(OSError):
            write_whole(self.folder / _LIST, msgspec.json.encode(self._whole))


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []


def _files(folder: Path) -> Iterator[KeptFile]:
    try:
        with os.scandir(folder) as entries:
            found = [entry for entry in entries if _NAME.fullmatch(entry.name)]
    except OSError:
        return
    for entry in found:
        with suppress(OSError):  # gone by now
            if entry.is_file(follow_symlinks=False):
                state = entry.stat(follow_symlinks=False)
                yield KeptFile(Path(entry.path), state.st_size, max(state.st_mtime, state.st_atime))


def _read_list(path: Path) -> dict[str, int]:
    try:
        return msgspec.json.decode(read_at_most(path, _MAX_LIST_BYTES), type=dict[str, int])
    except (OSError, ValueError, *UNREADABLE):
        return {}


def _free_bytes(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def _is_on_disk(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    except OSError:
        return False
    return True


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
