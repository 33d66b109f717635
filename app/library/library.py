"""The model library in the window: its contents, its scans, and the changes that people make.

`LibraryCatalogue` does the work, in background threads. `Library` starts each step and delivers its result: first the
results of the last scan are shown, then the folders are scanned, then new headers are read. `ForecastPlanner` then
starts the forecasts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from PySide6.QtCore import QObject, QTimer, Signal

from app.background import Background, Task
from app.library.catalogue import LibraryCatalogue, LibraryContents
from app.models.open_model import OpenModel
from app.notices import Notices
from engine.base.cancellation import CancelToken
from engine.base.errors import EngineError
from engine.base.language import tr, tr_count
from engine.base.values import replace
from engine.library.census import Changes
from engine.library.entry import Copy, Entry, Quantisation
from engine.library.fit import layout_key
from engine.library.notes import Notes, SavedDocument
from engine.library.refresh import check_folder
from engine.library.removal import Removal, plan_removal, to_trash
from engine.library.stores import models_folder
from engine.model.gguf.model_file import ModelFile
from engine.runtime.session.events import Done

WATCH_EVERY_MS = 10_000
# Tokens. Speeds of shorter answers are not saved.
LEAST_TOKENS = 16

Report = Callable[[int, int], None]
_T = TypeVar("_T")
_log = logging.getLogger("layerdeck.library")


class LibraryTask:
    """Runs background work, and shows its progress and errors in the library. A newer `run` cancels the older one."""

    def __init__(self, library: Library, background: Background) -> None:
        self._library = library
        self._latest = background.latest()

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
        """Run `work` in the background, then call `done`, unless another call or `cancel` comes before that.

        `what`: description of the work, on the status line while it runs if `quiet` is false.
        `progress`: text that shows the progress, in which `{done}` and `{total}` are replaced by numbers.
        `work`: called with a function that reports these two numbers, and with a token that `cancel` cancels.
        `failed`: called with an error; if it is None, the library shows the error.
        """

        def step(task: Task[str]) -> _T:
            def report(n_done: int, n_all: int) -> None:
                if n_all:
                    task.report(progress.format(done=n_done, total=n_all))

            return work(report, task.token)

        def finish(result: _T) -> None:
            self._library.progress.emit("")
            done(result)

        def fail(error: EngineError) -> None:
            self._library.progress.emit("")
            self._library.show_error(error, failed)

        self._latest.run(what, step, finish, fail, self._show_step, quiet=quiet)

    def cancel(self) -> None:
        """Cancel the running work and drop its result."""
        self._latest.cancel()

    def _show_step(self, text: str) -> None:
        """Show the progress `text`, and list the models with the headers and forecasts that are known by now."""
        self._library.progress.emit(text)

        def show(contents: LibraryContents) -> None:
            # The end of the work shows newer contents.
            if self._latest.is_running:
                self._library.show(contents)

        self._library.run(tr("Listing models"), self._library.catalogue.contents, show)


class Library(QObject):
    """The model library for the widgets. Calls return at once; results arrive as signals.

    `progress`: emitted with the progress of work as text; empty if nothing runs.
    """

    contents_changed = Signal(LibraryContents)
    progress = Signal(str)
    scan_begun = Signal()
    # The headers of all files are read.
    scan_finished = Signal()
    removal_planned = Signal(Removal)
    documents_found = Signal(object)  # tuple[SavedDocument, ...]
    duplicates_found = Signal(object)  # tuple[Duplicates, ...]
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
        # Whether the library was opened: before that nothing is scanned, read or planned.
        self.is_awake = False
        self.is_scanning = False
        self._current_model, self._background, self._notices = current_model, background, notices
        self._scan, self._comparison = self.task(), self.task()
        self._watch = QTimer(self)
        self._watch.setInterval(WATCH_EVERY_MS)
        self._watch.timeout.connect(self._check)

    def close(self) -> None:
        """Cancel running work, and close the library's database. Called once, when the window closes."""
        self._watch.stop()
        self._scan.cancel()
        self._comparison.cancel()
        # Before the index is closed: the planner cancels its work.
        self.closed.emit()
        self.catalogue.close()

    def task(self) -> LibraryTask:
        """Return a runner for background work in which a newer call replaces the previous one."""
        return LibraryTask(self, self._background)

    def run(
        self,
        what: str,
        work: Callable[[], _T],
        done: Callable[[_T], None],
        failed: Callable[[EngineError], None] | None = None,
        *,
        quiet: bool = True,
    ) -> None:
        """Run `work` in the background, then call `done` with its result.

        `what`: description of the work, on the status line while it runs if `quiet` is false.
        `failed`: called with an error; if it is None, the error is shown.
        """
        self._background.run(what, work, done, failed or self._notices.show_error, quiet=quiet)

    def show_error(self, error: EngineError, failed: Callable[[EngineError], None] | None) -> None:
        """Pass `error` to `failed`. If `failed` is None, show the error on the status line."""
        (failed or self._notices.show_error)(error)

    def change(
        self,
        what: str,
        change: Callable[[], object],
        failed: Callable[[EngineError], None] | None = None,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Call `change`, which changes the library's database, in the background. Then show the changed library.

        Nothing is shown before the library has been opened. `then` is called last, if there was no error.
        `what`: description of the change. `failed`: called with an error; if it is None, the error is shown.
        """

        def changed() -> LibraryContents | None:
            change()
            return self.catalogue.contents() if self.is_awake else None

        def show(contents: LibraryContents | None) -> None:
            if contents is not None:
                self.show(contents)
            then()

        self.run(what, changed, show, failed)

    def show(self, contents: LibraryContents) -> None:
        """Replace the shown contents of the library with `contents`, and emit `contents_changed`."""
        self.contents = contents
        self.contents_changed.emit(contents)

    # ------------------------------------------------------------------ scanning

    def wake(self) -> None:
        """Open the library: show the results of the last scan, then scan, and check for changes on disk from now on.

        If it is open already, only check for changes.
        """
        if self.is_awake:
            self._check()
            return
        self.is_awake = True
        self._watch.start()

        def show(contents: LibraryContents) -> None:
            if contents.aside:
                sentence = tr(
                    "The library's index could not be read. The old index was renamed to {new_name}, and a new "
                    "index was created.",
                    new_name=contents.aside,
                )
                self._notices.show(sentence, bad=True)
            self.show(contents)
            self.scan()

        self.run(tr("Opening the library"), self.catalogue.load, show)

    def scan(self) -> None:
        """Scan all model folders in the background, then read new GGUF headers."""
        self.is_scanning = True
        self.scan_begun.emit()

        def scan(_report: Report, _token: CancelToken) -> tuple[Changes, LibraryContents]:
            return self.catalogue.scan(), self.catalogue.contents()

        def show(found: tuple[Changes, LibraryContents]) -> None:
            changes, contents = found
            self.show(contents)
            if sentence := changes.sentence():
                self._notices.show(sentence)
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

        words = tr("Reading headers: {done} of {total}")
        self._scan.run(tr("Reading headers"), words, read, done, self._on_scan_failed)

    def _on_scan_failed(self, error: EngineError) -> None:
        self.is_scanning = False
        self.progress.emit("")
        self._notices.show_error(error)

    def _check(self) -> None:
        """Start a scan if files have changed on disk since the last one."""

        def answer(stale: bool) -> None:
            if stale and not self.is_scanning:
                self.scan()

        if not self.is_scanning:
            self.run(tr("Watching folders"), self.catalogue.is_stale, answer)

    # ------------------------------------------------------------------ changes that people make

    def add_folder(self, folder: Path) -> None:
        """Add `folder` to the folders that are scanned, and scan."""

        def add() -> None:
            checked = check_folder(folder)
            self.catalogue.set_folders((*self.catalogue.index.folders(), checked))

        self.run(tr("Adding a folder"), add, lambda _none: self.scan())

    def models_folder(self, opened: Iterable[Path]) -> Path | None:
        """Return the folder that a file dialog for models shows first; None if none is known.

        `opened`: files of the models that were opened before, latest first.
        """
        return models_folder(opened, self.contents.folders, self.catalogue.other_stores())

    def remove_folder(self, folder: Path) -> None:
        """Remove `folder` from the folders that are scanned. Its files are not deleted."""

        def remove() -> None:
            self.catalogue.set_folders(each for each in self.catalogue.index.folders() if each != folder)

        self.run(tr("Removing a folder"), remove, lambda _none: self.scan())

    def note(self, marks: Iterable[str], **change: object) -> None:
        """Change the notes (favourite, tags and others) of a model.

        `change`: new values by the name of the field of `Notes`. `marks`: fingerprints of the model's files.
        """
        self.change(tr("Saving notes on the model"), lambda: self.catalogue.note(marks, change))

    def plan_removal(self, entry: Entry, quantisation: Quantisation, copy: Copy) -> None:
        """Find the files of `copy`, and emit `removal_planned` to ask before they are removed.

        `entry`: the model in the list. `copy`: a copy of its `quantisation` on this computer.
        """
        others = [model.entry for model in self.contents.models]

        def found(removal: Removal) -> None:
            if removal.refusal:
                self._notices.show(removal.refusal, bad=True)
            else:
                self.removal_planned.emit(removal)

        self.run(tr("Finding the files to remove"), lambda: plan_removal(entry, quantisation, copy, others), found)

    def remove(self, removal: Removal) -> None:
        """Move the files of `removal` to the system's trash, then scan."""

        def move() -> None:
            to_trash(removal.paths)
            self.catalogue.forget_missing(removal.paths)

        def done(_none: None) -> None:
            n_files = len(removal.paths)
            self._notices.show(tr_count("The file is in the trash.", "{count} files are in the trash.", n_files))
            self.scan()

        def failed(error: EngineError) -> None:
            self._notices.show_error(error)
            self.scan()

        self.run(tr("Moving to the trash"), move, done, failed, quiet=False)

    def forget(self, paths: Iterable[Path]) -> None:
        """Remove deleted model files from the library's list, in the background."""
        missing = tuple(paths)
        self.change(tr("Removing a model from the list"), lambda: self.catalogue.forget_missing(missing))

    def find_documents(self, marks: Iterable[str]) -> None:
        """Find the saved layouts and presets of a model; `documents_found` is emitted.

        `marks`: fingerprints of its files.
        """
        self.run(tr("Finding layouts"), lambda: self.catalogue.documents(marks), self.documents_found.emit)

    def save_document(self, path: Path, document: SavedDocument, marks: Iterable[str]) -> None:
        """Save `document`, a layout or a preset, for the model file `path`.

        Then `documents_found` is emitted with all layouts and presets of the model.
        `marks`: fingerprints of the model's files.
        """

        def done(_none: None) -> None:
            self._notices.show(tr('Layout "{name}" saved.', name=document.name))
            self.find_documents(marks)

        self.run(tr("Saving a layout"), lambda: self.catalogue.save_document(path, document), done)

    def remove_document(self, marks: Iterable[str], document: SavedDocument) -> None:
        """Delete `document`, a saved layout or preset of a model.

        Then `documents_found` is emitted with the remaining layouts and presets of the model.
        `marks`: fingerprints of the model's files.
        """
        # Read twice, which an iterator does not allow.
        known = tuple(marks)

        def remove() -> None:
            self.catalogue.forget_document(known, document.kind, document.name)

        self.run(tr("Removing a layout"), remove, lambda _none: self.find_documents(known))

    def find_duplicates(self) -> None:
        """Find files with the same content; `duplicates_found` is emitted.

        Files of the same size are read completely.
        """
        words = tr("Comparing files")
        self._comparison.run(words, words, self.catalogue.duplicates, self.duplicates_found.emit, quiet=False)

    # ------------------------------------------------------------------ notes that use of a model makes

    def note_opened(self, file: ModelFile | None) -> None:
        """Save that the current model was opened now, and set the preset of its conversation.

        The user has chosen this preset for the model in the library. It is not set if the conversation has messages or
        a preset already.
        `file`: file of the current model. If it is None, nothing is done.
        """
        if file is None:
            return
        model, path, now = self._current_model(), file.paths[0].absolute(), time.time()
        # Filled in the background; `begin` reads it afterwards in the GUI thread.
        noted: list[Notes] = []

        def begin() -> None:
            if noted and model.file is file:
                _begin_with(model, noted[0].preset)

        self.change(
            tr("Saving the time of the model's last use"),
            lambda: noted.append(self.catalogue.note_opened(path, now)),
            _log_error,
            begin,
        )

    def follow(self, model: OpenModel) -> None:
        """Save the speed of each answer of `model`, so that the library shows it."""
        model.conversation.answer_finished.connect(lambda event: self._on_answer(model, event))

    def _on_answer(self, model: OpenModel, event: Done) -> None:
        file, loaded = model.file, model.loading.loaded
        if file is None or loaded is None or event.generated_tokens < LEAST_TOKENS:
            return
        change: dict[str, object] = {
            "measured": event.generation_tokens_per_second,
            "measured_on": ", ".join(loaded.edit.layout.devices),
            "measured_layout": layout_key(loaded.edit.layout),
            "last_used": time.time(),
        }
        path = file.paths[0]
        self.change(tr("Saving the measured speed"), lambda: self.catalogue.note_use(path, change), _log_error)


def _begin_with(model: OpenModel, preset: str) -> None:
    """Set the preset named `preset` for the conversation of `model`.

    Nothing is done if the conversation has messages or a preset already.
    """
    conversation = model.conversation
    is_known = not conversation.presets or preset in conversation.presets
    if preset and is_known and conversation.is_empty and not conversation.chat.preset:
        conversation.change_chat(replace(conversation.chat, preset=preset))


def _log_error(error: EngineError) -> None:
    _log.info("library: %s", error.summary())
