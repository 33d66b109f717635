"""Recovery of a damaged conversation database: the damaged file is renamed, and the newest undamaged copy replaces it.

Rows that SQL can still read from the damaged file are added to the copy, so at most text written after the copy is
lost. Damage may be found during a conversation, while a window and a command line use the database. Then a file next to
the database records the damage. The next start recovers the database when no other process has it open.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from msgspec import Struct

from engine.base.errors import ChatError
from engine.base.language import tr, tr_count
from engine.base.sqlite_file import SQLITE_ERRORS, is_damage, put_aside
from engine.chat.copies import DatabaseCopies
from engine.chat.damaged_rows import AddedRows, add_readable_rows
from engine.chat.schema import upgrade

_PARTS = ("-journal", "-wal", "-shm", "")


def damage_record(path: Path) -> Path:
    """Return the path of the file that marks a database as damaged. The file exists until the database is recovered."""
    return path.with_name(f"{path.name}.damaged")


def damage_met(path: Path, error: Exception) -> ChatError | None:
    """Return the error to show if an exception means that the database is damaged; else None.

    The damage is also recorded for the next start.
    """
    if isinstance(error, UnicodeEncodeError) or not is_damage(error):
        return None  # UnicodeEncodeError is about new text and not about the file.
    # The disk may be the cause of the damage, so this may fail, too.
    with suppress(OSError):
        damage_record(path).touch(mode=0o600)
    return ChatError(
        tr(
            "The database of conversations is damaged ({error}). Start Layerdeck again: Layerdeck then opens the "
            "newest backup copy, adds the messages that can still be read, and renames the damaged file.",
            error=error,
        )
    )


def finish_recovery(path: Path) -> None:
    """Do the last step of a recovery: move the new database to `path`. Does nothing if `path` exists.

    Called at the end of a recovery, and again at the next start, because the program may have been killed before this
    step.
    """
    if not path.exists():
        if _new(path).exists():
            _new(path).replace(path)
        damage_record(path).unlink(missing_ok=True)


def recover(path: Path, reason: str) -> str:
    """Rename a damaged database, put the newest undamaged copy in its place, and return a sentence for people.

    If another process has the database open, nothing is changed and the sentence says so. The sentence is empty if
    another process has already recovered the database. This process must not have the database open.

    `reason`: a sentence on the damage, which becomes the beginning of the returned text.

    Raises:
        OSError, sqlite3.Error: the disk is full, or a permission is missing; nothing has changed.
    """
    record = damage_record(path)
    with _alone(record):
        if not record.exists():
            return ""
        if is_open_elsewhere(path):
            return tr(
                "{reason} Another program has the database open. Close that program and start Layerdeck again: "
                "Layerdeck then opens the newest backup copy and adds the messages that can still be read.",
                reason=reason,
            )
        # The order makes each step repeatable: the new database is complete before the damaged one is renamed.
        recovered = _make_new(path, _new(path))
        aside = put_aside(path)
        finish_recovery(path)
    return recovered.sentence(reason, aside.name)


def is_open_elsewhere(path: Path) -> bool:
    """Return whether another process has the database open; if not, merge the write-ahead log into the file."""
    try:
        with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as connection:
            # An exclusive transaction fails if any other program has the database open.
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            connection.execute("BEGIN EXCLUSIVE")
            connection.execute("COMMIT")
            connection.execute("PRAGMA wal_checkpoint (TRUNCATE)")
    except SQLITE_ERRORS as error:
        return "locked" in str(error)
    return False


class _Recovered(Struct, frozen=True):
    """What a recovery put into the new database.

    `copied_at`: local time of the copy from which the new database was made; empty if there was no copy.
    `added`: counts of the messages that were added from the damaged file, and of those that were lost.
    """

    copied_at: str
    added: AddedRows

    def sentence(self, reason: str, aside: str) -> str:
        """Return sentences for people about the recovery and the lost messages.

        `reason`: a sentence on why the database was recovered. `aside`: new name of the damaged file.
        """
        return f"{self._opened(reason, aside)} {self._lost()}"

    def _opened(self, reason: str, aside: str) -> str:
        if self.copied_at:
            return tr_count(
                "{reason} The old file was kept as {name}, and the copy of {time} was opened;"
                " {count} later message could still be read and was added.",
                "{reason} The old file was kept as {name}, and the copy of {time} was opened;"
                " {count} later messages could still be read and were added.",
                self.added.n_messages,
                reason=reason,
                name=aside,
                time=self.copied_at,
            )
        if not self.added.n_messages:
            return tr(
                "{reason} The old file was kept as {name}, and a new database was created.",
                reason=reason,
                name=aside,
            )
        return tr_count(
            "{reason} The old file was kept as {name}. There was no backup, so a new database was created from the "
            "{count} message that could still be read.",
            "{reason} The old file was kept as {name}. There was no backup, so a new database was created from the "
            "{count} messages that could still be read.",
            self.added.n_messages,
            reason=reason,
            name=aside,
        )

    def _lost(self) -> str:
        n_lost = self.added.n_lost
        if n_lost is None:
            if self.copied_at:
                return tr("All other messages written after {time} are lost.", time=self.copied_at)
            return tr("All other messages are lost.")
        if not n_lost:
            return tr("No message is lost.")
        return tr_count("{count} message is lost.", "{count} messages are lost.", n_lost)


def _new(path: Path) -> Path:
    return path.with_name(f"{path.stem}-new{path.suffix}")


@contextmanager
def _alone(record: Path) -> Iterator[None]:
    """Hold an exclusive file lock, so that only one process at a time recovers the database.

    On Windows nothing is locked.

    `record`: the file that is locked (`damage_record`).
    """
    if sys.platform == "win32":
        record.touch()
        yield
        return
    import fcntl

    descriptor = os.open(record, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _make_new(damaged: Path, new: Path) -> _Recovered:
    """Write the new database: the newest undamaged copy, with the rows that can still be read from the damaged one."""
    copies = DatabaseCopies(damaged)
    copy = copies.newest_sound()
    _remove(new)
    try:
        new.touch(mode=0o600)
        if copy is not None:
            shutil.copyfile(copy, new)
        with closing(sqlite3.connect(new, isolation_level=None)) as connection:
            upgrade(connection)
            added = add_readable_rows(damaged, connection)
        copied_at = "" if copy is None else f"{copies.time_of(copy):%Y-%m-%d %H:%M}"
        return _Recovered(copied_at, added)
    except BaseException:
        _remove(new)
        raise


def _remove(database: Path) -> None:
    for ending in _PARTS:
        Path(f"{database}{ending}").unlink(missing_ok=True)
