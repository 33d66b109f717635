"""The library's memory: one SQLite file with what headers said, what people noted, and what was forecast.

It can be made again from the files, but for notes and named layouts: a file that is damaged or from a newer version is
kept aside, never written over.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from engine.base.errors import LibraryError
from engine.base.json_file import UNREADABLE
from engine.base.language import tr
from engine.base.sqlite_file import FAULTS, is_damage, put_aside
from engine.base.texts import shorten
from engine.library.census import Census
from engine.library.facts import Facts
from engine.library.fit import Fit
from engine.library.notes import NO_NOTES, KeptDocument, Notes

SCHEMA_VERSION = 1
MAX_OPENED = 200
"""Models that were opened and are remembered for it; the latest count."""
MAX_SHOWN_PATH = 400
BUSY_TIMEOUT_S = 5.0
"""Window and command line may write at the same time."""

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
_LATER = "CREATE TABLE IF NOT EXISTS opened (path TEXT PRIMARY KEY, at REAL NOT NULL) WITHOUT ROWID"
"""What a file of version 1 may lack; older programs do not mind it."""

_Key = TypeVar("_Key")
_Kept = TypeVar("_Kept")
State = tuple[int, int, int]
"""Size, time of change (ns) and inode of a file."""


class LibraryIndex:
    """One open index, for any thread: calls take turns. `set_aside` is where an unusable one was moved, else None."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.set_aside: Path | None = None
        self._lock = threading.Lock()
        self._connection = self._open()

    def close(self) -> None:
        """Close the file; later calls fail."""
        with self._lock:
            self._connection.close()

    # ------------------------------------------------------------------ what was found

    def census(self) -> Census:
        """Return the last look at the stores, an empty one where there is none."""
        row = self._one("SELECT document FROM census")
        try:
            return msgspec.msgpack.decode(row[0], type=Census, dec_hook=_decode) if row is not None else Census()
        except (TypeError, *UNREADABLE):
            return Census()

    def keep_census(self, census: Census) -> None:
        """Keep a look at the stores as the last one."""
        document = msgspec.msgpack.encode(census, enc_hook=str)
        with self._writing() as connection:
            connection.execute("INSERT OR REPLACE INTO census VALUES (1, ?)", (document,))

    def folders(self) -> tuple[Path, ...]:
        """Return the folders that people added, in their order."""
        rows = self._all("SELECT path FROM folders ORDER BY place")
        return tuple(Path(path) for (path,) in rows if _is_text(path))

    def keep_folders(self, folders: Iterable[Path]) -> None:
        """Keep these as the folders that people added."""
        with self._writing() as connection:
            connection.execute("DELETE FROM folders")
            rows = [(str(folder), place) for place, folder in enumerate(dict.fromkeys(folders))]
            connection.executemany("INSERT INTO folders VALUES (?, ?)", rows)

    def opened(self) -> tuple[Path, ...]:
        """Return the models that people opened, the latest first: each by its only file or its first part."""
        return tuple(Path(row[0]) for row in self._all("SELECT path FROM opened ORDER BY at DESC, path"))

    def keep_opened(self, path: Path, at_s: float) -> None:
        """Keep that a model was opened, in seconds since 1970."""
        with self._writing() as connection:
            connection.execute("INSERT OR REPLACE INTO opened VALUES (?, ?)", (str(path), at_s))
            latest = f"SELECT path FROM opened ORDER BY at DESC, path LIMIT {MAX_OPENED}"
            connection.execute(f"DELETE FROM opened WHERE path NOT IN ({latest})")

    def forget_opened(self, paths: Iterable[Path]) -> None:
        """Forget that these were opened."""
        with self._writing() as connection:
            connection.executemany("DELETE FROM opened WHERE path = ?", [(str(path),) for path in paths])

    # ------------------------------------------------------------------ what files say

    def facts(self) -> dict[Path, tuple[State, Facts]]:
        """Return what is known of files, with the states in which they were read."""
        rows = self._all("SELECT path, size_bytes, mtime_ns, inode, facts FROM facts")
        read = _readable((((Path(row[0]), row[1:4]), row[4]) for row in rows if _is_text(row[0])), Facts)
        return {path: (state, facts) for (path, state), facts in read}

    def keep_facts(self, known: Mapping[Path, tuple[State, Facts]]) -> None:
        """Keep what was read of files."""
        encoder = msgspec.msgpack.Encoder()
        rows = [(str(path), *state, encoder.encode(facts)) for path, (state, facts) in known.items()]
        with self._writing() as connection:
            connection.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?, ?, ?, ?)", rows)

    def hashes(self) -> dict[Path, tuple[State, str]]:
        """Return the SHA-256 of files whose content was read, with their states then."""
        rows = self._all("SELECT path, size_bytes, mtime_ns, inode, sha256 FROM hashes")
        return {Path(row[0]): (row[1:4], row[4]) for row in rows if _is_text(row[0])}

    def keep_hash(self, path: Path, state: State, sha256: str) -> None:
        """Keep the SHA-256 of a file."""
        with self._writing() as connection:
            connection.execute("INSERT OR REPLACE INTO hashes VALUES (?, ?, ?, ?, ?)", (str(path), *state, sha256))

    # ------------------------------------------------------------------ what people said

    def notes(self) -> dict[str, Notes]:
        """Return what is noted of models, by fingerprint."""
        return dict(_readable(self._all("SELECT fingerprint, notes FROM notes"), Notes))

    def keep_notes(self, fingerprints: Iterable[str], notes: Notes) -> None:
        """Keep `notes` of models; empty ones are forgotten."""
        marks = [(mark,) for mark in fingerprints if mark]
        document = msgspec.msgpack.encode(notes)
        with self._writing() as connection:
            connection.executemany("DELETE FROM notes WHERE fingerprint = ?", marks)
            if notes != NO_NOTES:
                connection.executemany("INSERT INTO notes VALUES (?, ?)", [(mark, document) for (mark,) in marks])

    def documents(self, fingerprint: str) -> tuple[KeptDocument, ...]:
        """Return the named layouts and presets of a model."""
        rows = self._all(
            "SELECT kind, name, document FROM documents WHERE fingerprint = ? ORDER BY kind, name", (fingerprint,)
        )
        return tuple(KeptDocument(*row) for row in rows if all(map(_is_text, row)))

    def keep_document(self, fingerprint: str, document: KeptDocument) -> None:
        """Keep a layout or a preset under its name, in the place of one that had it."""
        with self._writing() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO documents VALUES (?, ?, ?, ?)",
                (fingerprint, document.kind, document.name, document.text),
            )

    def forget_document(self, fingerprint: str, kind: str, name: str) -> None:
        """Forget a layout or a preset."""
        with self._writing() as connection:
            connection.execute(
                "DELETE FROM documents WHERE fingerprint = ? AND kind = ? AND name = ?", (fingerprint, kind, name)
            )

    # ------------------------------------------------------------------ what was forecast

    def fits(self, rig: str) -> dict[str, Fit]:
        """Return the forecasts for a rig, by fingerprint of the model."""
        return dict(_readable(self._all("SELECT fingerprint, fit FROM fits WHERE rig = ?", (rig,)), Fit))

    def keep_fits(self, rig: str, fits: Mapping[str, Fit]) -> None:
        """Keep forecasts for a rig."""
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
                return self._connect()
            except (*FAULTS, _NewerError) as error:
                if not is_damage(error):
                    raise
                self.set_aside = put_aside(self.path)
                return self._connect()
        except (OSError, *FAULTS) as error:
            reason = getattr(error, "strerror", None) or error
            raise LibraryError(
                tr(
                    "What is known of models cannot be kept in {path} ({reason}); check the folder.",
                    path=shorten(str(self.path), MAX_SHOWN_PATH),
                    reason=reason,
                )
            ) from error

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S, check_same_thread=False, isolation_level=None)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
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
            connection.execute("SELECT count(*) FROM notes").fetchone()
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
            except FAULTS as error:
                raise LibraryError(
                    tr("{path}: the library's index cannot be read ({error}).", path=self.path, error=error)
                ) from error

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                try:
                    yield self._connection
                except BaseException:
                    self._connection.execute("ROLLBACK")
                    raise
                self._connection.execute("COMMIT")
            except FAULTS as error:
                raise LibraryError(
                    tr("{path}: the library's index cannot be written ({error}).", path=self.path, error=error)
                ) from error


class _NewerError(Exception):
    """The file was written by a later version."""


def _is_text(value: object) -> bool:
    """Return whether a column has the text that it was given: in a damaged file it may have anything."""
    return isinstance(value, str)


def _readable(rows: Iterable[tuple[_Key, bytes]], kind: type[_Kept]) -> Iterator[tuple[_Key, _Kept]]:
    """Yield the rows whose document can be read; what cannot is found out anew."""
    decoder = msgspec.msgpack.Decoder(kind)
    for key, document in rows:
        with suppress(TypeError, *UNREADABLE):
            yield key, decoder.decode(document)


@lru_cache(maxsize=256)
def _path(text: str) -> Path:
    """Return a path, the same one for the store that thousands of files are in."""
    return Path(text)


def _decode(kind: type, value: object) -> object:
    if kind is Path or issubclass(kind, Path):
        return _path(str(value))
    raise NotImplementedError(kind)
