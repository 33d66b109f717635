"""Opens the conversation database. A damaged database is recovered, and a database of a newer version is renamed."""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path

import psutil

from engine.base.errors import ChatError, LockedError
from engine.base.language import tr
from engine.base.sqlite_file import SQLITE_ERRORS, connect_read_only, is_damage, is_lock, put_aside
from engine.base.texts import one_line
from engine.chat.recovery import damage_record, finish_recovery, is_open_elsewhere, recover
from engine.chat.schema import VERSION, calls_value, joined_calls, upgrade, version_of

BUSY_SECONDS = 10.0
"""Longest wait in seconds for a writer in another process, as window and command line may write at the same time."""
CHECKED_WHOLE_BYTES = 32 << 20
"""Size up to which a database is checked at each start, which takes about 1 ms per MB. In a larger one damage is found
when a damaged page is read.
"""


def open_database(path: Path) -> tuple[sqlite3.Connection, str]:
    """Return the connection for writing, and a sentence for people if the old database was recovered or renamed.

    The sentence is empty if the old database was neither recovered nor renamed.

    Raises:
        LockedError: another program is writing to the database.
        ChatError: no database can be opened or created at `path`.
    """
    notice = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A recovery may have been interrupted between its last steps.
        finish_recovery(path)
        if reason := _newer(path):
            if is_open_elsewhere(path):
                raise ChatError(
                    tr(
                        "{reason} Another program has the database open. Close that program, or update Layerdeck.",
                        reason=reason,
                    )
                )
            notice = _keep_aside(path, reason)
        elif reason := _damage(path):
            notice = recover(path, reason)
        try:
            connection = _open(path)
        except SQLITE_ERRORS as error:
            if notice or not is_damage(error):
                raise
            notice = recover(path, tr("The database of conversations is damaged ({error}).", error=error))
            connection = _open(path)
    except (OSError, *SQLITE_ERRORS) as error:
        if is_lock(error):
            raise lock_error() from None
        reason = getattr(error, "strerror", None) or str(error)
        raise ChatError(
            tr("The conversations cannot be saved in {path} ({reason}); check the folder.", path=path, reason=reason)
        ) from None
    return connection, notice


def lock_error() -> LockedError:
    """Return the error to show while another program is writing to the database."""
    return LockedError(tr("Another program is writing to the database of conversations; wait until it has finished."))


def open_read_only(path: Path) -> sqlite3.Connection:
    """Return a read-only connection to a conversation database. Used if the database cannot be written.

    Raises:
        ChatError: the database cannot be read, or has another version.
    """
    try:
        connection = connect_read_only(path)
        version = version_of(connection)
    except (OSError, *SQLITE_ERRORS) as error:
        raise ChatError(
            tr(
                "The conversations in {path} cannot be read ({error}); check the disk and the permissions of the file.",
                path=path,
                error=error,
            )
        ) from None
    if version != VERSION:
        connection.close()
        raise ChatError(
            tr(
                "The conversations in {path} cannot be read: their file has version {version}, but this program reads "
                "version {readable}, and cannot convert the file because the folder is read-only. Make the folder "
                "writable, or update Layerdeck.",
                path=path,
                version=version,
                readable=VERSION,
            )
        )
    return connection


def our_name() -> str:
    """Return the id that marks unfinished messages as written by this process: its process id and start time.

    The start time is needed because process ids are reused.
    """
    return name_of(os.getpid())


def name_of(pid: int) -> str:
    """Return the id that marks unfinished messages as written by the process `pid`: its process id and start time."""
    return f"{pid}:{_start_of(pid)}"


def is_alive(writer: str) -> bool:
    """Return whether the process that wrote a message still runs.

    In a confined child, which cannot see other processes, the result is True even if the process has ended. The
    messages that the ended process left unfinished are completed later by a process that is not confined.

    `writer`: id of the process (`our_name`): process id and start time.
    """
    pid, _, start = writer.partition(":")
    try:
        return _start_of(int(pid)) == start
    except (PermissionError, psutil.AccessDenied):
        return True
    except (OSError, psutil.Error, ValueError, OverflowError):
        return False


def _start_of(pid: int) -> str:
    """Return a text that identifies the start time of a process. Setting the system clock does not change it."""
    if not sys.platform.startswith("linux"):
        return f"{psutil.Process(pid).create_time():.2f}"
    # psutil's time is that of the boot and these ticks, and the former moves with the clock.
    fields = Path("/proc", str(pid), "stat").read_bytes().rpartition(b")")[2].split()
    return f"{fields[19].decode()}-{_boot()}"


@cache
def _boot() -> str:
    """Return the first digits of the kernel's boot id, which changes at each boot; empty if it cannot be read."""
    # Ticks since boot repeat after each boot; the boot id tells equal ticks of two boots apart.
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]
    return ""


def _open(path: Path) -> sqlite3.Connection:
    """Return a connection to the database. Its schema is upgraded, and unfinished messages of ended processes are
    marked as interrupted.
    """
    if not path.exists():
        path.touch(mode=0o600)  # conversations are private
    connection = _connect(path)
    try:
        upgrade(connection)
        _mend(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _mend(connection: sqlite3.Connection) -> None:
    """Mark the unfinished messages of ended processes as interrupted, and join the pieces of their text."""
    alive: Callable[[str], bool] = cache(is_alive)
    # A message without a writer has pieces if its process was taken for ended, and then wrote more.
    open_messages = connection.execute(
        "SELECT id, writer FROM message WHERE writer IS NOT NULL UNION ALL SELECT id, writer FROM message"
        " WHERE writer IS NULL AND state = 'interrupted' AND id IN (SELECT DISTINCT message FROM piece)"
    ).fetchall()
    left = [message for message, writer in open_messages if writer is None or not alive(writer)]
    if not left:
        return
    connection.execute("BEGIN IMMEDIATE")
    for message in left:
        pieces = connection.execute(
            "SELECT content, reasoning, calls FROM piece WHERE message = ? ORDER BY number", (message,)
        ).fetchall()
        content, reasoning, calls = connection.execute(
            "SELECT content, reasoning, calls FROM message WHERE id = ?", (message,)
        ).fetchone()
        with suppress(TypeError, ValueError):  # A damaged page may have any text; what cannot be read stays as it is.
            calls = calls_value(joined_calls(calls, (piece[2] for piece in pieces)))
        connection.execute(
            "UPDATE message SET content = ?, reasoning = ?, calls = ?, state = 'interrupted', writer = NULL"
            " WHERE id = ?",
            (content + "".join(p[0] for p in pieces), reasoning + "".join(p[1] for p in pieces), calls, message),
        )
        connection.execute("DELETE FROM piece WHERE message = ?", (message,))
    connection.execute("COMMIT")


def data_version(connection: sqlite3.Connection) -> int:
    """Return SQLite's `data_version`, which changes when another connection has written."""
    return int(connection.execute("PRAGMA data_version").fetchone()[0])


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    # WAL and NORMAL: a commit needs no fsync, and survives a killed process, though perhaps not a power failure.
    # secure_delete: deleted text is overwritten here. The text index has its trigrams until its parts are merged, as
    # after a purge. Copies have the text until they are removed, and a recovery may bring it back.
    for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "foreign_keys = ON", "secure_delete = ON"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def _newer(path: Path) -> str:
    """Return why this program cannot use the database if its schema version is newer; else an empty text.

    The text is also empty if the version cannot be read because the file is damaged.
    """
    try:
        with _connection_for_checks(path) as connection:
            version = version_of(connection)
    except SQLITE_ERRORS as error:
        if not is_damage(error):
            raise
        return ""
    if version <= VERSION:
        return ""
    return tr(
        "The database of conversations was written by a newer Layerdeck: it has version {version}, but this program "
        "reads version {readable}.",
        version=version,
        readable=VERSION,
    )


def _damage(path: Path) -> str:
    """Return a clause on the damage of an existing database, such as "is damaged"; empty if no damage is found."""
    try:
        with _connection_for_checks(path) as connection:
            if path.exists() and path.stat().st_size <= CHECKED_WHOLE_BYTES:
                (found,) = connection.execute("PRAGMA quick_check (1)").fetchone()
            else:
                # Reading one row of each table finds a damaged beginning.
                for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                    connection.execute(f'SELECT * FROM "{table}" LIMIT 1').fetchall()
                found = "ok"
    except SQLITE_ERRORS as error:
        if not is_damage(error):
            raise
        return tr("The database of conversations is damaged ({error}).", error=error)
    if found != "ok":
        return tr("The database of conversations is damaged ({error}).", error=one_line(found))
    return tr("The database of conversations is damaged.") if damage_record(path).exists() else ""


@contextmanager
def _connection_for_checks(path: Path) -> Iterator[sqlite3.Connection]:
    """Provide a connection for checks of a database; it is closed afterwards.

    If the file is missing or empty, the connection is to an empty database in memory.
    """
    target = path if path.exists() and path.stat().st_size else ":memory:"
    with closing(sqlite3.connect(target, timeout=BUSY_SECONDS, isolation_level=None)) as connection:
        yield connection


def _keep_aside(path: Path, reason: str) -> str:
    """Rename a database and its journal files; return a sentence about it for people.

    `reason`: a sentence on why it was renamed.
    """
    aside = put_aside(path)
    return tr(
        "{reason} The old file was kept as {name}, and a new database was created.",
        reason=reason,
        name=aside.name,
    )
