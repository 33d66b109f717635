"""The cache folder of an RPC worker: tensors that clients have sent, so that each is sent only once.

llama.cpp's RPC server writes one file for each tensor of more than 10 MiB, named after a hash of its bytes. It never
checks the hash again when it reads a file. So this module records which files are complete: a file is complete if its
size was equal in two scans, it was synced to disk, and the disk was not full meanwhile. The list of complete files is
stored in the folder. All other files are removed before the worker starts.

If the folder exceeds its quota, the least recently used files are removed. Files that the present client has used or
stored are removed last: each load of a model asks for every tensor once, in the same order. So if the quota is smaller
than the model, removing the least recently used file would remove every file just before its next use.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from math import inf
from pathlib import Path

import msgspec
from msgspec import Struct, field

from engine.base.errors import EngineError
from engine.base.files import read_at_most, write_whole
from engine.base.json_file import UNREADABLE
from engine.base.units import GIB

WEIGHT_CACHE_QUOTA_BYTES = 20 * GIB
RESERVE_BYTES = GIB
"""Bytes that the cache leaves free on the disk."""
LOOK_S = 1.0
"""Seconds between two scans of the folder. The quota can be exceeded by the bytes that a client sends in this time."""
_NAME = re.compile(r"[0-9a-f]{16}", re.ASCII)
_LIST = "whole.json"
_MAX_LIST_BYTES = 16 << 20


class CachedFile(Struct, frozen=True):
    """The file of a cached tensor.

    `written_s`: time of the last write. `used_s`: time of the last read or write; reads count only if the file system
    records them.
    """

    path: Path
    size_bytes: int
    written_s: float
    used_s: float


def cached_files(folder: Path) -> tuple[CachedFile, ...]:
    """Return the files of cached tensors in `folder` and its subfolders (one for each worker).

    Empty if the folder does not exist. Other files in these folders are ignored.
    """
    return tuple(_files(folder)) + tuple(file for each in _folders(folder) for file in _files(each))


def kept_bytes(folder: Path) -> int:
    """Return the bytes of all cached tensors in `folder` and its subfolders."""
    return sum(file.size_bytes for file in cached_files(folder))


def empty(folder: Path) -> int:
    """Remove all cached tensors, and return their total bytes.

    Running workers continue; clients send the tensors again.
    """
    freed_bytes = 0
    for file in cached_files(folder):
        with suppress(OSError):
            file.path.unlink()
            freed_bytes += file.size_bytes
    return freed_bytes


class WeightCacheTrimmer(Struct):
    """Limits one worker's cache folder to a quota, and records which files are complete.

    Call `begin` before the worker starts, then `look` every `LOOK_S` seconds.
    `reserve_bytes`: free space to leave on the disk.
    `clock`: returns the present time in seconds since 1970, the unit of file times.
    """

    folder: Path
    quota_bytes: int
    reserve_bytes: int = RESERVE_BYTES
    clock: Callable[[], float] = time.time
    _whole: dict[str, int] = field(default_factory=dict)
    _seen: dict[str, int] = field(default_factory=dict)
    _client: str = ""
    _client_since_s: float = inf
    """Earliest time at which the present or, if none, the last client can have connected; infinite before the first.

    It is the time of the last scan in which this client was not connected yet.
    """
    _looked_s: float = 0.0

    def begin(self) -> None:
        """Remove the files that are not recorded as complete. Call it before the worker starts.

        The end of the previous worker or a full disk may have interrupted the writing of these files.

        Raises:
            EngineError: the folder cannot be used.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EngineError(f"Weights cannot be cached in {self.folder}: {error.strerror or error}.") from None
        listed = _read_list(self.folder / _LIST)
        for file in _files(self.folder):
            # A size that differs from the list means a file that was written again and perhaps not finished.
            if listed.get(file.path.name) == file.size_bytes:
                self._whole[file.path.name] = file.size_bytes
            else:
                _remove(file.path)
        self._trim()
        self._write_list()
        self._looked_s = self.clock()
        _record_next_reads(self.folder)

    def look(self, client: str = "") -> None:
        """Scan the folder: record the files that have become complete, and remove files beyond the quota.

        `client`: text that identifies the connection of the present client; a new connection has another text. Empty
        if no client is connected, or if that is unknown.
        """
        self._note_client(client)
        sizes = {file.path.name: file.size_bytes for file in _files(self.folder)}
        whole = {name: size for name, size in self._whole.items() if sizes.get(name) == size}
        if not self._has_room():
            # What was written without room may be cut off.
            for name in sizes.keys() - whole.keys():
                _remove(self.folder / name)
        else:
            # The same size in two scans: the server has stopped writing it.
            settled = (name for name, size in sizes.items() if name not in whole and self._seen.get(name) == size)
            whole |= {name: sizes[name] for name in settled if _is_on_disk(self.folder / name)}
        self._seen = sizes
        changed, self._whole = whole != self._whole, whole
        if self._trim() or changed:
            self._write_list()

    def _note_client(self, client: str) -> None:
        if client != self._client:
            if client:
                # It was not connected at the last look.
                self._client_since_s = self._looked_s
            self._client = client
            _record_next_reads(self.folder)
        self._looked_s = self.clock()

    def _trim(self) -> bool:
        """Remove files until the folder is within its quota and the disk has enough free space.

        Return whether any file was removed.
        """
        files = sorted(_files(self.folder), key=self._removal_order)
        too_many_bytes = sum(file.size_bytes for file in files) - self.quota_bytes
        # Removed files help quota and reserve alike, so the larger excess decides.
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

    def _removal_order(self, file: CachedFile) -> tuple[bool, float]:
        """Return the sort key of a cached tensor's file for removal; the file with the smallest key is removed first.

        Files that the present client has not used come first, the least recently used one at the front. The client's
        own files follow, the newest at the front, because the next load asks for the oldest ones first.
        """
        is_of_client = file.used_s >= self._client_since_s
        return (is_of_client, -file.written_s if is_of_client else file.used_s)

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


def _files(folder: Path) -> Iterator[CachedFile]:
    try:
        with os.scandir(folder) as entries:
            found = [entry for entry in entries if _NAME.fullmatch(entry.name)]
    except OSError:
        return
    for entry in found:
        with suppress(OSError):  # gone by now
            if entry.is_file(follow_symlinks=False):
                state = entry.stat(follow_symlinks=False)
                # On file systems mounted with noatime the access time stays, and the order is that of writing.
                used_s = max(state.st_mtime, state.st_atime)
                yield CachedFile(Path(entry.path), state.st_size, state.st_mtime, used_s)


def _record_next_reads(folder: Path) -> None:
    """Make the file system record the next read of each file in its access time.

    With the default mount option `relatime`, a read is recorded only if the file has changed since the last recorded
    read, or if that read was a day ago. So this function sets the times of each file to their present values, which
    counts as a change (inode(7), `ctime`).
    """
    for file in _files(folder):
        with suppress(OSError):  # gone by now
            state = file.path.stat()
            os.utime(file.path, ns=(state.st_atime_ns, state.st_mtime_ns))


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
