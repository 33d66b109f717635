"""The model library in the window: what it shows, its scans, and the changes that people make.

`LibraryCatalogue` does the work, in background threads. `Library` starts each step and delivers its result: first the
results of the last scan are shown, then the stores are scanned, then new headers are read. `ForecastPlanner` follows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
from PySide6.QtCore import QObject, Qt, QTimer, Signal

from app.background import Background
from app.library.catalogue import LibraryCatalogue, LibraryContents
from app.models.open_model import OpenModel
from app.notices import Notices
from engine.base.cancellation import CancelToken
from engine.base.errors import EngineError
from engine.base.language import tr, tr_count
from engine.library.census import Changes
from engine.library.entry import Copy, Entry, Quantisation
from engine.library.looking import check_folder
from engine.library.notes import KeptDocument, Notes
from engine.library.removal import Removal, plan_removal, to_trash
from engine.model.gguf.model_file import ModelFile
from engine.runtime.session.events import Done

WATCH_EVERY_MS = 10_000
LEAST_TOKENS = 16
"""The speed of a shorter answer is not worth saving."""

Report = Callable[[int, int], None]
_T = TypeVar("_T")
_log = logging.getLogger("layerdeck.library")


@dataclass(frozen=True, slots=True)
class _Step:
    """The progress of a task; `token` identifies the task."""

    token: CancelToken
    text: str


class LibraryTask:
    """Background work of one kind, of which only the latest call counts: a new one cancels the one that runs."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._token = CancelToken()

    def run(
        self,
        what: str,
        progress: str,
        work: Callable[[Report, CancelToken], _T],
        done: Callable[[_T], None],
        failed: Callable[[EngineError], None] | None = None,
        *,
        quiet: bool = True,
    ) -> None:
        """Run `work` and then `done`, unless it was cancelled meanwhile.

        `progress`: the text of a report, which may have the fields `done` and `whole`.
        """
        self.cancel()
        token = self._token = CancelToken()

        def finish(result: _T) -> None:
            if not token.cancelled:
                self._library.progress.emit("")
                done(result)

        def report(n_done: int, n_all: int) -> None:
            if n_all and not token.cancelled:
                self._library.stepped.emit(_Step(token, progress.format(done=n_done, whole=n_all)))

        def fail(error: EngineError) -> None:
            if not token.cancelled:
                self._library.progress.emit("")
                self._library.tell(error, failed)

        self._library.run(what, partial(work, report, token), finish, fail, quiet=quiet)

    def cancel(self) -> None:
        """Cancel the work that runs."""
        self._token.cancel()


class Library(QObject):
    """Calls return at once; results arrive as signals. `progress` is empty if nothing runs."""

    contents_changed = Signal(LibraryContents)
    progress = Signal(str)
    scan_begun = Signal()
    scan_finished = Signal()
    """The headers of all files are read."""
    removal_planned = Signal(Removal)
    documents_found = Signal(object)  # tuple[KeptDocument, ...]
    duplicates_found = Signal(object)  # tuple[Duplicates, ...]
    stepped = Signal(_Step)
    closed = Signal()

    def __init__(
        self,
        catalogue: LibraryCatalogue,
        current_model: Callable[[], OpenModel],
        background: Background,
        notices: Notices,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self.catalogue = catalogue
        self.contents = LibraryContents()
        self.is_awake = False
        """Whether the library was opened: before that nothing is scanned, read or planned."""
        self.is_scanning = False
        self._current_model, self._background, self._notices = current_model, background, notices
        self._scan, self._comparison = LibraryTask(self), LibraryTask(self)
        self._watch = QTimer(self)
        self._watch.setInterval(WATCH_EVERY_MS)
        self._watch.timeout.connect(self._check)
        self.stepped.connect(self._on_stepped, Qt.ConnectionType.QueuedConnection)

    def close(self) -> None:
        """Cancel what runs and close the index; called once."""
        self._watch.stop()
        self._scan.cancel()
        self._comparison.cancel()
        self.closed.emit()
        self.catalogue.close()

    def run(
        self,
        what: str,
        work: Callable[[], _T],
        done: Callable[[_T], None],
        failed: Callable[[EngineError], None] | None = None,
        *,
        quiet: bool = True,
    ) -> None:
        """Run `work` in the background; an error is shown unless `failed` takes it."""
        self._background.run(what, work, done, failed or self._notices.tell, quiet=quiet)

    def tell(self, error: EngineError, failed: Callable[[EngineError], None] | None) -> None:
        """Hand an error to `failed`, or show it if there is none."""
        (failed or self._notices.tell)(error)

    def change(
        self,
        what: str,
        change: Callable[[], object],
        failed: Callable[[EngineError], None] | None = None,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Change the catalogue, show it again if the library was opened, and call `then`."""

        def changed() -> LibraryContents | None:
            change()
            return self.catalogue.contents() if self.is_awake else None

        def show(contents: LibraryContents | None) -> None:
            if contents is not None:
                self.show(contents)
            then()

        self.run(what, changed, show, failed)

    def show(self, contents: LibraryContents) -> None:
        """Show other contents."""
        self.contents = contents
        self.contents_changed.emit(contents)

    def _on_stepped(self, step: _Step) -> None:
        """Show the progress of a task, and what it has found out."""
        if step.token.cancelled:
            return
        self.progress.emit(step.text)

        def show(contents: LibraryContents) -> None:
            if not step.token.cancelled:
                self.show(contents)

        self.run(tr("Listing models"), self.catalogue.contents, show)

    # ------------------------------------------------------------------ scanning

    def wake(self) -> None:
        """Show the results of the last scan, then scan; from now on the folders are watched."""
        if self.is_awake:
            self._check()
            return
        self.is_awake = True
        self._watch.start()

        def show(contents: LibraryContents) -> None:
            if contents.aside:
                sentence = tr("The library's index could not be used; it was kept as {aside}.", aside=contents.aside)
                self._notices.say(sentence, bad=True)
            self.show(contents)
            self.scan()

        self.run(tr("Opening the library"), self.catalogue.load, show)

    def scan(self) -> None:
        """Scan all stores and read new headers."""
        self.is_scanning = True
        self.scan_begun.emit()

        def scan(_report: Report, _token: CancelToken) -> tuple[Changes, LibraryContents]:
            return self.catalogue.scan(), self.catalogue.contents()

        def show(found: tuple[Changes, LibraryContents]) -> None:
            changes, contents = found
            self.show(contents)
            if sentence := changes.sentence():
                self._notices.say(sentence)
            self._read_headers()

        self.progress.emit(tr("Looking for models"))
        self._scan.run(tr("Looking for models"), "", scan, show, self._on_scan_failed)

    def _read_headers(self) -> None:
        def read(report: Report, token: CancelToken) -> LibraryContents:
            self.catalogue.read_headers(report, token)
            return self.catalogue.contents()

        def done(contents: LibraryContents) -> None:
            self.is_scanning = False
            self.show(contents)
            self.scan_finished.emit()

        words = tr("Reading headers: {done} of {whole}")
        self._scan.run(tr("Reading headers"), words, read, done, self._on_scan_failed)

    def _on_scan_failed(self, error: EngineError) -> None:
        self.is_scanning = False
        self.progress.emit("")
        self._notices.tell(error)

    def _check(self) -> None:
        """Scan again if something has changed on disk."""

        def answer(stale: bool) -> None:
            if stale and not self.is_scanning:
                self.scan()

        if not self.is_scanning:
            self.run(tr("Watching folders"), self.catalogue.is_stale, answer)

    # ------------------------------------------------------------------ changes that people make

    def add_folder(self, folder: Path) -> None:
        """Scan `folder` from now on."""

        def add() -> None:
            checked = check_folder(folder)
            self.catalogue.set_folders((*self.catalogue.index.folders(), checked))

        self.run(tr("Adding a folder"), add, lambda _none: self.scan())

    def remove_folder(self, folder: Path) -> None:
        """Scan `folder` no longer; its files stay where they are."""

        def remove() -> None:
            self.catalogue.set_folders(each for each in self.catalogue.index.folders() if each != folder)

        self.run(tr("Removing a folder"), remove, lambda _none: self.scan())

    def note(self, marks: Iterable[str], **change: object) -> None:
        """Change notes of a model, by the fingerprints of its files."""
        self.change(tr("Keeping notes"), lambda: self.catalogue.note(marks, change))

    def plan_removal(self, entry: Entry, quantisation: Quantisation, copy: Copy) -> None:
        """Find out which files belong to a copy, for the question before they are moved to the trash."""
        others = [model.entry for model in self.contents.models]

        def found(removal: Removal) -> None:
            if removal.refusal:
                self._notices.say(removal.refusal, bad=True)
            else:
                self.removal_planned.emit(removal)

        self.run(tr("Looking at files"), lambda: plan_removal(entry, quantisation, copy, others), found)

    def remove(self, removal: Removal) -> None:
        """Move files to the trash."""

        def move() -> None:
            to_trash(removal.paths)
            self.catalogue.forget_missing(removal.paths)

        def done(_none: None) -> None:
            n_files = len(removal.paths)
            self._notices.say(tr_count("It is in the trash.", "{count} files are in the trash.", n_files))
            self.scan()

        def failed(error: EngineError) -> None:
            self._notices.tell(error)
            self.scan()

        self.run(tr("Moving to the trash"), move, done, failed, quiet=False)

    def forget(self, paths: Iterable[Path]) -> None:
        """Take files that do not exist any more out of the list."""
        gone = tuple(paths)
        self.change(tr("Forgetting a model"), lambda: self.catalogue.forget_missing(gone))

    def find_documents(self, marks: Iterable[str]) -> None:
        """Find the saved layouts and presets of a model."""
        self.run(tr("Finding layouts"), lambda: self.catalogue.documents(marks), self.documents_found.emit)

    def save_document(self, path: Path, document: KeptDocument, marks: Iterable[str]) -> None:
        """Save a layout or a preset of the model at `path`, then find those of `marks` again."""

        def done(_none: None) -> None:
            self._notices.say(tr("Kept {name}.", name=document.name))
            self.find_documents(marks)

        self.run(tr("Keeping a layout"), lambda: self.catalogue.save_document(path, document), done)

    def remove_document(self, marks: Iterable[str], document: KeptDocument) -> None:
        """Remove a saved layout or preset."""
        known = tuple(marks)

        def remove() -> None:
            self.catalogue.forget_document(known, document.kind, document.name)

        self.run(tr("Forgetting a layout"), remove, lambda _none: self.find_documents(known))

    def find_duplicates(self) -> None:
        """Find files with the same contents; files of the same size are read."""
        words = tr("Comparing files")
        self._comparison.run(words, words, self.catalogue.duplicates, self.duplicates_found.emit, quiet=False)

    # ------------------------------------------------------------------ notes that use of a model makes

    def note_opened(self, file: ModelFile | None) -> None:
        """Note that the current model was opened just now; a new conversation begins with its preset."""
        if file is None:
            return
        model, path, now = self._current_model(), file.paths[0].absolute(), time.time()
        noted: list[Notes] = []

        def begin() -> None:
            if noted and model.file is file:
                _begin_with(model, noted[0].preset)

        self.change(tr("Noting a use"), lambda: noted.append(self.catalogue.note_opened(path, now)), _log_error, begin)

    def follow(self, model: OpenModel) -> None:
        """Note the speed of the answers of `model`."""
        model.conversation.answer_finished.connect(lambda event: self._on_answer(model, event))

    def _on_answer(self, model: OpenModel, event: Done) -> None:
        file, loaded = model.file, model.loading.loaded
        if file is None or loaded is None or event.generated_tokens < LEAST_TOKENS:
            return
        change: dict[str, object] = {
            "measured": event.generation_tokens_per_second,
            "measured_on": ", ".join(dict.fromkeys(loaded.edit.layout.devices)),
            "last_used": time.time(),
        }
        path = file.paths[0]
        self.change(tr("Noting a speed"), lambda: self.catalogue.note_use(path, change), _log_error)


def _begin_with(model: OpenModel, preset: str) -> None:
    """Begin a new conversation with a preset, unless one was chosen for it."""
    conversation = model.conversation
    is_known = not conversation.presets or preset in conversation.presets
    if preset and is_known and conversation.is_empty and not conversation.chat.preset:
        conversation.change_chat(msgspec.structs.replace(conversation.chat, preset=preset))


def _log_error(error: EngineError) -> None:
    _log.info("library: %s", error.summary())
