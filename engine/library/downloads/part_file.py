"""An unfinished file next to the place where it will be: its bytes, its journal, and a lock against a second writer.

The journal says where the file comes from and which of its bytes are here: a line for the origin, then a line for every
step; the last whole line counts. Steps are written after their bytes were, which is enough if the process is killed. A
machine that loses power may keep the step and lose the bytes: steps are marked once the bytes were forced to the disk,
and after a restart of the machine only those count.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable
from pathlib import Path

import msgspec

from engine.base.errors import EngineError
from engine.base.files import lock_file, read_at_most, sync_folder, write_whole
from engine.model.gguf.quoting import quote

PART_ENDING = ".part"
JOURNAL_ENDING = ".part.json"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CAN_PLACE = hasattr(os, "pwrite")


class PartFile:
    """The bytes that are here of one file. `write` and `read` are for any thread; all else is for one.

    Opening takes up what is here of the same file. At most `block_bytes` are here that no step of the journal has.

    Raises:
        OccupiedError: another process writes it.
        ChangedError: what is here is of another file, and `restart` is not set.
        StorageError: it cannot be written there.
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
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)
            self._descriptor = os.open(self.path, flags, 0o666)
        except OSError as error:
            raise storage_error(error, target) from error
        try:
            _lock_whole(self._descriptor, target)
            self.origin, self._done = self._take_up(origin, restart=restart)
            self._journal = Journal(self._journal_path, self.origin, self._done)
        except OSError as error:
            os.close(self._descriptor)
            raise storage_error(error, target) from error
        except BaseException:
            os.close(self._descriptor)
            raise

    @property
    def done(self) -> Ranges:
        """The bytes that are here."""
        return self._done

    def learn(self, origin: Origin) -> None:
        """Note what the server said of the file meanwhile."""
        with self._lock:
            if self._closed:
                return
            self._journal.close()
            self.origin = origin
            self._journal = Journal(self._journal_path, origin, self._done)

    def write(self, first: int, data: bytes) -> None:
        """Write bytes to their place and count them as here.

        Raises:
            StorageError: where the disk does not take them.
        """
        with self._lock:
            if self._closed:
                return  # A connection that was left comes to life: what it brings is nobody's any more.
            # Before the bytes are written, so that at no moment more than a block is here that was not noted.
            if self._unnoted_bytes + len(data) > self._block_bytes:
                self._note()
            self._unnoted_bytes += len(data)
            self._writing_bytes += len(data)
        placed = False
        try:
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
                written = 0
                while written < len(data):
                    written += os.pwrite(self._descriptor, memoryview(data)[written:], first + written)
                return
            with self._lock:
                os.lseek(self._descriptor, first, os.SEEK_SET)
                os.write(self._descriptor, data)
        except OSError as error:
            raise storage_error(error, self.target) from error

    def read(self, first: int, length: int) -> bytes:
        """Return bytes that are here."""
        if _CAN_PLACE:
            return os.pread(self._descriptor, length, first)
        with self._lock:
            os.lseek(self._descriptor, first, os.SEEK_SET)
            return os.read(self._descriptor, length)

    def sync(self) -> None:
        """Force what is here to the disk, and note that."""
        with self._lock:
            done = self._done
        try:
            os.fsync(self._descriptor)
            with self._lock:
                self._journal.note(done, synced=True)
        except OSError as error:
            raise storage_error(error, self.target) from error

    def close(self) -> None:
        """Note what is here and close; a later transfer goes on with it. Nothing is written any more."""
        with self._lock:
            self._closed = True
            self._lock.wait_for(lambda: not self._writing_bytes)
            try:
                self._note()
            except StorageError:
                pass  # The last step that was noted counts.
            finally:
                self._journal.close()
                os.close(self._descriptor)

    def discard(self) -> None:
        """Close, and remove what is here."""
        self.close()
        self.path.unlink(missing_ok=True)
        self._journal_path.unlink(missing_ok=True)

    def finish(self) -> None:
        """Close, and put the whole file in its place in one step.

        Raises:
            OccupiedError: something else is there by now.
            StorageError: the system refuses it.
        """
        try:
            self.sync()
        finally:
            self.close()
        if os.path.lexists(self.target):
            raise OccupiedError(f"{self.target.name} is there by now and is another file; move it away and try again.")
        try:
            self.path.rename(self.target)
            self._journal_path.unlink(missing_ok=True)
            sync_folder(self.target.parent)
        except OSError as error:
            raise storage_error(error, self.target) from error

    def _note(self) -> None:
        try:
            self._journal.note(self._done)
        except OSError as error:
            raise storage_error(error, self.target) from error
        self._unnoted_bytes = self._writing_bytes

    def _take_up(self, origin: Origin, *, restart: bool) -> tuple[Origin, Ranges]:
        kept = read_journal(self._journal_path)
        size_here = os.fstat(self._descriptor).st_size
        if kept is None or not kept[1]:
            os.ftruncate(self._descriptor, 0)
            return origin, ()
        known, done = kept
        if not _is_same(known, origin):
            if not restart:
                raise ChangedError(
                    f"{self.target.name} is another file now than when its download began; "
                    "begin it anew, or keep what is there by choosing another folder."
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
    """Remove what is here of an unfinished file that nobody writes.

    Raises:
        StorageError: where it cannot be removed.
    """
    try:
        for ending in (PART_ENDING, JOURNAL_ENDING):
            target.with_name(target.name + ending).unlink(missing_ok=True)
    except OSError as error:
        raise storage_error(error, target) from error


def bytes_here(target: Path, size_bytes: int | None) -> int:
    """Return how much of a file is here, finished or not, by its journal."""
    try:
        return target.stat().st_size
    except OSError:
        kept = read_journal(target.with_name(target.name + JOURNAL_ENDING))
    return 0 if kept is None else sum(end - first for first, end in merge(kept[1], size_bytes))


def is_whole(part: PartFile) -> bool:
    """Return whether every byte is here."""
    size_bytes = part.origin.size_bytes
    return size_bytes is not None and prefix_end(part.done) >= size_bytes


def storage_error(error: OSError, target: Path) -> StorageError:
    """Return what the system says about a file, as a sentence."""
    if error.errno in _FULL:
        return StorageError(f"The disk is full: {quote(str(target.parent))} has no room left. Make room, then go on.")
    reason = error.strerror or str(error)
    return StorageError(f"{quote(target.name)} cannot be written ({reason}); choose another folder.")


def _is_same(known: Origin, origin: Origin) -> bool:
    """Return whether both are the same file, by the surest thing that both say."""
    if known.sha256 and origin.sha256:
        return known.sha256 == origin.sha256
    if None not in (known.size_bytes, origin.size_bytes) and known.size_bytes != origin.size_bytes:
        return False
    if known.etag and origin.etag:
        return known.etag == origin.etag
    return known.url == origin.url


def _lock_whole(descriptor: int, target: Path) -> None:
    """Keep a second process from writing the same file; the system lets go when this one ends, however it ends."""
    if not lock_file(descriptor, wait=False):
        raise OccupiedError(f"{target.name} is being downloaded by another program; wait for it to end.")


class StorageError(EngineError):
    """A disk that is full or cannot be written."""

    kind = "storage"


class ChangedError(EngineError):
    """A file that is another one than when its transfer began."""

    kind = "changed"


class DamagedError(EngineError):
    """A file that came whole and is not what was promised."""

    kind = "model_file"


class OccupiedError(EngineError):
    """Another transfer of the same file is under way, or a file is in its place."""

    kind = "argument"


class StoppedError(EngineError):
    """Somebody wanted the transfer to end; what is here stays."""

    kind = "cancelled"


Ranges = tuple[tuple[int, int], ...]


def add_range(ranges: Ranges, first: int, end: int) -> Ranges:
    """Return `ranges` with the bytes from `first` up to `end` as well."""
    if end <= first:
        return ranges
    before = [each for each in ranges if each[1] < first]
    behind = [each for each in ranges if each[0] > end]
    touched = ranges[len(before) : len(ranges) - len(behind)]
    whole = (min([first, *(each[0] for each in touched)]), max([end, *(each[1] for each in touched)]))
    return (*before, whole, *behind)


def merge(pairs: Iterable[tuple[int, int]], size_bytes: int | None) -> Ranges:
    """Return pairs of a file of ours that may be damaged as ranges; what lies outside of the file is left out."""
    ranges: Ranges = ()
    for first, end in pairs:
        limit = end if size_bytes is None else min(end, size_bytes)
        if 0 <= first < limit:
            ranges = add_range(ranges, first, limit)
    return ranges


def count_bytes(ranges: Ranges) -> int:
    """Return how many bytes are here."""
    return sum(end - first for first, end in ranges)


def prefix_end(ranges: Ranges) -> int:
    """Return up to where the file is here from its start."""
    return ranges[0][1] if ranges and ranges[0][0] == 0 else 0


def first_gap(ranges: Ranges, size_bytes: int) -> tuple[int, int] | None:
    """Return the first bytes that are missing, None where nothing is."""
    at = 0
    for first, end in ranges:
        if first > at:
            return at, first
        at = end
    return (at, size_bytes) if at < size_bytes else None


VERSION = 1
MAX_BYTES = 64 * 1024 * 1024
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Which file it is. `etag` and `sha256` as the server named them, None where it did not."""

    url: str
    commit: str = ""
    etag: str | None = None
    sha256: str | None = None
    size_bytes: int | None = None
    version: int = VERSION


class _Step(msgspec.Struct, frozen=True):
    done: tuple[tuple[int, int], ...]
    synced: bool = False
    boot: str = ""


class Journal:
    """The journal of one unfinished file, open for further steps. Not for several threads at once."""

    def __init__(self, path: Path, origin: Origin, done: Ranges) -> None:
        self._path = path
        self._boot = _boot_id()
        lines = [origin, _Step(done, synced=not done, boot=self._boot)]
        write_whole(path, b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0))

    def note(self, done: Ranges, *, synced: bool = False) -> None:
        """Write a step; `synced`: the bytes of it are on the disk, and so shall the step be."""
        os.write(self._descriptor, msgspec.json.encode(_Step(done, synced, self._boot)) + b"\n")
        if synced:
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file; it stays."""
        os.close(self._descriptor)


def read_journal(path: Path) -> tuple[Origin, Ranges] | None:
    """Return what a journal says, None where there is none that can be read."""
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
    """Return what is another text after each start of the machine, "" where nothing tells."""
    try:
        return read_at_most(_BOOT_ID, 64).decode("ascii").strip()
    except (OSError, ValueError):
        return ""
