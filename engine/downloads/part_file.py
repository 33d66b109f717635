"""An unfinished file beside the place where it will be: its bytes, its journal, and a lock against a second writer."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

from engine.downloads.faults import ChangedError, OccupiedError, StorageError
from engine.downloads.journal import Journal, Origin, read_journal
from engine.downloads.ranges import Ranges, add_range, merge, prefix_end
from engine.files import sync_folder
from engine.gguf.quoting import quote

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
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OccupiedError(f"{target.name} is being downloaded by another program; wait for it to end.") from None
