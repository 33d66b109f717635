"""The library in the window: looked at once people open it, kept up to date, planned for the rig as it is.

Nothing here waits: steps run beside the GUI thread and answer with a new shelf.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from PySide6.QtCore import QObject, Qt, QTimer, Signal

from app.background import Background
from app.library.stock import Shelf, Stock
from app.models.auto_layouts import AutoLayouts
from app.models.open_model import OpenModel
from app.models.open_models import OpenModels
from app.models.speeds import SpeedKeeper
from app.notices import Notices
from app.rig.live_rig import LiveRig
from engine.cancellation import CancelToken
from engine.devices.device import Rig
from engine.errors import EngineError
from engine.fit.strategies.constraints import Constraints
from engine.gguf.model_file import ModelFile
from engine.library.changes import Changes
from engine.library.duplicates import Duplicates
from engine.library.entry import Copy, Entry, Quantisation
from engine.library.looking import check_folder
from engine.library.notes import KeptDocument
from engine.library.removal import Removal, plan_removal, to_trash
from engine.library.settled import settled_rig
from engine.session.events import Done

WATCH_EVERY_MS = 10_000
RIG_SETTLES_MS = 1_500
"""A rig that changes is planned for once it has been quiet for so long."""
LEAST_TOKENS = 16
"""An answer shorter than this says little about speed."""
_T = TypeVar("_T")
_log = logging.getLogger("layerdeck.library")


@dataclass(frozen=True, slots=True)
class _Step:
    """How far a step is: `token` tells which one."""

    token: CancelToken
    text: str


class LibraryKeeper(QObject):
    """`shelf` is the latest. `progress` says in words what is under way, empty: nothing."""

    shelf_changed = Signal(Shelf)
    progress = Signal(str)
    removal_planned = Signal(Removal)
    documents_found = Signal(object)  # tuple[KeptDocument, ...]
    duplicates_found = Signal(object)  # tuple[Duplicates, ...]

    _stepped = Signal(_Step)

    def __init__(
        self,
        stock: Stock,
        *,
        models: OpenModels,
        live: LiveRig,
        auto_layouts: AutoLayouts,
        speeds: SpeedKeeper,
        background: Background,
        notices: Notices,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self.shelf = Shelf()
        self.is_awake = False
        """Whether anybody has looked at the library: until then nothing is looked into, read or planned."""
        self._stock = stock
        self._models, self._live, self._auto_layouts, self._speeds = models, live, auto_layouts, speeds
        self._background, self._notices = background, notices
        self._token = CancelToken()
        """Of looking and reading."""
        self._plan_token = CancelToken()
        self._rig: Rig | None = None
        self._is_looking = False
        self._watch = QTimer(self)
        self._watch.setInterval(WATCH_EVERY_MS)
        self._watch.timeout.connect(self._check)
        self._settling = QTimer(self)
        self._settling.setSingleShot(True)
        self._settling.setInterval(RIG_SETTLES_MS)
        self._settling.timeout.connect(self._plan)
        self._stepped.connect(self._on_step, Qt.ConnectionType.QueuedConnection)
        live.rig_changed.connect(self._on_rig_changed)
        auto_layouts.wishes_changed.connect(lambda _wishes: self._plan_soon())

    def close(self) -> None:
        """End what is under way."""
        self._watch.stop()
        self._settling.stop()
        self._token.cancel()
        self._plan_token.cancel()
        self._stock.close()

    # ------------------------------------------------------------------ looking

    def wake(self) -> None:
        """Show what is known, then look; from now on what changes is seen."""
        if self.is_awake:
            self._check()
            return
        self.is_awake = True
        self._watch.start()

        def show(shelf: Shelf) -> None:
            if shelf.aside:
                self._notices.say(f"The library's index could not be used; it was kept as {shelf.aside}.", bad=True)
            self._show(shelf)
            self.look()

        self._run("Opening the library", self._stock.known, show)

    def look(self) -> None:
        """Look into all stores, read what is new, and plan it."""
        self._token.cancel()
        self._plan_token.cancel()
        token = self._token = CancelToken()
        self._is_looking = True

        def found(answer: tuple[Changes, Shelf]) -> None:
            if token.cancelled:
                return
            changes, shelf = answer
            self._show(shelf)
            if sentence := changes.sentence():
                self._notices.say(sentence)
            self._read(token)

        self.progress.emit("Looking for models")
        self._run("Looking for models", lambda: (self._stock.look(), self._stock.shelf()), found)

    def _read(self, token: CancelToken) -> None:
        def read() -> Shelf:
            self._stock.read_headers(self._teller(token, "Reading headers: {} of {}"), token)
            return self._stock.shelf()

        def done(shelf: Shelf) -> None:
            if token.cancelled:
                return
            self._is_looking = False
            self._show(shelf)
            self.progress.emit("")
            self._plan()

        self._run("Reading headers", read, done)

    def _check(self) -> None:
        """Look again where something has changed on disk."""
        if self._is_looking:
            return

        def answer(stale: bool) -> None:
            if stale and not self._is_looking:
                self.look()

        self._run("Watching folders", self._stock.is_stale, answer)

    # ------------------------------------------------------------------ planning

    def _on_rig_changed(self, _rig: Rig) -> None:
        """Plan again where the rig, without what is loaded of ours, is another one than was planned for."""
        if self.is_awake and self._settled() != self._rig:
            self._plan_soon()

    def _plan_soon(self) -> None:
        if self.is_awake:
            self._settling.start()

    def _settled(self) -> Rig:
        return settled_rig(self._live.rig_without(self._models.held), self._rig)

    def _plan(self) -> None:
        if self._is_looking:
            return  # It follows.
        self._settling.stop()
        self._plan_token.cancel()
        token = self._plan_token = CancelToken()
        rig = self._rig = self._settled()
        wishes = self._auto_layouts.wishes
        asked = Constraints(
            order=tuple(device for device in wishes.order if device in rig.ids),
            off=wishes.off & set(rig.ids),
            split=wishes.split,
            kv_types=wishes.kv_types,
        )
        speeds_of = self._speeds.known_speeds

        def plan() -> Shelf:
            constraints = replace(asked, speeds=speeds_of(rig))
            tell = self._teller(token, "Planning for this rig: {} of {}")
            self._stock.plan(rig, wishes.strategy, constraints, tell, token)
            return self._stock.shelf()

        def done(shelf: Shelf) -> None:
            if not token.cancelled:
                self._show(shelf)
                self.progress.emit("")

        self._run("Planning the library", plan, done)

    def _teller(self, token: CancelToken, words: str) -> Callable[[int, int], None]:
        def tell(n_done: int, n_all: int) -> None:
            if n_all and not token.cancelled:
                self._stepped.emit(_Step(token, words.format(n_done, n_all)))

        return tell

    def _on_step(self, step: _Step) -> None:
        """Show how far a step is, and what it has learnt."""
        if step.token.cancelled:
            return
        self.progress.emit(step.text)

        def show(shelf: Shelf) -> None:
            if not step.token.cancelled:
                self._show(shelf)

        self._run("Listing models", self._stock.shelf, show)

    # ------------------------------------------------------------------ what people do

    def add_folder(self, folder: Path) -> None:
        """Look into `folder` from now on."""

        def add() -> None:
            checked = check_folder(folder)
            self._stock.set_folders((*self._stock.index.folders(), checked))

        self._run("Adding a folder", add, lambda _none: self.look())

    def remove_folder(self, folder: Path) -> None:
        """Look into `folder` no longer; its files stay where they are."""

        def remove() -> None:
            self._stock.set_folders(each for each in self._stock.index.folders() if each != folder)

        self._run("Removing a folder", remove, lambda _none: self.look())

    def note(self, marks: Iterable[str], **change: object) -> None:
        """Change notes of a model, known by the fingerprints of its files."""
        self._change("Keeping notes", lambda: self._stock.note(marks, change))

    def plan_removal(self, entry: Entry, quantisation: Quantisation, copy: Copy) -> None:
        """Find out what moving a copy to the trash means, for people to be asked."""
        others = [model.entry for model in self.shelf.models]

        def found(removal: Removal) -> None:
            if removal.refusal:
                self._notices.say(removal.refusal, bad=True)
            else:
                self.removal_planned.emit(removal)

        self._run("Looking at files", lambda: plan_removal(entry, quantisation, copy, others), found)

    def remove(self, removal: Removal) -> None:
        """Move files to the trash."""

        def move() -> None:
            to_trash(removal.paths)
            self._stock.forget_missing(removal.paths)

        def done(_none: None) -> None:
            self._notices.say(
                f"{len(removal.paths)} files are in the trash." if len(removal.paths) > 1 else "It is in the trash."
            )
            self.look()

        def failed(error: EngineError) -> None:
            self._notices.tell(error)
            self.look()

        self._background.run("Moving to the trash", move, done, failed)

    def forget(self, paths: Iterable[Path]) -> None:
        """List files that are not there any more no longer."""
        gone = tuple(paths)
        self._change("Forgetting a model", lambda: self._stock.forget_missing(gone))

    def find_documents(self, marks: Iterable[str]) -> None:
        """Find the named layouts and presets of a model."""
        self._run("Finding layouts", lambda: self._stock.documents(marks), self.documents_found.emit)

    def keep_document(self, path: Path, document: KeptDocument, marks: Iterable[str]) -> None:
        """Keep a layout or a preset of the model at `path` under its name; `marks`: of the entry that is shown."""

        def done(_none: None) -> None:
            self._notices.say(f"Kept {document.name}.")
            self.find_documents(marks)

        self._run("Keeping a layout", lambda: self._stock.keep_for(path, document), done)

    def forget_document(self, marks: Iterable[str], document: KeptDocument) -> None:
        """Forget a layout or a preset."""
        known = tuple(marks)

        def forget() -> None:
            self._stock.forget_document(known, document.kind, document.name)

        self._run("Forgetting a layout", forget, lambda _none: self.find_documents(known))

    def find_duplicates(self) -> None:
        """Find what is there twice; files of the same size are read."""
        token = self._token

        def found(duplicates: tuple[Duplicates, ...]) -> None:
            self.progress.emit("")
            self.duplicates_found.emit(duplicates)

        tell = self._teller(token, "Comparing files")
        self._run("Comparing files", lambda: self._stock.duplicates(tell, token), found, quiet=False)

    # ------------------------------------------------------------------ what use shows

    def note_opened(self, file: ModelFile | None) -> None:
        """Note that a model was opened just now."""
        if file is not None:
            path, now = file.paths[0], time.time()
            self._change("Noting a use", lambda: self._stock.note_use(path, {"last_used": now}), _log_error)

    def follow(self, model: OpenModel) -> None:
        """Note the speed of the answers of `model`."""
        model.conversation.answer_finished.connect(lambda event: self._on_answer(model, event))

    def _on_answer(self, model: OpenModel, event: Done) -> None:
        file, loaded = model.file, model.loading.loaded
        if file is None or loaded is None or event.generated_tokens < LEAST_TOKENS:
            return
        change: Mapping[str, object] = {
            "measured": event.generation_tokens_per_second,
            "measured_on": ", ".join(dict.fromkeys(loaded.edit.layout.devices)),
            "last_used": time.time(),
        }
        path = file.paths[0]
        self._change("Noting a speed", lambda: self._stock.note_use(path, change), _log_error)

    # ------------------------------------------------------------------ working

    def _change(
        self, what: str, change: Callable[[], None], on_error: Callable[[EngineError], None] | None = None
    ) -> None:
        """Change something, and show the list anew where anybody looks at it."""

        def changed() -> Shelf | None:
            change()
            return self._stock.shelf() if self.is_awake else None

        def show(shelf: Shelf | None) -> None:
            if shelf is not None:
                self._show(shelf)

        self._background.run(what, changed, show, on_error or self._notices.tell, quiet=True)

    def _run(self, what: str, work: Callable[[], _T], done: Callable[[_T], None], *, quiet: bool = True) -> None:
        self._background.run(what, work, done, self._notices.tell, quiet=quiet)

    def _show(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self.shelf_changed.emit(shelf)


def _log_error(error: EngineError) -> None:
    _log.info("library: %s", error.summary())
