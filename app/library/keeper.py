"""What people do with the library: folders, notes, named layouts and presets, the trash, what is there twice."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from PySide6.QtCore import QObject, Signal

from app.library.looker import Looker
from app.library.shown import ShownLibrary
from engine.cancellation import CancelToken
from engine.errors import EngineError
from engine.language import tr, tr_count
from engine.library.duplicates import Duplicates
from engine.library.entry import Copy, Entry, Quantisation
from engine.library.looking import check_folder
from engine.library.notes import KeptDocument
from engine.library.removal import Removal, plan_removal, to_trash


class LibraryKeeper(QObject):
    """Nothing here waits: each wish is done beside the GUI thread."""

    removal_planned = Signal(Removal)
    documents_found = Signal(object)  # tuple[KeptDocument, ...]
    duplicates_found = Signal(object)  # tuple[Duplicates, ...]

    def __init__(self, shown: ShownLibrary, looker: Looker, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._shown, self._stock, self._looker = shown, shown.stock, looker
        self._token = CancelToken()
        """Of comparing files."""

    def close(self) -> None:
        """End what is under way."""
        self._token.cancel()

    def add_folder(self, folder: Path) -> None:
        """Look into `folder` from now on."""

        def add() -> None:
            checked = check_folder(folder)
            self._stock.set_folders((*self._stock.index.folders(), checked))

        self._shown.run(tr("Adding a folder"), add, lambda _none: self._looker.look())

    def remove_folder(self, folder: Path) -> None:
        """Look into `folder` no longer; its files stay where they are."""

        def remove() -> None:
            self._stock.set_folders(each for each in self._stock.index.folders() if each != folder)

        self._shown.run(tr("Removing a folder"), remove, lambda _none: self._looker.look())

    def note(self, marks: Iterable[str], **change: object) -> None:
        """Change notes of a model, known by the fingerprints of its files."""
        self._shown.change(tr("Keeping notes"), lambda: self._stock.note(marks, change))

    def plan_removal(self, entry: Entry, quantisation: Quantisation, copy: Copy) -> None:
        """Find out what moving a copy to the trash means, for people to be asked."""
        others = [model.entry for model in self._shown.shelf.models]

        def found(removal: Removal) -> None:
            if removal.refusal:
                self._shown.notices.say(removal.refusal, bad=True)
            else:
                self.removal_planned.emit(removal)

        self._shown.run(tr("Looking at files"), lambda: plan_removal(entry, quantisation, copy, others), found)

    def remove(self, removal: Removal) -> None:
        """Move files to the trash."""

        def move() -> None:
            to_trash(removal.paths)
            self._stock.forget_missing(removal.paths)

        def done(_none: None) -> None:
            n_files = len(removal.paths)
            self._shown.notices.say(tr_count("It is in the trash.", "{count} files are in the trash.", n_files))
            self._looker.look()

        def failed(error: EngineError) -> None:
            self._shown.notices.tell(error)
            self._looker.look()

        self._shown.run(tr("Moving to the trash"), move, done, failed, quiet=False)

    def forget(self, paths: Iterable[Path]) -> None:
        """List files that are not there any more no longer."""
        gone = tuple(paths)
        self._shown.change(tr("Forgetting a model"), lambda: self._stock.forget_missing(gone))

    def find_documents(self, marks: Iterable[str]) -> None:
        """Find the named layouts and presets of a model."""
        self._shown.run(tr("Finding layouts"), lambda: self._stock.documents(marks), self.documents_found.emit)

    def keep_document(self, path: Path, document: KeptDocument, marks: Iterable[str]) -> None:
        """Keep a layout or a preset of the model at `path` under its name; `marks`: of the entry that is shown."""

        def done(_none: None) -> None:
            self._shown.notices.say(tr("Kept {name}.", name=document.name))
            self.find_documents(marks)

        self._shown.run(tr("Keeping a layout"), lambda: self._stock.keep_for(path, document), done)

    def forget_document(self, marks: Iterable[str], document: KeptDocument) -> None:
        """Forget a layout or a preset."""
        known = tuple(marks)

        def forget() -> None:
            self._stock.forget_document(known, document.kind, document.name)

        self._shown.run(tr("Forgetting a layout"), forget, lambda _none: self.find_documents(known))

    def find_duplicates(self) -> None:
        """Find what is there twice; files of the same size are read."""
        self._token.cancel()
        token = self._token = CancelToken()

        def found(duplicates: tuple[Duplicates, ...]) -> None:
            self._shown.progress.emit("")
            self.duplicates_found.emit(duplicates)

        tell = self._shown.teller(token, tr("Comparing files"))
        self._shown.run(tr("Comparing files"), lambda: self._stock.duplicates(tell, token), found, quiet=False)
