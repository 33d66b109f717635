"""Classifies SQLite's errors (damage, a temporary fault, no permission), and moves a damaged file away."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from urllib.parse import quote

SQLITE_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""Exceptions of an SQLite connection. UnicodeDecodeError comes if SQLite's message quotes bytes of a damaged page."""
_DAMAGE = ("malformed", "no such table", "no such column", "already exists", "decode to UTF-8")
_NO_DAMAGE = (
    sqlite3.OperationalError,
    sqlite3.IntegrityError,
    sqlite3.ProgrammingError,
    sqlite3.InterfaceError,
    sqlite3.DataError,
)
"""Exceptions that do not mean a damaged file; for damage, `sqlite3` raises a plain `DatabaseError`."""
_TEMPORARY = frozenset({
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY,
})  # fmt: skip
_PRIMARY = 0xFF
"""Mask for SQLite's primary result code; the higher bits are the extended code."""


def is_damage(error: Exception) -> bool:
    """Return whether an error means that the file is damaged. A locked database or a full disk is no damage."""
    return not isinstance(error, _NO_DAMAGE) or any(words in str(error) for words in _DAMAGE)


def is_temporary(error: Exception) -> bool:
    """Return whether an error is temporary, so that the statement may succeed later.

    Such errors are caused by the disk or by another program.
    """
    code = getattr(error, "sqlite_errorcode", None)
    return isinstance(error, sqlite3.Error) and code is not None and (code & _PRIMARY) in _TEMPORARY


def is_lock(error: Exception) -> bool:
    """Return whether an error means that another program is writing to the file."""
    code = getattr(error, "sqlite_errorcode", None) or 0
    return isinstance(error, sqlite3.Error) and (code & _PRIMARY) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def cannot_write(error: Exception) -> bool:
    """Return whether an error means that the file cannot be written. False if another program only locks the file."""
    return isinstance(error, OSError) or (is_temporary(error) and not is_lock(error))


def connect_read_only(path: Path) -> sqlite3.Connection:
    """Return a read-only connection to a database whose folder cannot be written.

    Raises:
        sqlite3.Error: the database does not exist or cannot be read.
    """
    address = f"file:{quote(str(path.absolute()))}?mode=ro"
    try:
        return _readable(address)
    except sqlite3.Error:
        wal = Path(f"{path}-wal")
        # Without a journal the file is complete by itself, and SQLite may read it without making its shared memory.
        if not path.exists() or (wal.exists() and wal.stat().st_size):
            raise
        return _readable(f"{address}&immutable=1")


def _readable(address: str) -> sqlite3.Connection:
    connection = sqlite3.connect(address, uri=True, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except BaseException:
        connection.close()
        raise
    return connection


def put_aside(path: Path) -> Path:
    """Move a database with its journal files to an unused name, and return the new path.

    Raises:
        OSError: a file cannot be moved.
    """
    number = 1
    while (aside := path.with_name(f"{path.stem}-kept-{number}{path.suffix}")).exists():
        number += 1
    # The journals first: SQLite would apply one that stayed behind to the next database of this name.
    for ending in ("-wal", "-shm", ""):
        part = Path(f"{path}{ending}")
        if part.exists():
            part.rename(f"{aside}{ending}")
    return aside
