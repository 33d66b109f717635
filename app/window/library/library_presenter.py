"""The library page in the main window, and the presenter that connects it to `Library`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from PySide6.QtCore import QObject, Qt, Signal
from PySide6.QtWidgets import QFileDialog, QMenu, QMessageBox, QSizePolicy, QWidget

from app.chats.preset_store import PresetStore
from app.library.catalogue import LibraryContents
from app.library.library import Library
from app.models.document import LayoutDocument
from app.models.layouts import Layouts
from app.models.opener import ModelOpener
from app.rig.live_rig import LiveRig
from app.settings import Settings
from app.window.main_window import MainWindow
from engine.base.language import tr
from engine.base.units import format_bytes
from engine.base.values import replace
from engine.library.duplicates import Duplicates
from engine.library.listed import Listed, fingerprints_of
from engine.library.notes import SavedDocument
from engine.library.removal import Removal
from engine.library.starters import Starter, starters_for
from widgets.library.entry_details import NotesChange, OpenRequest, RemovalRequest
from widgets.library.library_view import LibraryView


class LibraryPage(QObject):
    """Shows the library page in place of devices and layout, and hides the docks meanwhile."""

    shown_changed = Signal(bool)

    def __init__(self, main: MainWindow) -> None:
        super().__init__(main)
        self.view = LibraryView()
        self._main = main
        self._hidden: list[QWidget] = []
        self._shows_desk = True
        self._pages = main.pages
        self._pages.addWidget(self.view)
        # What is hidden asks for no room.
        self.view.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Ignored)
        self._state = main.saveState()
        self.view.closed.connect(self.hide)
        # Before the window keeps where its docks are: it is the desk that is to be found again.
        main.about_to_close.connect(self.hide)

    @property
    def is_shown(self) -> bool:
        return self._pages.currentWidget() is self.view

    def toggle(self) -> None:
        """Show the library page, or hide it if it is shown."""
        if self.is_shown:
            self.hide()
        else:
            self.show()

    def show(self) -> None:
        """Show the library page, and hide the docks."""
        if not self.is_shown:
            self._state = self._main.saveState()
            around = (*self._main.docks.values(), self._main.serve_dock, self._main.settings_bar.parentWidget())
            self._hidden = [widget for widget in around if widget is not None and not widget.isHidden()]
            for widget in self._hidden:
                widget.hide()
            # The chat alone has the window without what is in its middle.
            self._shows_desk = not self._pages.isHidden()
            self._pages.setCurrentWidget(self.view)
            self._pages.show()
            self.shown_changed.emit(True)
        self.view.begin()

    def hide(self) -> None:
        """Hide the library page, and show the docks again as they were."""
        if not self.is_shown:
            return
        # Notes are reported when their field loses the focus; it may still have it.
        self.view.details.save_notes()
        # Page 0 has the devices and the editor (`MainWindow._place_widgets`).
        self._pages.setCurrentIndex(0)
        self._pages.setVisible(self._shows_desk)
        for widget in self._hidden:
            widget.show()
        self._main.restoreState(self._state)
        self.shown_changed.emit(False)


# A message box does not scroll: more groups would not fit on a low screen.
_MOST_DUPLICATES = 12


class LibraryPresenter(QObject):
    """Connects the library page to `Library`, and asks before files are removed. `page` shows and hides the page."""

    def __init__(
        self,
        library: Library,
        *,
        opener: ModelOpener,
        document: LayoutDocument,
        layouts: Layouts,
        live: LiveRig,
        settings: Settings,
        presets: PresetStore,
        open_file: Callable[[], None],
        main: MainWindow,
    ) -> None:
        super().__init__(main)
        self.page = LibraryPage(main)
        self._library, self._opener, self._document = library, opener, document
        self._layouts, self._live, self._settings, self._main = layouts, live, settings, main
        self._removing = ""
        view = self._view = self.page.view
        library.contents_changed.connect(self._on_contents_changed)
        library.progress.connect(view.show_progress)
        library.removal_planned.connect(self._ask_removal)
        library.documents_found.connect(view.details.show_layouts)
        library.duplicates_found.connect(self._show_duplicates)
        opener.model_changed.connect(library.note_opened)
        self.page.shown_changed.connect(self._on_shown_changed)
        view.add_folder_requested.connect(self.add_folder)
        view.folders_requested.connect(self._show_folders)
        view.duplicates_requested.connect(library.find_duplicates)
        view.model_shown.connect(self._on_model_shown)
        view.starters.open_requested.connect(open_file)
        view.starters.try_demo_requested.connect(self._try_demo)
        view.starters.starter_chosen.connect(self._find_starter)
        details = view.details
        details.open_requested.connect(self._open)
        details.notes_changed.connect(self._note)
        details.removal_requested.connect(self._plan_removal)
        details.forget_requested.connect(library.forget)
        presets.changed.connect(lambda: details.preset_box.show_presets(list(presets.presets)))
        details.layouts.use_requested.connect(self._open_with)
        details.layouts.forget_requested.connect(self._forget_layout)
        details.layouts.save_requested.connect(self._keep_layout)

    def add_folder(self) -> None:
        """Ask for a folder, and add it to the folders that the library scans."""
        begin = self._library.models_folder(model.path for model in self._settings.recent_models)
        name = QFileDialog.getExistingDirectory(self._main, tr("Add a folder with models"), str(begin or ""))
        if name:
            self._library.add_folder(Path(name))

    # ------------------------------------------------------------------ showing

    def _on_shown_changed(self, shown: bool) -> None:
        if shown:
            self._view.show_starters(starters_for(self._live.rig))
            self._library.wake()

    def _on_contents_changed(self, contents: LibraryContents) -> None:
        self._view.show_models(contents.models, contents.problems, is_scanned=contents.is_scanned)

    def _on_model_shown(self, model: Listed | None) -> None:
        if model is None:
            return
        current = self._document.model
        paths = {copy.path for each in model.entry.quantisations for copy in each.copies}
        self._view.details.layouts.set_can_save(current is not None and current.paths[0] in paths)
        self._library.find_documents(fingerprints_of(model.entry))

    # ------------------------------------------------------------------ opening

    def _open(self, request: OpenRequest, document: SavedDocument | None = None) -> None:
        """Open a model of the library. `document`: a saved layout to use when the model is open, or None."""

        def apply() -> None:
            if document is not None:
                self._layouts.use(document.name, document.text)

        if request.projector is not None:
            stored = self._settings.side_files(request.path)
            self._settings.store_side_files(request.path, replace(stored, projector=str(request.projector)))
        self.page.hide()
        self._opener.open(request.path, opened=apply)

    def _open_with(self, document: SavedDocument) -> None:
        request, current = self._view.details.open_request, self._document.model
        if request is None:
            return
        if current is not None and current.paths[0] == request.path:
            self.page.hide()
            self._layouts.use(document.name, document.text)
        else:
            self._open(request, document)

    def _try_demo(self) -> None:
        self.page.hide()
        self._opener.try_demo()

    # ------------------------------------------------------------------ keeping

    def _note(self, change: NotesChange) -> None:
        self._library.note(fingerprints_of(change.model.entry), **change.fields)

    def _keep_layout(self, name: str) -> None:
        model, text, shown = self._document.model, self._layouts.text(with_rig=True), self._view.list_view.current
        if model is not None and text is not None and shown is not None:
            document = SavedDocument("layout", name, text)
            self._library.save_document(model.paths[0], document, fingerprints_of(shown.entry))

    def _forget_layout(self, document: SavedDocument) -> None:
        current = self._view.list_view.current
        if current is not None:
            self._library.remove_document(fingerprints_of(current.entry), document)

    # ------------------------------------------------------------------ removing

    def _plan_removal(self, request: RemovalRequest) -> None:
        self._removing = f"{request.entry.title} {request.quantisation.label}".strip()
        self._library.plan_removal(request.entry, request.quantisation, request.copy)

    def _ask_removal(self, removal: Removal) -> None:
        box = self._question(tr("Move to the trash"), removal.question(self._removing))
        box.setDetailedText("\n".join(map(str, removal.paths)))
        move = box.addButton(tr("Move to Trash"), QMessageBox.ButtonRole.AcceptRole)
        move.setProperty("role", "danger")
        box.addButton(QMessageBox.StandardButton.Cancel)
        box.setDefaultButton(QMessageBox.StandardButton.Cancel)
        move.clicked.connect(lambda: self._library.remove(removal))
        box.open()

    def _show_duplicates(self, duplicates: tuple[Duplicates, ...]) -> None:
        if not duplicates:
            self._question(tr("Duplicates"), tr("There are no duplicate files."), close=True).open()
            return
        wasted = sum(each.wasted_bytes for each in duplicates)
        lines = [tr("Duplicates take up {wasted}.", wasted=format_bytes(wasted))]
        for each in duplicates[:_MOST_DUPLICATES]:
            cost = (
                tr("Several links to one file, which use no extra space")
                if each.is_linked
                else tr("{wasted} in duplicates", wasted=format_bytes(each.wasted_bytes))
            )
            lines += ["", f"{cost}:", *(f"{file.path}  ({file.store.words})" for file in each.files)]
        if len(duplicates) > _MOST_DUPLICATES:
            lines += ["", tr("And {count} more groups of duplicate files.", count=len(duplicates) - _MOST_DUPLICATES)]
        self._question(tr("Duplicates"), "\n".join(lines), close=True).open()

    def _question(self, title: str, text: str, *, close: bool = False) -> QMessageBox:
        box = QMessageBox(self._main)
        box.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        box.setWindowTitle(title)
        # The text has names of files, which may contain markup.
        box.setTextFormat(Qt.TextFormat.PlainText)
        box.setText(text)
        if close:
            box.addButton(QMessageBox.StandardButton.Close)
        return box

    # ------------------------------------------------------------------ folders

    def _show_folders(self) -> None:
        """Show a menu that adds a folder, starts a scan, or removes one of the added folders from the library."""
        menu = QMenu(self._view)
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        menu.addAction(tr("&Add a Folder…"), self.add_folder)
        menu.addAction(tr("&Scan Again"), self._library.scan)
        menu.addSeparator()
        for folder in self._library.contents.folders:
            # In a menu a single ampersand marks a mnemonic.
            text = str(folder).replace("&", "&&")
            menu.addAction(tr("Remove {folder}", folder=text), partial(self._library.remove_folder, folder))
        button = self._view.folders_button
        menu.popup(button.mapToGlobal(button.rect().bottomLeft()))

    def _find_starter(self, starter: Starter) -> None:
        self._view.show_find(starter.address)
