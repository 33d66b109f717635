"""The models found on this computer, and the steps of a scan. No Qt.

Each step reads many files, so it runs in a background thread.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

import msgspec
from msgspec import Struct

from engine.base.cancellation import CancelToken
from engine.base.errors import LibraryError
from engine.base.language import tr
from engine.base.values import replace
from engine.devices.device import Rig
from engine.library.census import Census, Changes
from engine.library.children import plan_models
from engine.library.duplicates import Duplicates, find_duplicates, sha256_of, suspects
from engine.library.facts import Facts, fingerprint
from engine.library.fit import Fit
from engine.library.index import LibraryIndex
from engine.library.listed import Listed
from engine.library.notes import NO_NOTES, Notes, SavedDocument
from engine.library.planning import jobs, rig_key
from engine.library.refresh import current_facts, list_models, read_missing, rescan, unread
from engine.library.scan import is_stale
from engine.library.stores import Store, folder_stores, known_stores, opened_stores
from engine.library.walking import is_text
from engine.model.gguf.parts import named_parts
from engine.planning.fit.strategies.constraints import Constraints

# Least seconds between two lists: headers and forecasts arrive by the hundred.
REPORT_EVERY_S = 0.5
# Number of files whose list takes so long to make that it is made less often.
_LARGE = 2000
_REPORT_LARGE_EVERY_S = 2.0


class LibraryContents(Struct, frozen=True):
    """A snapshot of the library.

    `models`: the list of models. `folders`: folders that the user has added.
    `problems`: a sentence for each folder that could not be read.
    `aside`: path to which an unusable index file was renamed; empty if there was none.
    `is_scanned`: whether the folders have been scanned since the window was opened.
    """

    models: tuple[Listed, ...] = ()
    folders: tuple[Path, ...] = ()
    problems: tuple[str, ...] = ()
    aside: str = ""
    is_scanned: bool = False


class ProgressLimit:
    """Limits how often the progress of a scan is reported. The interval is longer for a library of many files."""

    def __init__(self, n_files: int) -> None:
        self._every_s = REPORT_EVERY_S if n_files < _LARGE else _REPORT_LARGE_EVERY_S
        self._last_s = time.monotonic()

    def is_due(self) -> bool:
        """Return whether an interval has passed since the last report. If so, this call counts as a report."""
        now_s = time.monotonic()
        if now_s - self._last_s < self._every_s:
            return False
        self._last_s = now_s
        return True


class LibraryCatalogue:
    """Holds the results of scans: model files, their headers, and forecasts of their memory.

    An SQLite database (the index) stores them on disk. Calls access the disk, so they run in background threads.
    Several of them may run at the same time; a lock protects the results.
    """

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
        self._is_scanned = False

    def close(self) -> None:
        """Close the index of the library. A scan that is still running then fails."""
        with self._lock:
            self._closed = True
            if self._index is not None:
                self._index.close()

    @property
    def index(self) -> LibraryIndex:
        """The library's index (an SQLite database), opened at first use."""
        with self._lock:
            if self._closed:
                raise LibraryError(tr("The library has been closed."))
            # Under the lock: two steps may be the first ones at the same time.
            if self._index is None:
                self._index = LibraryIndex(self._path)
            return self._index

    # ------------------------------------------------------------------ the list

    def load(self) -> LibraryContents:
        """Read the results of the last scan from the index and return them, without a new scan."""
        index = self.index
        census, facts = index.census(), index.facts()
        with self._lock:
            self._census = census
            self._facts = current_facts(census, facts)
        return self.contents()

    def contents(self) -> LibraryContents:
        """Return the list of models with the headers, notes and forecasts that are known now."""
        index = self.index
        with self._lock:
            # Copies: another step may change the dictionaries while the list is made.
            census, facts, fits = self._census, dict(self._facts), dict(self._fits)
        return LibraryContents(
            list_models(census.files, facts, index.notes(), fits),
            index.folders(),
            (*filter(None, [index.not_saved]), *(problem.sentence for problem in census.problems)),
            "" if index.set_aside is None else str(index.set_aside),
            self._is_scanned,
        )

    def scan(self) -> Changes:
        """Scan all model folders, and return the differences from the last scan."""
        index = self.index
        census, changes = rescan(index, self._all_stores(index))
        facts = current_facts(census, index.facts())
        with self._lock:
            self._census, self._facts, self._is_scanned = census, facts, True
        return changes

    def is_stale(self) -> bool:
        """Return whether the model folders, or files in them, have changed since the last scan."""
        index = self.index
        with self._lock:
            census = self._census
        return set(self._all_stores(index)) != set(census.stores) or is_stale(census)

    def other_stores(self) -> tuple[Store, ...]:
        """Return the model folders of other programs. A returned folder need not exist."""
        return tuple(self._stores())

    def _all_stores(self, index: LibraryIndex) -> tuple[Store, ...]:
        # Opened files come last: a file that is in another store as well belongs to that one.
        return (*folder_stores(index.folders()), *self.other_stores(), *opened_stores(index.opened()))

    def read_headers(self, report: Callable[[int, int], None], token: CancelToken, *, retries: bool = True) -> None:
        """Read the GGUF headers that the index lacks.

        `report`: called with the number of headers read so far, and the number of headers to read in all.
        `retries`: whether headers that could not be read before are tried again.
        """
        index = self.index
        with self._lock:
            census = self._census
            wanted = unread(census, self._facts, retries=retries)
        limit = ProgressLimit(len(census.files))
        n_read = 0

        def take(path: Path, facts: Facts) -> None:
            nonlocal n_read
            n_read += 1
            with self._lock:
                self._facts[path] = facts
            if limit.is_due():
                report(n_read, len(wanted))

        if wanted:
            report(0, len(wanted))
            read_missing(index, census, wanted, take, token)

    def plan(
        self,
        rig: Rig,
        strategy: str,
        constraints: Constraints,
        report: Callable[[int, int], None],
        token: CancelToken,
        *,
        text_only: bool = False,
    ) -> None:
        """Forecast the models that have no forecast for `rig` yet, and save the results.

        `strategy`: name of the strategy that finds the layouts. `constraints`: limits for these layouts.
        `report`: called with the number of finished forecasts, and the number of forecasts to make in all.
        `text_only`: whether the forecasts leave out projectors.
        """
        index = self.index
        key = rig_key(rig, constraints, strategy, text_only=text_only)
        kept = index.fits(key)
        with self._lock:
            self._rig_key, self._fits = key, kept
            census, facts = self._census, dict(self._facts)
        wanted = jobs((model.entry for model in list_models(census.files, facts, {}, {})), kept, text_only=text_only)
        limit = ProgressLimit(len(census.files))
        fresh: dict[str, Fit] = {}
        n_planned = 0

        def take(mark: str, fit: Fit) -> None:
            nonlocal n_planned
            n_planned += 1
            fresh[mark] = fit
            with self._lock:
                # Forecasts for an earlier rig are saved, but not shown.
                if self._rig_key == key:
                    self._fits[mark] = fit
            if limit.is_due():
                # Saved in between: a cancelled step saves nothing at its end.
                index.save_fits(key, fresh)
                fresh.clear()
                report(n_planned, len(wanted))

        report(0, len(wanted))
        plan_models(wanted, rig, strategy, constraints, take, token)
        if not token.cancelled:
            index.save_fits(key, fresh)

    # ------------------------------------------------------------------ changes

    def set_folders(self, folders: Iterable[Path]) -> None:
        """Set the folders that are scanned besides the model folders of other programs."""
        self.index.save_folders(folders)

    def note(self, marks: Iterable[str], change: Mapping[str, object]) -> None:
        """Change the notes of model files, such as favourite and tags, and store them.

        `marks`: fingerprints of the files. `change`: new values by the name of the field of `Notes`.
        """
        self.index.change_notes(marks, lambda notes: msgspec.structs.replace(notes, **change))

    def note_opened(self, path: Path, at_s: float) -> Notes:
        """Save the time when a model was opened, and return the notes (favourite, tags and others) of the model.

        `path`: the model's first file. `at_s`: the time in seconds since 1970.
        """
        # File names may be any bytes; SQLite stores text as UTF-8.
        if is_text(str(path)):
            self.index.save_opened(path, at_s)
        self.note_use(path, {"last_used": at_s})
        return self.notes_of(path)

    def notes_of(self, path: Path) -> Notes:
        """Return the notes of the model file `path`, such as tags and the time of its last use.

        The notes are empty if nothing is stored or the file cannot be read.
        """
        return self.index.notes().get(fingerprint(path), NO_NOTES)

    def note_use(self, path: Path, change: Mapping[str, object]) -> None:
        """Change the notes (favourite, tags, last use and others) of the model file `path`, and store them.

        `change`: new values by the name of the field of `Notes`.
        """
        mark = fingerprint(path)
        if mark:
            self.note((mark,), change)

    def forget_missing(self, paths: Iterable[Path]) -> None:
        """Remove deleted model files from the library's list, together with the other parts of split models."""
        # Parts that were deleted earlier are listed as missing, and would stay.
        removed = {part for path in paths for part in named_parts(path)}
        with self._lock:
            files = tuple(file for file in self._census.files if file.path not in removed)
            self._census = replace(self._census, files=files)
            census = self._census
        self.index.save_census(census)
        self.index.forget_opened(removed)

    def documents(self, marks: Iterable[str]) -> tuple[SavedDocument, ...]:
        """Return the saved layouts and presets of a model. `marks`: fingerprints of its files."""
        found = {(each.kind, each.name): each for mark in marks for each in self.index.documents(mark)}
        return tuple(found.values())

    def documents_of(self, path: Path) -> tuple[SavedDocument, ...]:
        """Return the saved layouts and presets of the model file `path`; none if the file cannot be read any more.

        If nothing is saved for this file, the layouts of an earlier file with the same path are returned.
        """
        mark = fingerprint(path)
        found = self.documents((mark,)) if mark else ()
        return found if found or not mark else self._layouts_of_earlier_file(path, mark)

    def has_layouts_of_earlier_file(self, path: Path) -> bool:
        """Return whether the layouts of the model file `path` were saved for an earlier file with the same path.

        `documents_of` returns such layouts if nothing is saved for the present file.
        """
        mark = fingerprint(path)
        return bool(mark) and not self.documents((mark,)) and bool(self._layouts_of_earlier_file(path, mark))

    def _layouts_of_earlier_file(self, path: Path, mark: str) -> tuple[SavedDocument, ...]:
        kept = self.documents((_mark_of_path(path),))
        # With the same fingerprint the file is the same, and its layouts were deleted.
        if any(each.kind == "file" and each.text == mark for each in kept):
            return ()
        return tuple(each for each in kept if each.kind != "file")

    def save_document(self, path: Path, document: SavedDocument) -> None:
        """Save a layout or a preset for the model file `path`.

        Raises:
            LibraryError: the file cannot be read any more.
        """
        mark = fingerprint(path)
        if not mark:
            raise LibraryError(
                tr(
                    "The model file {name} can no longer be read, so {document} was not saved. Check that the file "
                    "exists and that its disk is connected.",
                    name=path.name,
                    document=document.name,
                )
            )
        self.index.save_document(mark, document)
        if document.kind != "preset":
            # A second time by its path: a file that is downloaded again has another fingerprint.
            by_path = _mark_of_path(path)
            if self._layouts_of_earlier_file(path, mark):
                for old in self.index.documents(by_path):
                    self.index.forget_document(by_path, old.kind, old.name)
            self.index.save_document(by_path, SavedDocument("file", "", mark))
            self.index.save_document(by_path, document)

    def forget_document(self, marks: Iterable[str], kind: str, name: str) -> None:
        """Delete a saved layout or preset of a model.

        `marks`: fingerprints of the model's files. `kind`, `name`: fields of the `SavedDocument`.
        """
        for mark in marks:
            self.index.forget_document(mark, kind, name)

    def forget_document_of(self, path: Path, document: SavedDocument) -> None:
        """Delete a saved layout or preset of the model file `path`."""
        marks = (*filter(None, (fingerprint(path),)), _mark_of_path(path))
        self.forget_document(marks, document.kind, document.name)

    # ------------------------------------------------------------------ duplicates

    def duplicates(self, report: Callable[[int, int], None], token: CancelToken) -> tuple[Duplicates, ...]:
        """Return groups of files with the same content.

        Files of the same size are read, and their SHA-256 is stored, so that each file is read only once.
        `report`: called with the number of bytes read so far, and the number of bytes to read in all.
        """
        index = self.index
        with self._lock:
            files = self._census.files
        states = {file.path: file.state for file in files}
        hashes = {path: sha256 for path, (state, sha256) in index.hashes().items() if states.get(path) == state}
        unknown = [file for file in suspects(files) if file.sha256 is None and file.path not in hashes]
        total_bytes, read_bytes = sum(file.size_bytes for file in unknown), 0
        limit = ProgressLimit(0)

        def count(n_bytes: int) -> None:
            nonlocal read_bytes
            read_bytes += n_bytes
            if limit.is_due():
                report(read_bytes, total_bytes)

        for file in unknown:
            try:
                sha256 = sha256_of(file.path, token, count)
            # The file has gone since the scan, or cannot be read.
            except OSError:
                continue
            if sha256 is None:
                break
            hashes[file.path] = sha256
            # One by one, so that a cancelled comparison need not read these files again.
            index.save_hash(file.path, file.state, sha256)
        return find_duplicates(files, hashes)


def _mark_of_path(path: Path) -> str:
    """Return the key of a file's path. Layouts are saved under this key in addition to the file's fingerprint.

    So layouts are found again after the file was downloaded anew, with another fingerprint but the same path. The key
    is a hash of the path with a prefix that no fingerprint has.
    """
    return f"path:{blake2b(os.fsencode(path.absolute()), digest_size=16).hexdigest()}"
