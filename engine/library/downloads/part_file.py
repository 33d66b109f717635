"""An unfinished download next to its final path: the bytes (`.part`), a journal (`.part.json`), and a file lock.

The first line of the journal is the origin of the file: its address, size and etag on the server. Each further line
states which bytes are on the disk; the last complete line counts. A line is written after its bytes, which is enough if
the process is killed. After a power loss the line may exist without the bytes. Therefore lines whose bytes were synced
are marked, and after a reboot only marked lines count.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec import Struct

from engine.base.errors import EngineError
from engine.base.files import lock_file, read_at_most, sync_folder, write_whole
from engine.base.texts import quote

PART_ENDING = ".part"
JOURNAL_ENDING = ".part.json"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CAN_PLACE = hasattr(os, "pwrite")
# A link under the name of the unfinished file would lead the download into another file, so it is refused.
_OPEN_FLAGS = os.O_RDWR | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)


class PartFile:
    """An unfinished download: a file for the bytes, its journal, and a lock against a second process.

    The constructor resumes an unfinished download of the same file. `write` and `read` may be called in any thread, the
    other methods only in one.

    `target`: final path of the file.
    `block_bytes`: largest number of bytes that are written between two lines of the journal.
    `restart`: whether to discard bytes that belong to another version of the file.

    Raises:
        OccupiedError: if another process writes the file, or has just finished it.
        ChangedError: if the bytes belong to another version of the file, and `restart` is not set.
        StorageError: if the file cannot be written.
    """

    def __init__(self, target: Path, origin: Origin, *, block_bytes: int, restart: bool = False) -> None:
        self.target = target
        self.path = target.with_name(target.name + PART_ENDING)
        self._journal_path = target.with_name(target.name + JOURNAL_ENDING)
        self._lock = threading.Condition()
        self._closed = False
        self._block_bytes = block_bytes
        self._unnoted_bytes = 0
        self._writing_bytes = 0
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, _OPEN_FLAGS | os.O_CREAT, 0o666)
        except OSError as error:
            raise storage_error(error, target) from error
        try:
            _lock_whole(self._descriptor, self.path, target)
            self.origin, self._done = self._take_up(origin, restart=restart)
            # The new journal states these bytes as synced, so they must be on the disk before it.
            os.fsync(self._descriptor)
            self._journal = Journal(self._journal_path, self.origin, self._done)
        except OSError as error:
            os.close(self._descriptor)
            raise storage_error(error, target) from error
        # Also for a second writer or a changed file: the lock ends with the descriptor.
        except BaseException:
            os.close(self._descriptor)
            raise

    @property
    def done(self) -> Ranges:
        """The byte ranges that are on the disk."""
        return self._done

    def learn(self, origin: Origin) -> None:
        """Replace the origin (the file's address, size and etag on its server), also in the journal.

        Called when the server has stated a value that was unknown before. Raises `StorageError`.
        """
        with self._lock:
            if self._closed:
                return
            try:
                self._journal.learn(origin, self._done)
            except OSError as error:
                raise storage_error(error, self.target) from error
            self.origin = origin

    def write(self, first: int, data: bytes) -> None:
        """Write `data` at the offset `first`, and add its range to `done`.

        Raises:
            StorageError: if the disk cannot be written.
        """
        with self._lock:
            if self._closed:
                return  # An abandoned connection received data after the close.
            # Before the bytes are written, so that never more than `block_bytes` bytes are on the disk without a line.
            if self._unnoted_bytes + len(data) > self._block_bytes:
                self._note()
            self._unnoted_bytes += len(data)
            self._writing_bytes += len(data)
        placed = False
        try:
            # Without the lock: connections write to different positions at the same time.
            self._place(first, data)
            placed = True
        finally:
            with self._lock:
                if placed:
                    self._done = add_range(self._done, first, first + len(data))
                self._writing_bytes -= len(data)
                self._lock.notify_all()

    def _place(self, first: int, data: bytes) -> None:
        try:
            if _CAN_PLACE:
                # `pwrite` may write less than it got, as on a disk that is nearly full.
                written = 0
                while written < len(data):
                    written += os.pwrite(self._descriptor, memoryview(data)[written:], first + written)
                return
            # Without `pwrite` (Windows) no other thread may move the position between seek and write.
            with self._lock:
                os.lseek(self._descriptor, first, os.SEEK_SET)
                os.write(self._descriptor, data)
        except OSError as error:
            raise storage_error(error, self.target) from error

    def read(self, first: int, length: int) -> bytes:
        """Return at most `length` bytes at the offset `first`."""
        if _CAN_PLACE:
            return os.pread(self._descriptor, length, first)
        with self._lock:
            os.lseek(self._descriptor, first, os.SEEK_SET)
            return os.read(self._descriptor, length)

    def note(self) -> None:
        """Write a line into the journal if bytes were written since the last line. Raises `StorageError`."""
        with self._lock:
            if self._unnoted_bytes and not self._closed:
                self._note()

    def sync(self) -> None:
        """Sync the bytes to the disk with `fsync`, and write a line into the journal that says so.

        Raises `StorageError`.
        """
        with self._lock:
            # Read before the sync: bytes that arrive meanwhile may not be on the disk.
            done = self._done
        try:
            os.fsync(self._descriptor)
            with self._lock:
                self._journal.note(done, synced=True)
        except OSError as error:
            raise storage_error(error, self.target) from error

    def close(self) -> None:
        """Write the last line of the journal, and close both files.

        The files stay on the disk, so that a later transfer resumes. Later calls of `write` are ignored.
        """
        with self._lock:
            self._closed = True
            # Writes of other threads finish first, because the descriptor is closed below.
            self._lock.wait_for(lambda: not self._writing_bytes)
            try:
                self._note()
            except StorageError:
                pass  # The last step that was noted counts.
            finally:
                self._journal.close()
                os.close(self._descriptor)

    def discard(self) -> None:
        """Close and delete the unfinished file and its journal. Raises the errors of `discard_part`."""
        self.close()
        discard_part(self.target)

    def finish(self) -> None:
        """Sync and close the complete file, and rename it to `target`.

        Raises:
            OccupiedError: if another file has that path by now.
            StorageError: if the file system refuses.
        """
        held = None
        try:
            self.sync()
            # A second descriptor holds the lock until the rename, so that no other process locks the complete file as
            # an unfinished one. Windows has no such lock, and renames no open file.
            if sys.platform != "win32":
                held = os.dup(self._descriptor)
        finally:
            self.close()
        try:
            # On Linux a rename would replace an existing file silently.
            if os.path.lexists(self.target):
                raise OccupiedError(
                    f"{self.target.name} exists by now and is another file; move it away and try again."
                )
            self.path.rename(self.target)
            # In this order: a kill in between leaves a journal without bytes. The other order would leave bytes that
            # nobody can trust.
            self._journal_path.unlink(missing_ok=True)
            # Without this a power loss may undo the rename.
            sync_folder(self.target.parent)
        except OSError as error:
            raise storage_error(error, self.target) from error
        finally:
            if held is not None:
                os.close(held)

    def _note(self) -> None:
        try:
            self._journal.note(self._done)
        except OSError as error:
            raise storage_error(error, self.target) from error
        # Bytes that other threads are writing now are not in this line.
        self._unnoted_bytes = self._writing_bytes

    def _take_up(self, origin: Origin, *, restart: bool) -> tuple[Origin, Ranges]:
        kept = read_journal(self._journal_path)
        size_here = os.fstat(self._descriptor).st_size
        # Without a journal nobody knows which bytes are valid.
        if kept is None or not kept[1]:
            os.ftruncate(self._descriptor, 0)
            return origin, ()
        known, done = kept
        if not _is_same(known, origin):
            if not restart:
                raise ChangedError(
                    f"{self.target.name} has changed since its download began; "
                    "start the download over, or choose another folder to keep this file."
                )
            os.ftruncate(self._descriptor, 0)
            return origin, ()
        merged = Origin(
            url=origin.url,
            commit=origin.commit,
            etag=origin.etag or known.etag,
            sha256=origin.sha256 or known.sha256,
            size_bytes=origin.size_bytes if origin.size_bytes is not None else known.size_bytes,
        )
        return merged, merge(done, size_here)


def discard_part(target: Path) -> None:
    """Delete the bytes and the journal of an unfinished download of `target`.

    Raises:
        OccupiedError: if another process writes the file.
        StorageError: if a file cannot be removed.
    """
    path = target.with_name(target.name + PART_ENDING)
    descriptor = None
    try:
        # Windows locks nothing, and deletes no open file.
        # A link, or a file that may not be written, is nobody's download: `PartFile` opens with the same flags.
        if sys.platform != "win32" and path.exists() and not path.is_symlink() and os.access(path, os.W_OK):
            descriptor = os.open(path, _OPEN_FLAGS)
            _lock_whole(descriptor, path, target)
        # In this order: once the bytes have no name, another process may begin a journal of its own.
        target.with_name(target.name + JOURNAL_ENDING).unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    except OSError as error:
        raise storage_error(error, target) from error
    finally:
        if descriptor is not None:
            os.close(descriptor)


def bytes_here(target: Path, size_bytes: int | None) -> int:
    """Return the size on the disk of the file `target`, or of its unfinished download; 0 if there is neither.

    `size_bytes`: size of the complete file, None if it is unknown.
    """
    try:
        return target.stat().st_size
    except OSError:
        kept = read_journal(target.with_name(target.name + JOURNAL_ENDING))
    return 0 if kept is None else sum(end - first for first, end in merge(kept[1], size_bytes))


def is_whole(part: PartFile) -> bool:
    """Return whether all bytes of the file are on the disk."""
    size_bytes = part.origin.size_bytes
    return size_bytes is not None and prefix_end(part.done) >= size_bytes


def storage_error(error: OSError, target: Path) -> StorageError:
    """Return a `StorageError` that names the file and the reason that the system gave."""
    if error.errno in _FULL:
        return StorageError(
            f"The disk is full: {quote(str(target.parent))} has no space left. Free some space, then resume."
        )
    reason = error.strerror or str(error)
    return StorageError(f"{quote(target.name)} cannot be written ({reason}); choose another folder.")


def _is_same(known: Origin, origin: Origin) -> bool:
    """Return whether two origins (address, size, etag, SHA-256) are of the same file.

    They are compared by the most reliable value that both have: SHA-256, else size and etag, else address.
    """
    # The hash of the content decides. Size, etag and address follow, each less certain.
    if known.sha256 and origin.sha256:
        return known.sha256 == origin.sha256
    if None not in (known.size_bytes, origin.size_bytes) and known.size_bytes != origin.size_bytes:
        return False
    if known.etag and origin.etag:
        return known.etag == origin.etag
    return known.url == origin.url


def _lock_whole(descriptor: int, path: Path, target: Path) -> None:
    """Lock the open unfinished file `path` against a second process.

    The system releases the lock when this process ends. Raises `OccupiedError` if another process holds the lock, or
    has finished or discarded the file since it was opened.
    """
    if not lock_file(descriptor, wait=False) or not _is_at(descriptor, path):
        raise OccupiedError(f"{target.name} is being downloaded by another program; wait until it is finished.")


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


class StorageError(EngineError):
    """The disk is full or cannot be written."""

    kind = "storage"


class ChangedError(EngineError):
    """The file on the server has changed since its transfer began."""

    kind = "changed"


class DamagedError(EngineError):
    """The SHA-256 of the downloaded file differs from that on the hub, or the file is no GGUF file."""

    kind = "model_file"


class OccupiedError(EngineError):
    """Another transfer of the same file is running, or another file exists at the target path."""

    kind = "argument"


class StoppedError(EngineError):
    """The transfer was stopped by the user. The bytes fetched so far stay on the disk."""

    kind = "cancelled"


Ranges = tuple[tuple[int, int], ...]


def add_range(ranges: Ranges, first: int, end: int) -> Ranges:
    """Return the sorted `ranges` with the bytes from `first` up to, not including, `end` added."""
    if end <= first:
        return ranges
    # Ranges that touch the new one, even without overlap, become part of it.
    before = [each for each in ranges if each[1] < first]
    behind = [each for each in ranges if each[0] > end]
    touched = ranges[len(before) : len(ranges) - len(behind)]
    whole = (min([first, *(each[0] for each in touched)]), max([end, *(each[1] for each in touched)]))
    return (*before, whole, *behind)


def merge(pairs: Iterable[tuple[int, int]], size_bytes: int | None) -> Ranges:
    """Return byte ranges from a journal, sorted, joined, and cut at the size of the file (None: unknown size).

    Invalid ranges of a damaged journal are left out.
    """
    ranges: Ranges = ()
    for first, end in pairs:
        limit = end if size_bytes is None else min(end, size_bytes)
        if 0 <= first < limit:
            ranges = add_range(ranges, first, limit)
    return ranges


def count_bytes(ranges: Ranges) -> int:
    """Return the number of bytes in `ranges`."""
    return sum(end - first for first, end in ranges)


def prefix_end(ranges: Ranges) -> int:
    """Return how many bytes at the start of the file are on the disk without a gap."""
    return ranges[0][1] if ranges and ranges[0][0] == 0 else 0


def first_gap(ranges: Ranges, size_bytes: int) -> tuple[int, int] | None:
    """Return the first byte range of the file that is not in `ranges`; None if no byte is missing."""
    at = 0
    for first, end in ranges:
        if first > at:
            return at, first
        at = end
    return (at, size_bytes) if at < size_bytes else None


VERSION = 1
MAX_BYTES = 64 * 1024 * 1024
LONGEST_BYTES = 1024 * 1024
"""Largest length of a journal in bytes. A longer journal is replaced by a short one, which has only the origin and the
latest lines.
"""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Origin(Struct, frozen=True, kw_only=True):
    """Identity of a file on its server, the first line of the journal.

    A field is None if the server did not state it.
    """

    url: str
    commit: str = ""
    etag: str | None = None
    sha256: str | None = None
    size_bytes: int | None = None
    version: int = VERSION


class _Step(Struct, frozen=True):
    done: tuple[tuple[int, int], ...]
    synced: bool = False
    boot: str = ""


class Journal:
    """The open journal of an unfinished download, JSON Lines next to its bytes. Not thread-safe.

    `done`: byte ranges that the caller has synced to the disk before it opens the journal.
    """

    def __init__(self, path: Path, origin: Origin, done: Ranges) -> None:
        self._path = path
        self._origin = origin
        self._boot = _boot_id()
        self._synced = _Step(done, synced=True, boot=self._boot)
        self._descriptor = self._begin(self._synced)

    def note(self, done: Ranges, *, synced: bool = False) -> None:
        """Write a line that states that the byte ranges `done` are on the disk.

        `synced`: whether those bytes were synced; then the line is synced as well.
        """
        step = _Step(done, synced, self._boot)
        if synced:
            self._synced = step
        line = msgspec.json.encode(step) + b"\n"
        if self._size_bytes + len(line) > LONGEST_BYTES:
            # Otherwise the journal of a download of many days could exceed `MAX_BYTES`, and would not be read.
            self._begin_anew(step)
            return
        self._size_bytes += os.write(self._descriptor, line)
        if synced:
            os.fsync(self._descriptor)

    def learn(self, origin: Origin, done: Ranges) -> None:
        """Replace the origin (the file's address, size and etag on its server), and rewrite the journal.

        `done`: byte ranges that are on the disk; they become the last line of the journal.
        """
        self._origin = origin
        self._begin_anew(_Step(done, boot=self._boot))

    def _begin_anew(self, step: _Step) -> None:
        before = self._descriptor
        self._descriptor = self._begin(step)
        os.close(before)

    def _begin(self, step: _Step) -> int:
        """Write a short journal (the record of a download's bytes on the disk) in place of the old one, and open it.

        Return the file descriptor of the new journal. Its first line is the origin: address, size and etag of the file
        on its server. The second line has the byte ranges that were synced last. The third line is `step`.

        `step`: the byte ranges that are on the disk now.
        """
        lines = [self._origin, self._synced, step]
        data = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
        write_whole(self._path, data)
        self._size_bytes = len(data)
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0))

    def close(self) -> None:
        """Close the journal's file descriptor. The file stays on the disk, so that the download can be resumed."""
        os.close(self._descriptor)


def read_journal(path: Path) -> tuple[Origin, Ranges] | None:
    """Return the origin and the byte ranges on the disk that a journal states; None if it is missing or unreadable."""
    try:
        lines = read_at_most(path, MAX_BYTES).split(b"\n")
        origin = msgspec.json.decode(lines[0], type=Origin)
    except (OSError, ValueError, msgspec.MsgspecError):
        return None
    if origin.version != VERSION:
        return None
    boot = _boot_id()
    for line in reversed(lines[1:]):
        try:
            step = msgspec.json.decode(line, type=_Step)
        except (msgspec.MsgspecError, ValueError):
            continue  # Cut off when the process was killed.
        if step.synced or (boot and step.boot == boot):
            return origin, merge(step.done, origin.size_bytes)
    return origin, ()


def _boot_id() -> str:
    """Return the boot id of Linux, a text that differs after each reboot; "" on other systems."""
    try:
        return read_at_most(_BOOT_ID, 64).decode("ascii").strip()
    except (OSError, ValueError):
        return ""
