"""The library's index: one SQLite file with values from headers, notes of the user, and forecasts.

Everything but notes, named layouts and presets can be made again from the model files. A damaged index, or one of a
newer version, is renamed and never overwritten.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from engine.base.errors import LibraryError
from engine.base.json_file import UNREADABLE
from engine.base.language import tr
from engine.base.sqlite_file import SQLITE_ERRORS, cannot_write, connect_read_only, is_damage, put_aside
from engine.base.texts import shorten
from engine.library.census import Census
from engine.library.facts import Facts
from engine.library.fit import Fit
from engine.library.notes import NO_NOTES, Notes, SavedDocument

SCHEMA_VERSION = 1
# Opened models that are remembered; older ones are forgotten.
MAX_OPENED = 200
MAX_SHOWN_PATH = 400
# Seconds to wait for a lock: window and command line may write at the same time.
BUSY_TIMEOUT_S = 5.0

_SCHEMA = """
CREATE TABLE census (id INTEGER PRIMARY KEY CHECK (id = 1), document BLOB NOT NULL);
CREATE TABLE folders (path TEXT PRIMARY KEY, place INTEGER NOT NULL);
CREATE TABLE facts (
    path TEXT PRIMARY KEY, size_bytes INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, inode INTEGER NOT NULL,
    facts BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE hashes (
    path TEXT PRIMARY KEY, size_bytes INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, inode INTEGER NOT NULL,
    sha256 TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE notes (fingerprint TEXT PRIMARY KEY, notes BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE fits (
    rig TEXT NOT NULL, fingerprint TEXT NOT NULL, fit BLOB NOT NULL, PRIMARY KEY (rig, fingerprint)) WITHOUT ROWID;
CREATE TABLE documents (
    fingerprint TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, document TEXT NOT NULL,
    PRIMARY KEY (fingerprint, kind, name)) WITHOUT ROWID;
"""
# A table that files of version 1 may lack. Older programs ignore it.
_LATER = "CREATE TABLE IF NOT EXISTS opened (path TEXT PRIMARY KEY, at REAL NOT NULL) WITHOUT ROWID"

_Key = TypeVar("_Key")
_Kept = TypeVar("_Kept")
# Size, modification time (ns) and inode of a file.
State = tuple[int, int, int]


class LibraryIndex:
    """An open index of the library (a SQLite file). May be used in any thread; a lock serialises the calls.

    All methods raise `LibraryError` if the file cannot be read or written.

    `set_aside`: new path of an index that was unusable and was renamed, None if there was none.
    `not_saved`: why the file cannot be written, as a sentence; else empty. If it cannot be written, the index is kept
    in memory, and changes are lost when the program ends.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.set_aside: Path | None = None
        self.not_saved = ""
        self._lock = threading.Lock()
        self._connection = self._open()

    def close(self) -> None:
        """Close the SQLite connection. Later calls of other methods fail."""
        with self._lock:
            self._connection.close()

    # ------------------------------------------------------------------ what was found

    def census(self) -> Census:
        """Return the result of the last scan; an empty one if none was saved."""
        row = self._one("SELECT document FROM census")
        try:
            return msgspec.msgpack.decode(row[0], type=Census, dec_hook=_decode) if row is not None else Census()
        # In a damaged file the column may hold a number in place of bytes.
        except (TypeError, *UNREADABLE):
            return Census()

    def save_census(self, census: Census) -> None:
        """Save the result of a scan, in place of the last one."""
        # msgpack has no type for paths.
        document = msgspec.msgpack.encode(census, enc_hook=str)
        with self._writing() as connection:
            connection.execute("INSERT OR REPLACE INTO census VALUES (1, ?)", (document,))

    def folders(self) -> tuple[Path, ...]:
        """Return the folders that the user added, in the user's order."""
        rows = self._all("SELECT path FROM folders ORDER BY place")
        return tuple(Path(path) for (path,) in rows if _is_text(path))

    def save_folders(self, folders: Iterable[Path]) -> None:
        """Save the folders that the user added, in place of the saved list."""
        with self._writing() as connection:
            connection.execute("DELETE FROM folders")
            rows = [(str(folder), number) for number, folder in enumerate(dict.fromkeys(folders))]
            connection.executemany("INSERT INTO folders VALUES (?, ?)", rows)

    def opened(self) -> tuple[Path, ...]:
        """Return the opened models, the most recent first. Each is the path of its only file or of its first part."""
        return tuple(Path(row[0]) for row in self._all("SELECT path FROM opened ORDER BY at DESC, path"))

    def save_opened(self, path: Path, at_s: float) -> None:
        """Save that the model at `path` was opened at `at_s`, in seconds since 1970.

        Only the last `MAX_OPENED` are kept.
        """
        with self._writing() as connection:
            connection.execute("INSERT OR REPLACE INTO opened VALUES (?, ?)", (str(path), at_s))
            latest = f"SELECT path FROM opened ORDER BY at DESC, path LIMIT {MAX_OPENED}"
            connection.execute(f"DELETE FROM opened WHERE path NOT IN ({latest})")

    def forget_opened(self, paths: Iterable[Path]) -> None:
        """Remove `paths` from the list of opened models."""
        with self._writing() as connection:
            connection.executemany("DELETE FROM opened WHERE path = ?", [(str(path),) for path in paths])

    # ------------------------------------------------------------------ what files say

    def facts(self) -> dict[Path, tuple[State, Facts]]:
        """Return the saved values from headers of models and side files, by the path of a model's first part.

        Each value also has the state of the model (size, modification time, inode) when its headers were read.
        """
        rows = self._all("SELECT path, size_bytes, mtime_ns, inode, facts FROM facts")
        read = _readable((((Path(row[0]), row[1:4]), row[4]) for row in rows if _is_text(row[0])), Facts)
        return {path: (state, facts) for (path, state), facts in read}

    def save_facts(self, known: Mapping[Path, tuple[State, Facts]]) -> None:
        """Save values that were read from the headers of model files and side files.

        `known`: header values by path of the first part, each with the state of the model (size, modification time,
        inode) when its headers were read.
        """
        encoder = msgspec.msgpack.Encoder()
        rows = [(str(path), *state, encoder.encode(facts)) for path, (state, facts) in known.items()]
        with self._writing() as connection:
            connection.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?, ?, ?, ?)", rows)

    def hashes(self) -> dict[Path, tuple[State, str]]:
        """Return the saved SHA-256 hashes of files. The keys are paths.

        Each value also has the state of the file (size, modification time, inode) when it was hashed.
        """
        rows = self._all("SELECT path, size_bytes, mtime_ns, inode, sha256 FROM hashes")
        return {Path(row[0]): (row[1:4], row[4]) for row in rows if _is_text(row[0])}

    def save_hash(self, path: Path, state: State, sha256: str) -> None:
        """Save the SHA-256 of a file. `state`: size, modification time and inode of the file when it was hashed."""
        with self._writing() as connection:
            connection.execute("INSERT OR REPLACE INTO hashes VALUES (?, ?, ?, ?, ?)", (str(path), *state, sha256))

    # ------------------------------------------------------------------ what people said

    def notes(self) -> dict[str, Notes]:
        """Return all notes. The keys are fingerprints of model files."""
        return dict(_readable(self._all("SELECT fingerprint, notes FROM notes"), Notes))

    def change_notes(self, fingerprints: Iterable[str], change: Callable[[Notes], Notes]) -> None:
        """Pass the saved notes of each fingerprint to `change`, and save its result. Empty notes are deleted.

        Reading and saving are one transaction, so changes by other threads and processes are not lost.
        """
        with self._writing() as connection:
            for mark in filter(None, fingerprints):
                rows = connection.execute("SELECT fingerprint, notes FROM notes WHERE fingerprint = ?", (mark,))
                notes = change(dict(_readable(rows, Notes)).get(mark, NO_NOTES))
                connection.execute("DELETE FROM notes WHERE fingerprint = ?", (mark,))
                if notes != NO_NOTES:
                    connection.execute("INSERT INTO notes VALUES (?, ?)", (mark, msgspec.msgpack.encode(notes)))

    def documents(self, fingerprint: str) -> tuple[SavedDocument, ...]:
        """Return the saved layouts and presets of the model with this fingerprint."""
        rows = self._all(
            "SELECT kind, name, document FROM documents WHERE fingerprint = ? ORDER BY kind, name", (fingerprint,)
        )
        return tuple(SavedDocument(*row) for row in rows if all(map(_is_text, row)))

    def save_document(self, fingerprint: str, document: SavedDocument) -> None:
        """Save a layout or preset of the model with this fingerprint, in place of a saved one with the same kind and
        name.
        """
        with self._writing() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO documents VALUES (?, ?, ?, ?)",
                (fingerprint, document.kind, document.name, document.text),
            )

    def forget_document(self, fingerprint: str, kind: str, name: str) -> None:
        """Delete the layout or preset with this kind and name of the model with this fingerprint."""
        with self._writing() as connection:
            connection.execute(
                "DELETE FROM documents WHERE fingerprint = ? AND kind = ? AND name = ?", (fingerprint, kind, name)
            )

    # ------------------------------------------------------------------ what was forecast

    def fits(self, rig: str) -> dict[str, Fit]:
        """Return the saved forecasts for a rig, by fingerprint of the model file. `rig`: key of the rig (`rig_key`)."""
        return dict(_readable(self._all("SELECT fingerprint, fit FROM fits WHERE rig = ?", (rig,)), Fit))

    def save_fits(self, rig: str, fits: Mapping[str, Fit]) -> None:
        """Save forecasts for a rig.

        `rig`: key of the rig (`rig_key`). `fits`: forecasts by fingerprint of the model file.
        """
        encoder = msgspec.msgpack.Encoder()
        with self._writing() as connection:
            connection.executemany(
                "INSERT OR REPLACE INTO fits VALUES (?, ?, ?)",
                [(rig, mark, encoder.encode(fit)) for mark, fit in fits.items()],
            )

    # ------------------------------------------------------------------ the file

    def _open(self) -> sqlite3.Connection:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                return self._connect(self.path)
            except (*SQLITE_ERRORS, _NewerError) as error:
                if not is_damage(error):
                    raise
                self.set_aside = put_aside(self.path)
                return self._connect(self.path)
        except (OSError, *SQLITE_ERRORS) as error:
            reason = getattr(error, "strerror", None) or error
            sentence = tr(
                "The library's index cannot be saved in {path} ({reason}); check the folder.",
                path=shorten(str(self.path), MAX_SHOWN_PATH),
                reason=reason,
            )
            if not cannot_write(error):
                raise LibraryError(sentence) from error
            self.not_saved = sentence
            return self._copy_in_memory()

    def _copy_in_memory(self) -> sqlite3.Connection:
        """Return a copy in memory of an index file that cannot be written.

        The copy is empty if the file cannot be read either, or has another schema version.
        """
        connection = self._connect(":memory:")
        with suppress(OSError, *SQLITE_ERRORS), closing(connect_read_only(self.path)) as source:
            # An index of another version has other tables.
            if source.execute("PRAGMA user_version").fetchone()[0] == SCHEMA_VERSION:
                source.backup(connection)
        return connection

    def _connect(self, path: Path | str) -> sqlite3.Connection:
        # Autocommit (`isolation_level=None`): `_writing` begins and ends transactions itself.
        connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, check_same_thread=False, isolation_level=None)
        try:
            # With WAL the command line can read while the window writes.
            connection.execute("PRAGMA journal_mode = WAL")
            # With WAL a power loss may then cost the last transactions, but does not damage the file (SQLite's pragma
            # page).
            connection.execute("PRAGMA synchronous = NORMAL")
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version > SCHEMA_VERSION:
                raise _NewerError
            if version == 0:
                # Window and command line may make the file at the same time: the second one finds it made.
                connection.execute("BEGIN IMMEDIATE")
                if connection.execute("PRAGMA user_version").fetchone()[0] == 0:
                    for statement in filter(str.strip, _SCHEMA.split(";")):
                        connection.execute(statement)
                    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
                connection.execute("COMMIT")
            connection.execute(_LATER)
            # Notes cannot be made again, so their damage has to show now, while the file can still be set aside.
            connection.execute("SELECT count(*) FROM notes").fetchone()
            # A file that only may be read is opened without an error.
            _require_writable(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _one(self, query: str) -> Any:
        return next(iter(self._all(query)), None)

    def _all(self, query: str, values: tuple[str, ...] = ()) -> list[Any]:
        with self._lock:
            try:
                return self._connection.execute(query, values).fetchall()
            except SQLITE_ERRORS as error:
                raise LibraryError(
                    tr(
                        "The library's index {path} cannot be read ({error}); check the disk and the permissions.",
                        path=self.path,
                        error=error,
                    )
                ) from error

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                # IMMEDIATE takes the write lock now and waits for it. A transaction that begins with a read may fail
                # without waiting.
                self._connection.execute("BEGIN IMMEDIATE")
                try:
                    yield self._connection
                except BaseException:
                    self._connection.execute("ROLLBACK")
                    raise
                self._connection.execute("COMMIT")
            except SQLITE_ERRORS as error:
                raise LibraryError(
                    tr(
                        "The library's index {path} cannot be written ({error}); check the disk and the permissions.",
                        path=self.path,
                        error=error,
                    )
                ) from error


def _require_writable(connection: sqlite3.Connection) -> None:
    try:
        connection.execute("BEGIN IMMEDIATE")
        # `BEGIN IMMEDIATE` alone succeeds for a database that only may be read. This write changes nothing.
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    except sqlite3.OperationalError as error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        # Another program that holds the lock now has most likely released it at the next save.
        if cannot_write(error):
            raise
    else:
        connection.execute("ROLLBACK")


class _NewerError(Exception):
    """The index file was written by a newer version of the program."""


def _is_text(value: object) -> bool:
    """Return whether a column of a row holds text. In a damaged file it may hold any type."""
    return isinstance(value, str)


def _readable(rows: Iterable[tuple[_Key, bytes]], kind: type[_Kept]) -> Iterator[tuple[_Key, _Kept]]:
    """Yield the key and the decoded value of each row.

    `rows`: pairs of a key and MessagePack bytes. Rows that cannot be decoded are left out, and their values are
    computed again later.
    `kind`: class of the values.
    """
    decoder = msgspec.msgpack.Decoder(kind)
    for key, document in rows:
        with suppress(TypeError, *UNREADABLE):
            yield key, decoder.decode(document)


@lru_cache(maxsize=256)
def _path(text: str) -> Path:
    """Return the `Path` of a text.

    Equal texts share one object, because thousands of files have the same store root.
    """
    return Path(text)


def _decode(kind: type, value: object) -> object:
    if kind is Path or issubclass(kind, Path):
        return _path(str(value))
    raise NotImplementedError(kind)
