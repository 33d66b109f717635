"""SQLite files that may be damaged: what is raised for them, and how one is kept aside."""

from __future__ import annotations

import sqlite3
from pathlib import Path

FAULTS = (sqlite3.Error, UnicodeDecodeError)
"""What is raised by a connection; the second where SQLite's own message quotes a damaged page."""
_DAMAGE = ("malformed", "no such table", "no such column", "already exists", "decode to UTF-8")
_NO_DAMAGE = (
    sqlite3.OperationalError,
    sqlite3.IntegrityError,
    sqlite3.ProgrammingError,
    sqlite3.InterfaceError,
    sqlite3.DataError,
)
"""What is about the system, or about what was asked for; damage is what has no class of its own."""
_PASSING = frozenset({
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY,
})  # fmt: skip
_PRIMARY = 0xFF
"""The part of a result code that says what; the rest says where."""


def is_damage(error: Exception) -> bool:
    """Return whether the file is at fault, not another program that holds it or a disk that is full."""
    return not isinstance(error, _NO_DAMAGE) or any(words in str(error) for words in _DAMAGE)


def passes(error: Exception) -> bool:
    """Return whether the disk or another program is at fault: the same may succeed later."""
    code = getattr(error, "sqlite_errorcode", None)
    return isinstance(error, sqlite3.Error) and code is not None and (code & _PRIMARY) in _PASSING


def put_aside(path: Path) -> Path:
    """Move a database, with what belongs to it, to a name that is free; return where it is now.

    Raises:
        OSError: it cannot be moved.
    """
    number = 1
    while (aside := path.with_name(f"{path.stem}-kept-{number}{path.suffix}")).exists():
        number += 1
    for ending in ("-wal", "-shm", ""):
        part = Path(f"{path}{ending}")
        if part.exists():
            part.rename(f"{aside}{ending}")
    return aside
