"""The named layouts of the current model: saved, renamed, duplicated, deleted, imported and exported."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from PySide6.QtCore import QObject, Signal

from app.library.library import Library
from app.models.document import LayoutDocument
from app.models.layouts import Layouts
from app.notices import Notices
from engine.base.errors import EngineError, LayoutError
from engine.base.files import write_whole
from engine.base.language import tr
from engine.base.values import replace
from engine.devices.rig_file import without_addresses
from engine.library.fit import layout_key
from engine.library.notes import SavedDocument
from engine.model.gguf.model_file import ModelFile
from engine.planning.layout.layout import Layout
from engine.planning.layout.layout_file import LayoutFile, encode_layout, free_name, parse_layout, read_layout

_Change = Callable[[Path], object]


class NamedLayouts(QObject):
    """The named layouts of the current model. Calls return at once; `changed` is emitted with the new list.

    The layouts are stored in the library's index by model file, together with the devices for which they were made.
    """

    changed = Signal()

    def __init__(
        self,
        document: LayoutDocument,
        layouts: Layouts,
        library: Library,
        notices: Notices,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._document, self._layouts, self._library, self._notices = document, layouts, library, notices
        self._model: ModelFile | None = None
        self.documents: tuple[SavedDocument, ...] = ()
        """The named layouts of the current model, sorted by name."""
        self.deleted: SavedDocument | None = None
        """The layout of the current model that was deleted last, which `restore` brings back."""
        self._contents: dict[str, LayoutFile | None] = {}
        """Parsed content of the layout files in `documents`, by their text; None if a text cannot be used."""

    def refresh(self) -> None:
        """Read the named layouts of the current model; `changed` is emitted."""
        model = self._document.model
        if model is not self._model:
            self._model, self.documents, self.deleted, self._contents = model, (), None, {}
        if model is None:
            self.changed.emit()
            return
        self._run(tr("Finding layouts"), lambda _path: None)

    def save(self, name: str) -> None:
        """Save the edited layout with its devices as `name`. A saved layout with this name is replaced."""
        text = self._layouts.text(with_rig=True)
        if text is not None:
            self._run(tr("Saving a layout"), self._save(SavedDocument("layout", name, text)))

    def use(self, document: SavedDocument) -> None:
        """Replace the edited layout by a named one, as one undo step."""
        self._layouts.use(document.name, document.text)

    def duplicate(self, document: SavedDocument) -> None:
        """Save a copy of a named layout under a free name."""
        self._run(tr("Saving a layout"), self._save(replace(document, name=self._free(document.name))))

    def rename(self, document: SavedDocument, name: str) -> None:
        """Rename a named layout. If another layout has the new name already, a number is appended."""
        if name == document.name:
            return
        catalogue, fresh = self._library.catalogue, replace(document, name=self._free(name))

        def change(path: Path) -> None:
            # Saved first: if that fails, the layout is still there under its old name.
            catalogue.save_document(path, fresh)
            catalogue.forget_document_of(path, document)

        self._run(tr("Saving a layout"), change)

    def delete(self, document: SavedDocument) -> None:
        """Delete a named layout. `restore` undoes it, until another layout is deleted."""
        self.deleted = document
        catalogue = self._library.catalogue
        self._run(tr("Removing a layout"), lambda path: catalogue.forget_document_of(path, document))

    def restore(self) -> None:
        """Save the layout again that was deleted last."""
        document, self.deleted = self.deleted, None
        if document is not None:
            self._run(tr("Saving a layout"), self._save(replace(document, name=self._free(document.name))))

    def import_file(self, file: Path) -> None:
        """Save the layout file `file` as a named layout, under the name of the file."""
        model = self._document.model
        if model is None:
            return
        name, catalogue = self._free(file.stem), self._library.catalogue

        def change(path: Path) -> None:
            layout = read_layout(file, n_layers=model.n_layers)
            # Written anew: the file may have changed since it was read.
            catalogue.save_document(path, SavedDocument("layout", name, encode_layout(layout).decode()))

        self._run(tr("Reading {name}", name=file.name), change)

    def export_file(self, document: SavedDocument, file: Path) -> None:
        """Write a named layout to the layout file `file`, with the devices for which it was made.

        The file has no addresses and no fingerprints of other computers, because it may be given to other people.
        """

        def write() -> None:
            text = document.text.encode()
            # A layout that cannot be read is written as it is, for its author to mend.
            with suppress(LayoutError):
                made = parse_layout(text)
                if made.rig is not None:
                    text = encode_layout(replace(made, rig=without_addresses(made.rig)))
            try:
                write_whole(file, text)
            except OSError as error:
                reason = error.strerror or str(error)
                raise LayoutError(
                    tr("{path} cannot be written ({reason}); choose another place.", path=file, reason=reason)
                ) from None

        self._library.run(
            tr("Saving {name}", name=file.name),
            write,
            lambda _none: self._notices.show(tr("Saved {name}", name=file.name)),
        )

    def noted_speed(self, path: Path, layout: Layout) -> float | None:
        """Return the measured tokens per second that the library stores for `layout` of the model file `path`.

        Return None if there is no measurement. Reads the library's database: not for the GUI thread.
        """
        try:
            notes = self._library.catalogue.notes_of(path)
        except EngineError:
            return None
        return notes.measured if notes.is_measured_on(layout_key(layout)) else None

    def content(self, document: SavedDocument) -> LayoutFile | None:
        """Return the content of a named layout; None if it is damaged or has a wrong number of layers."""
        return self._contents.get(document.text)

    def _free(self, name: str) -> str:
        return free_name(name, (each.name for each in self.documents))

    def _save(self, document: SavedDocument) -> _Change:
        return partial(self._library.catalogue.save_document, document=document)

    def _run(self, what: str, change: _Change) -> None:
        """Call `change` with the path of the current model in the background, then read its named layouts again.

        `what`: description of the change.
        """
        model = self._document.model
        if model is None:
            return
        path, known = model.paths[0].absolute(), self._contents if model is self._model else {}

        def work() -> tuple[tuple[SavedDocument, ...], dict[str, LayoutFile | None]]:
            change(path)
            documents = tuple(each for each in self._library.catalogue.documents_of(path) if each.kind == "layout")
            # Read here: there may be thousands of them.
            texts = {each.text for each in documents}
            return documents, {text: known[text] if text in known else _content(text, model.n_layers) for text in texts}

        def show(found: tuple[tuple[SavedDocument, ...], dict[str, LayoutFile | None]]) -> None:
            # Another model may be current by now.
            if self._document.model is model:
                self._model = model
                self.documents, self._contents = found
                self.changed.emit()

        self._library.run(what, work, show)


def _content(text: str, n_layers: int) -> LayoutFile | None:
    try:
        return parse_layout(text, n_layers=n_layers)
    except EngineError:
        return None
