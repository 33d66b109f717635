"""The presenter of Layout > Named Layouts: it fills the list of saved layouts, and carries out the user's actions."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtWidgets import QWidget

from app.library.named_layouts import NamedLayouts
from app.models.document import LayoutDocument
from app.window import dialogs
from app.window.dialogs import OneDialog
from engine.base.language import tr
from engine.library.notes import SavedDocument
from widgets.controls.named_layouts_dialog import NamedLayoutRow, NamedLayoutsDialog

MAX_NAME_BYTES = 100
"""Longest proposed file name in bytes. File systems allow 255, but some programs append something to a name."""
_RESERVED = frozenset({"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(10))})
"""File names that Windows reserves for devices, whatever the extension."""


def file_name_of(name: str) -> str:
    """Return a file name without extension, valid on every file system, from the name of a layout."""
    safe = "".join(letter if letter.isalnum() or letter in " -_." else "_" for letter in name)
    # Points and spaces at the ends hide a file, or are dropped.
    safe = safe.encode()[:MAX_NAME_BYTES].decode(errors="ignore").strip(" .")
    return f"_{safe}" if not safe or safe.partition(".")[0].casefold() in _RESERVED else safe


class NamedLayoutsPresenter(OneDialog[NamedLayoutsDialog]):
    """Fills the dialog with the named layouts of the current model, and carries out its commands."""

    def __init__(self, named: NamedLayouts, document: LayoutDocument, window: QWidget) -> None:
        super().__init__(self._make_dialog, lambda _dialog: named.refresh(), window)
        self._named, self._document, self._window = named, document, window
        self._model = document.model
        named.changed.connect(self._show)
        document.preview_changed.connect(lambda _preview: self._follow_model())

    def _make_dialog(self) -> NamedLayoutsDialog:
        dialog, named = NamedLayoutsDialog(self._window), self._named
        for signal, do in (
            (dialog.use_requested, named.use),
            (dialog.duplicate_requested, named.duplicate),
            (dialog.delete_requested, named.delete),
            (dialog.export_requested, self._export),
        ):
            signal.connect(self._with_document(do))
        dialog.rename_requested.connect(
            lambda row, name: self._with_document(lambda document: named.rename(document, name))(row)
        )
        dialog.save_requested.connect(named.save)
        dialog.restore_requested.connect(named.restore)
        dialog.import_requested.connect(self._import)
        return dialog

    def _with_document(self, do: Callable[[SavedDocument], None]) -> Callable[[int], None]:
        """Return a function that takes the index of a row of the dialog, and calls `do` with the layout in that row."""

        def call(row: int) -> None:
            # The layouts are read in the background, so the row may not exist any more.
            if row < len(self._named.documents):
                do(self._named.documents[row])

        return call

    def _follow_model(self) -> None:
        if self._document.model is not self._model:
            self._model = self._document.model
            if self.dialog is not None and self.dialog.isVisible():
                self._named.refresh()

    def _show(self) -> None:
        if self.dialog is not None:
            rows = [self._row(each) for each in self._named.documents]
            self.dialog.show_layouts(
                rows, has_model=self._document.model is not None, can_restore=self._named.deleted is not None
            )

    def _row(self, document: SavedDocument) -> NamedLayoutRow:
        file = self._named.content(document)
        if file is None:
            return NamedLayoutRow(document.name, tr("cannot be used with this model"), "")
        runs = ", ".join(f"{run.device} {run.length}" for run in file.layout.runs)
        made_for = "" if file.rig is None else ", ".join(device.name for device in file.rig.devices) or tr("CPU only")
        return NamedLayoutRow(document.name, runs, made_for)

    def _import(self) -> None:
        if self.dialog is not None:
            path = dialogs.ask_open(self.dialog, tr("Import a layout"), dialogs.LAYOUT_FILTER)
            if path is not None:
                self._named.import_file(path)

    def _export(self, document: SavedDocument) -> None:
        if self.dialog is not None:
            name = file_name_of(document.name)
            path = dialogs.ask_save(self.dialog, tr("Export the layout"), dialogs.LAYOUT_FILTER, f"{name}.json")
            if path is not None:
                self._named.export_file(document, path)
