"""What the window knows of the library, and the steps by which it learns more. No Qt: every step is for a thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from app.library.shelf import Pace, Shelf
from engine.cancellation import CancelToken
from engine.devices.device import Rig
from engine.fit.strategies.constraints import Constraints
from engine.language import tr
from engine.library.census import Census
from engine.library.changes import Changes
from engine.library.children import plan_models
from engine.library.duplicates import Duplicates, find_duplicates, sha256_of, suspects
from engine.library.errors import LibraryError
from engine.library.facts import Facts, fingerprint
from engine.library.fit import Fit
from engine.library.index import LibraryIndex
from engine.library.looking import current_facts, list_models, look, read_facts_of, unread
from engine.library.notes import NO_NOTES, KeptDocument, Notes
from engine.library.planning import jobs
from engine.library.scan import is_stale
from engine.library.settled import rig_key
from engine.library.stores import Store, folder_stores, known_stores, opened_stores
from engine.library.walking import is_text


class Stock:
    """One for a window. Steps may run at the same time; what they learn is put together under a lock."""

    def __init__(self, path: Path, stores: Callable[[], Sequence[Store]] | None = None) -> None:
        self._path = path
        self._stores = stores or (lambda: known_stores(os.environ, Path.home()))
        self._lock = threading.Lock()
        self._index: LibraryIndex | None = None
        self._closed = False
        self._census = Census()
        self._facts: dict[Path, Facts] = {}
        self._fits: dict[str, Fit] = {}
        self._rig_key = ""
        self._is_looked = False

    def close(self) -> None:
        """Close the index; steps that are under way fail."""
        with self._lock:
            self._closed = True
            if self._index is not None:
                self._index.close()

    @property
    def index(self) -> LibraryIndex:
        """The index, opened when it is first asked for."""
        with self._lock:
            if self._closed:
                raise LibraryError(tr("The library is closed."))
            if self._index is None:
                self._index = LibraryIndex(self._path)
            return self._index

    # ------------------------------------------------------------------ the list

    def known(self) -> Shelf:
        """Return what the last look found, without looking."""
        index = self.index
        census, facts = index.census(), index.facts()
        with self._lock:
            self._census = census
            self._facts = current_facts(census, facts)
        return self.shelf()

    def shelf(self) -> Shelf:
        """Return the list as it is known now."""
        index = self.index
        with self._lock:
            census, facts, fits = self._census, dict(self._facts), dict(self._fits)
        return Shelf(
            list_models(census.files, facts, index.notes(), fits),
            index.folders(),
            tuple(problem.sentence for problem in census.problems),
            len(census.files),
            "" if index.set_aside is None else str(index.set_aside),
            self._is_looked,
        )

    def look(self) -> Changes:
        """Look into all stores, and return what became of the files of the last look."""
        index = self.index
        census, changes = look(index, self._places(index))
        facts = current_facts(census, index.facts())
        with self._lock:
            self._census, self._facts, self._is_looked = census, facts, True
        return changes

    def is_stale(self) -> bool:
        """Return whether the stores are not as they were looked at, or others by now."""
        index = self.index
        with self._lock:
            census = self._census
        return set(self._places(index)) != set(census.stores) or is_stale(census)

    def _places(self, index: LibraryIndex) -> tuple[Store, ...]:
        # What was only opened comes last: where another store has it too, it is that one's.
        return (*folder_stores(index.folders()), *self._stores(), *opened_stores(index.opened()))

    def read_headers(self, tell: Callable[[int, int], None], token: CancelToken) -> None:
        """Read the headers that are not known, and keep what they say; `tell` is told how many of how many."""
        index = self.index
        with self._lock:
            census = self._census
            wanted = unread(census, self._facts)
        pace = Pace(len(census.files))
        n_read = 0

        def take(path: Path, facts: Facts) -> None:
            nonlocal n_read
            n_read += 1
            with self._lock:
                self._facts[path] = facts
            if pace.is_due():
                tell(n_read, len(wanted))

        if wanted:
            tell(0, len(wanted))
            index.keep_facts(read_facts_of(census, wanted, take, token))

    def plan(
        self, rig: Rig, strategy: str, constraints: Constraints, tell: Callable[[int, int], None], token: CancelToken
    ) -> None:
        """Forecast what is not known for `rig`, and keep it; `tell` is told how many of how many."""
        index = self.index
        key = rig_key(rig, constraints, strategy)
        kept = index.fits(key)
        with self._lock:
            self._rig_key, self._fits = key, kept
            census, facts = self._census, dict(self._facts)
        wanted = jobs((model.entry for model in list_models(census.files, facts, {}, {})), kept)
        pace = Pace(len(census.files))
        fresh: dict[str, Fit] = {}
        n_planned = 0

        def take(mark: str, fit: Fit) -> None:
            nonlocal n_planned
            n_planned += 1
            fresh[mark] = fit
            with self._lock:
                if self._rig_key == key:
                    self._fits[mark] = fit
            if pace.is_due():
                index.keep_fits(key, fresh)
                fresh.clear()
                tell(n_planned, len(wanted))

        tell(0, len(wanted))
        plan_models(wanted, rig, strategy, constraints, take, token)
        if not token.cancelled:
            index.keep_fits(key, fresh)

    # ------------------------------------------------------------------ what people say

    def set_folders(self, folders: Iterable[Path]) -> None:
        """Keep which folders people added."""
        self.index.keep_folders(folders)

    def note(self, marks: Iterable[str], change: Mapping[str, object]) -> None:
        """Change fields of the notes of models."""
        index, marks = self.index, tuple(marks)
        known = index.notes()
        for mark in marks:
            index.keep_notes((mark,), msgspec.structs.replace(known.get(mark, NO_NOTES), **change))

    def note_opened(self, path: Path, at_s: float) -> Notes:
        """Note when the model at `path`, its first part, was opened, in seconds since 1970; return its notes."""
        if is_text(str(path)):
            self.index.keep_opened(path, at_s)
        self.note_use(path, {"last_used": at_s})
        return self.index.notes().get(fingerprint(path), NO_NOTES)

    def note_use(self, path: Path, change: Mapping[str, object]) -> None:
        """Change fields of the notes of the model at `path`."""
        mark = fingerprint(path)
        if mark:
            self.note((mark,), change)

    def forget_missing(self, paths: Iterable[Path]) -> None:
        """List these files no longer: they are gone, or in the trash."""
        gone = set(paths)
        with self._lock:
            files = tuple(file for file in self._census.files if file.path not in gone)
            self._census = replace(self._census, files=files)
            census = self._census
        self.index.keep_census(census)
        self.index.forget_opened(gone)

    def documents(self, marks: Iterable[str]) -> tuple[KeptDocument, ...]:
        """Return the named layouts and presets of a model."""
        found = {(each.kind, each.name): each for mark in marks for each in self.index.documents(mark)}
        return tuple(found.values())

    def keep_for(self, path: Path, document: KeptDocument) -> None:
        """Keep a layout or a preset of the model at `path` under its name."""
        mark = fingerprint(path)
        if not mark:
            raise LibraryError(
                tr("{name} cannot be read any more; {name2} was not kept.", name=path.name, name2=document.name)
            )
        self.index.keep_document(mark, document)

    def forget_document(self, marks: Iterable[str], kind: str, name: str) -> None:
        """Forget a layout or a preset."""
        for mark in marks:
            self.index.forget_document(mark, kind, name)

    # ------------------------------------------------------------------ twice the same

    def duplicates(self, tell: Callable[[int, int], None], token: CancelToken) -> tuple[Duplicates, ...]:
        """Return what is there twice; contents that could be alike are read once, and their hashes kept.

        `tell` is told how many bytes of how many were read.
        """
        index = self.index
        with self._lock:
            files = self._census.files
        states = {file.path: file.state for file in files}
        hashes = {path: sha256 for path, (state, sha256) in index.hashes().items() if states.get(path) == state}
        unknown = [file for file in suspects(files) if file.sha256 is None and file.path not in hashes]
        total_bytes, read_bytes = sum(file.size_bytes for file in unknown), 0
        pace = Pace(0)

        def count(n_bytes: int) -> None:
            nonlocal read_bytes
            read_bytes += n_bytes
            if pace.is_due():
                tell(read_bytes, total_bytes)

        for file in unknown:
            try:
                sha256 = sha256_of(file.path, token, count)
            except OSError:
                continue
            if sha256 is None:
                break
            hashes[file.path] = sha256
            index.keep_hash(file.path, file.state, sha256)
        return find_duplicates(files, hashes)
