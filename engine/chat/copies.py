"""Copies of the conversation database, made in the background while it is in use.

If the database has changed, it is copied with SQLite's backup API: at most every ten minutes, and when the database is
closed. A copy gets its final name only after `PRAGMA quick_check` has passed. The last three copies and the last copy
of each of the last three days are kept. They are in the folder `chats-copies`, next to `chats.sqlite3`.
"""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from engine.base.errors import CancelledError, ChatError
from engine.base.language import tr
from engine.base.sqlite_file import SQLITE_ERRORS, is_damage
from engine.base.texts import one_line
from engine.base.units import MIB
from engine.chat.schema import VERSION, version_of

INTERVAL_SECONDS = 600.0
FIRST_LOOK_SECONDS = 60.0
"""Seconds from opening the database to the first check for changes.

Without the delay, a copy would slow down the start of the window.
"""
LAST_COPY_SECONDS = 10.0
"""Time limit in seconds for the copy that is made when the database is closed. The closing window waits for it.

A copy that takes longer is given up: the next start makes it in the background.
"""
KEPT_LAST = 3
KEPT_DAYS = 3
RESERVE_BYTES = 64 * MIB
"""Free space in bytes that a copy leaves on the disk, for the database itself."""
_STEP_PAGES = 4096
"""Number of pages (of 4 KiB) that are copied before `cancelled` is called again."""
_ABANDONED_SECONDS = 3600.0
"""Age in seconds from which an unfinished copy is removed, because the process that wrote it was killed."""

_log = logging.getLogger("layerdeck.chats")


class DatabaseCopies:
    """The folder of copies of one database. All calls read and write the disk."""

    def __init__(self, database: Path) -> None:
        self.database = database
        self.folder = database.with_name(f"{database.stem}-copies")

    def paths(self) -> tuple[Path, ...]:
        """Return the paths of all copies, newest first."""
        found = self.folder.glob(f"{self.database.stem}-*{self.database.suffix}")
        return tuple(sorted(filter(self._is_ours, found), reverse=True))

    def _is_ours(self, path: Path) -> bool:
        """Return whether a file in the folder is a copy of the database: its name contains a time."""
        try:
            self.time_of(path)
        except ValueError:
            return False
        return True

    def is_current(self) -> bool:
        """Return whether the newest copy was made after the last change of the database."""
        newest = next(iter(self.paths()), None)
        with suppress(OSError):
            return newest is not None and newest.stat().st_mtime_ns == self._stamp()
        return False

    def make(self, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Make a copy, and remove the copies that need not be kept any more.

        Other processes can write during the copy: in WAL mode a reader does not block writers.

        `cancelled`: called regularly; True ends the copy.

        Raises:
            CancelledError: the copying was cancelled; there is no new copy.
            DamageFound: the database is damaged; there is no new copy.
            ChatError: no copy can be written; nothing else has changed.
        """
        unfinished = self.folder / f".{os.getpid()}.tmp"
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            self._remove_abandoned()
            self._require_room()
            stamp = self._stamp()
            # Created with these rights before SQLite writes to it: conversations are private.
            unfinished.touch(mode=0o600)
            fault = _back_up(self.database, unfinished, cancelled)
            if not fault:
                # The time of the database's last change: `is_current` compares it.
                os.utime(unfinished, ns=(stamp, stamp))
                unfinished.replace(self._new_name())
                self._remove_old()
        except (OSError, *SQLITE_ERRORS) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ChatError(
                tr(
                    "The conversations cannot be copied to {folder} ({reason}); check the disk's free space and"
                    " permissions. Nothing is lost.",
                    folder=self.folder,
                    reason=reason,
                )
            ) from None
        finally:
            _remove(unfinished)
        if fault:
            raise DamageFound(fault)

    def confirm(self) -> None:
        """Give the newest copy the time of the database's last change, so that `is_current` returns True again.

        Called if closing the database has changed the time of its file without changing a row.
        """
        for newest in self.paths()[:1]:
            with suppress(OSError):
                stamp = self._stamp()
                os.utime(newest, ns=(stamp, stamp))

    def newest_sound(self) -> Path | None:
        """Return the newest copy that can be opened and is not damaged; None if there is none."""
        return next(filter(_is_sound, self.paths()), None)

    def time_of(self, copy: Path) -> datetime:
        """Return the local time at which a copy was made, from its file name."""
        words = copy.stem.removeprefix(f"{self.database.stem}-")
        return datetime.strptime(words, _TIME_FORMAT).replace(tzinfo=UTC).astimezone()

    def _new_name(self) -> Path:
        at = datetime.now(UTC)
        for newest in self.paths()[:1]:
            # A clock that was set back must not make this copy older than the one before.
            at = max(at, self.time_of(newest).astimezone(UTC) + timedelta(seconds=1))
        words = at.strftime(_TIME_FORMAT)
        return self.folder / f"{self.database.stem}-{words}{self.database.suffix}"

    def _stamp(self) -> int:
        """Return the time in ns of the database's last change.

        This is the time of its write-ahead log if the log is not empty, else the time of the database file.
        """
        with suppress(OSError):
            log = Path(f"{self.database}-wal").stat()
            if log.st_size:
                return log.st_mtime_ns
        return self.database.stat().st_mtime_ns

    def _require_room(self) -> None:
        # A copy that filled the disk would keep the database itself from storing messages.
        needed_bytes = self.database.stat().st_size + RESERVE_BYTES
        if shutil.disk_usage(self.folder).free < needed_bytes:
            raise OSError(28, tr("no space left on the disk"))

    def _remove_old(self) -> None:
        paths = self.paths()
        for path in set(paths) - kept_of(paths):
            _remove(path)

    def _remove_abandoned(self) -> None:
        limit_s = time.time() - _ABANDONED_SECONDS
        for path in self.folder.glob(".*.tmp*"):
            with suppress(OSError):
                if path.stat().st_mtime < limit_s:
                    path.unlink()


class DamageFound(Exception):
    """Error: the database is damaged. The message is SQLite's own."""


class BackgroundCopies:
    """The thread that copies a database in the background while it is open.

    `report`: called in that thread with each error of `DatabaseCopies.make`, except repetitions of the same sentence.
    """

    def __init__(self, copies: DatabaseCopies, report: Callable[[ChatError | DamageFound], None]) -> None:
        self._copies = copies
        self._report = report
        self._last_sentence = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chat copies", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. A copy that is being made is cancelled."""
        self._stop.set()
        self._thread.join()

    def is_current(self) -> bool:
        """Return whether the newest copy was made after the last change of the database."""
        return self._copies.is_current()

    def make_last(self, *, is_current: bool) -> None:
        """Make the last copy, after the database was closed; give up after `LAST_COPY_SECONDS`.

        `is_current`: whether the newest copy was current before closing. The caller must pass it, because closing moves
        the write-ahead log into the database file and changes the file's time.
        """
        if is_current:
            self._copies.confirm()
        else:
            end_s = time.monotonic() + LAST_COPY_SECONDS
            self.make_if_changed(lambda: time.monotonic() >= end_s)

    def make_if_changed(self, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Make a copy now, unless the newest copy is current. `cancelled`: as for `DatabaseCopies.make`."""
        if self._copies.is_current():
            return
        try:
            self._copies.make(cancelled)
        except CancelledError:
            _log.info("the copy of the conversations was not completed")
        except (ChatError, DamageFound) as error:
            _log.info("%s", error)
            # A full disk would otherwise be reported every ten minutes.
            if str(error) != self._last_sentence:
                self._last_sentence = str(error)
                self._report(error)

    def _run(self) -> None:
        wait_s = FIRST_LOOK_SECONDS
        while not self._stop.wait(wait_s):
            self.make_if_changed(self._stop.is_set)
            wait_s = INTERVAL_SECONDS


_TIME_FORMAT = "%Y%m%d-%H%M%S"


def kept_of(newest_first: Sequence[Path]) -> set[Path]:
    """Return the copies to keep: the last `KEPT_LAST` copies, and the last copy of each of the last `KEPT_DAYS` days.

    A day without a copy is not one of the `KEPT_DAYS`.
    """
    of_day: dict[str, Path] = {}
    for path in newest_first:
        of_day.setdefault(path.stem.rpartition("-")[0], path)
    return {*newest_first[:KEPT_LAST], *list(of_day.values())[:KEPT_DAYS]}


def _back_up(database: Path, target: Path, cancelled: Callable[[], bool]) -> str:
    """Copy a database into one file; return a sentence on the damage if the copy is damaged, else an empty string.

    Raises:
        CancelledError: `cancelled` returned True.
    """

    def look(*_progress: int) -> None:
        if cancelled():
            raise CancelledError

    with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(target, isolation_level=None)) as copy:
        source.execute("PRAGMA query_only = ON")
        copy.execute("PRAGMA synchronous = OFF")  # one fsync at the end is enough
        try:
            # One transaction for all steps: otherwise a change by another connection would begin the copy anew.
            source.execute("BEGIN")
            version_of(source)
            source.backup(copy, pages=_STEP_PAGES, progress=look)
            # The copy is one file without a write-ahead log, so that it can be moved and opened alone.
            copy.execute("PRAGMA journal_mode = DELETE")
            fault = _fault(copy)
        except SQLITE_ERRORS as error:
            if is_damage(error):
                return one_line(str(error))
            raise
    with target.open("rb+") as file:
        os.fsync(file.fileno())
    return fault


def _fault(connection: sqlite3.Connection) -> str:
    (found,) = connection.execute("PRAGMA quick_check (1)").fetchone()
    return "" if found == "ok" else one_line(found)


def _is_sound(copy: Path) -> bool:
    try:
        with closing(sqlite3.connect(copy, isolation_level=None)) as connection:
            return not _fault(connection) and 0 < version_of(connection) <= VERSION
    except (OSError, *SQLITE_ERRORS):
        return False


def _remove(database: Path) -> None:
    for path in _with_journals(database):
        with suppress(OSError):
            path.unlink()


def _with_journals(database: Path) -> Iterator[Path]:
    for ending in ("-journal", "-wal", "-shm", ""):
        yield Path(f"{database}{ending}")
