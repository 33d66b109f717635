"""A damaged database: noted when the damage is met, put aside at the next start, with a copy of what can be read.

The note is a file beside the database. Damage may be met in the middle of a talk by a window and a command line at
once; a start is when it can be looked at alone.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from engine.chats.salvage import salvage
from engine.chats.schema import upgrade
from engine.errors import ChatError
from engine.language import tr, tr_count
from engine.sqlite_file import FAULTS, is_damage, put_aside

_PARTS = ("-journal", "-wal", "-shm", "")


def mark_of(path: Path) -> Path:
    """Return the file that is there while a database is known to be damaged."""
    return path.with_name(f"{path.name}.damaged")


def damage_met(path: Path, error: Exception) -> ChatError | None:
    """Note that a database is damaged, for the next start, and return the sentence; None for any other error."""
    if isinstance(error, UnicodeEncodeError) or not is_damage(error):
        return None  # the first is about what was asked for
    with suppress(OSError):
        mark_of(path).touch(mode=0o600)
    return ChatError(
        tr(
            "The database of conversations is damaged ({error}). Start Layerdeck again: what can be read is then copied"
            " into a new one, and this one is kept aside.",
            error=error,
        )
    )


def finish_repair(path: Path) -> None:
    """Put the new database in its place where a repair ended between its last steps."""
    if not path.exists():
        if _new(path).exists():
            _new(path).replace(path)
        mark_of(path).unlink(missing_ok=True)


def repair(path: Path, reason: str) -> str:
    """Copy what can be read into a new database and keep the old one aside; return the sentence that says so.

    Empty where another program has done it meanwhile. Nobody of this process may have the database open.

    Raises:
        OSError, sqlite3.Error: there is no room or no right for it; all is as it was.
    """
    mark = mark_of(path)
    with _alone(mark):
        if not mark.exists():
            return ""
        if _is_held(path):
            return tr(
                "The database of conversations {reason}, and another program has it open. End that and start Layerdeck"
                " again: what can be read is then copied into a new one.",
                reason=reason,
            )
        count = _copy(path, _new(path))
        aside = put_aside(path)
        finish_repair(path)
    if not count:
        return tr(
            "The database of conversations {reason}. It was kept as {name} and a new one begun.",
            reason=reason,
            name=aside.name,
        )
    return tr_count(
        "The database of conversations {reason}. It was kept as {name}, and what could be read of it copied into a new"
        " one: {count} conversation.",
        "The database of conversations {reason}. It was kept as {name}, and what could be read of it copied into a new"
        " one: {count} conversations.",
        count,
        reason=reason,
        name=aside.name,
    )


def _new(path: Path) -> Path:
    return path.with_name(f"{path.stem}-new{path.suffix}")


@contextmanager
def _alone(mark: Path) -> Iterator[None]:
    """Keep other processes from the same repair, where the system has locks of files."""
    if sys.platform == "win32":
        mark.touch()
        yield
        return
    import fcntl

    descriptor = os.open(mark, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_held(path: Path) -> bool:
    """Tell whether another program has the database open; where not, what is in its journal is now in it."""
    try:
        with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as connection:
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            connection.execute("BEGIN EXCLUSIVE")
            connection.execute("COMMIT")
            connection.execute("PRAGMA wal_checkpoint (TRUNCATE)")
    except FAULTS as error:
        return "locked" in str(error)
    return False


def _copy(damaged: Path, new: Path) -> int:
    _remove(new)
    try:
        new.touch(mode=0o600)
        with closing(sqlite3.connect(new, isolation_level=None)) as connection:
            upgrade(connection)
            return salvage(damaged, connection)
    except BaseException:
        _remove(new)
        raise


def _remove(database: Path) -> None:
    for ending in _PARTS:
        Path(f"{database}{ending}").unlink(missing_ok=True)
