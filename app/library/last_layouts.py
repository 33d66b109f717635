"""The last layout of each model: saved after edits, and offered when the model is opened again."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from PySide6.QtCore import QObject, Signal

from app.library.library import Library
from app.models.document import LayoutDocument
from app.models.layouts import Layouts
from app.models.opener import ModelOpener
from app.notices import Notices
from engine.base.errors import EngineError
from engine.base.language import tr
from engine.library.notes import SavedDocument
from engine.model.gguf.model_file import ModelFile
from widgets.common.delayed_call import DelayedCall

SAVE_AFTER_MS = 1000
"""Milliseconds after an edit before the layout is saved, so that quick changes are saved once."""


class LastLayouts(QObject):
    """Saves the edited layout of each model, and offers it when the model is opened again.

    Only layouts that the user has changed are saved. A saved layout is used only if the user chooses it.
    """

    offered_changed = Signal(bool)
    """Carries True if a saved layout of the current model is offered, else False."""

    def __init__(
        self,
        document: LayoutDocument,
        layouts: Layouts,
        opener: ModelOpener,
        library: Library,
        notices: Notices,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._document, self._layouts, self._library, self._notices = document, layouts, library, notices
        self._offered: SavedDocument | None = None
        self._timer = DelayedCall(self, self._save, SAVE_AFTER_MS)
        self._unsaved: tuple[Path, SavedDocument] | None = None
        document.edit_settled.connect(self._on_edit_settled)
        opener.model_changed.connect(self._on_model_changed)

    def use(self) -> None:
        """Replace the edited layout by the offered layout of the model's last use, as one step of undo."""
        if self._offered is not None and self._layouts.use(tr("last layout"), self._offered.text):
            self._offer(None)

    def flush(self) -> None:
        """Save at once a layout that waits for the timer. Called when the window closes; waits for the write."""
        if self._timer.isActive():
            self._timer.stop()
            waiting, self._unsaved = self._unsaved, None
            if waiting is not None:
                try:
                    self._library.catalogue.save_document(*waiting)
                except EngineError as error:
                    self._notices.show_error(error)

    def _on_edit_settled(self) -> None:
        model, text = self._document.model, self._layouts.text()
        if model is None or text is None:
            return
        path = model.paths[0].absolute()
        if self._document.has_first_edit:
            if self._unsaved is not None and self._unsaved[0] == path:
                # The change that waits was undone.
                self._timer.stop()
                self._unsaved = None
            return
        if self._unsaved is not None and self._unsaved[0] != path:
            # Another model is edited already.
            self._save()
        self._unsaved = path, SavedDocument("last", "", text)
        self._timer.start()

    def _save(self) -> None:
        self._timer.stop()
        waiting, self._unsaved = self._unsaved, None
        if waiting is not None:
            self._library.run(
                tr("Saving the layout"),
                partial(self._library.catalogue.save_document, *waiting),
                lambda _none: None,
                # The model is gone, or the disk is full: nothing that the user has asked for has failed.
                lambda _error: None,
            )

    def _on_model_changed(self, model: ModelFile | None) -> None:
        self._offer(None)
        # A model that was edited in this window shows its edit.
        if model is None or not self._document.is_untouched:
            return
        path = model.paths[0].absolute()

        def find() -> tuple[tuple[SavedDocument, ...], bool]:
            catalogue = self._library.catalogue
            return catalogue.documents_of(path), catalogue.has_layouts_of_earlier_file(path)

        def offer(found: tuple[tuple[SavedDocument, ...], bool]) -> None:
            documents, is_other_file = found
            last = next((each for each in documents if each.kind == "last"), None)
            if last is not None and self._document.model is model and last.text != self._layouts.text():
                self._offer(last)
                words = tr("Layout > Use Last Layout restores the last layout of {model}.", model=model.name)
                if is_other_file:
                    words = f"{tr('The model file has changed since its last use.')} {words}"
                self._notices.show(words)

        self._library.run(
            tr("Finding layouts"),
            find,
            offer,
            lambda _error: None,
        )

    def _offer(self, document: SavedDocument | None) -> None:
        self._offered = document
        self.offered_changed.emit(document is not None)
