"""The library: shown in place of the desk, with what people do there connected to whoever does it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from PySide6.QtCore import QObject, Qt, Signal
from PySide6.QtWidgets import QFileDialog, QMenu, QMessageBox, QSizePolicy, QWidget

from app.chats.preset_book import PresetBook
from app.library.catalogue import LibraryContents
from app.library.library import Library
from app.models.document import LayoutDocument
from app.models.layouts import Layouts
from app.models.opener import ModelOpener
from app.rig.live_rig import LiveRig
from app.settings import KeptSideFiles, Settings
from app.window.main_window import MainWindow
from engine.base.language import tr
from engine.base.units import format_bytes
from engine.library.duplicates import Duplicates
from engine.library.listed import Listed, marks_of
from engine.library.notes import KeptDocument
from engine.library.removal import Removal
from engine.library.starters import Starter, starters_for
from widgets.library.entry_details import NotesWish, OpenWish, RemovalWish
from widgets.library.library_view import LibraryView


class LibraryPage(QObject):
    """Goes between the desk, with everything around it, and the library."""

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
        """Show the library, or go back to the desk."""
        if self.is_shown:
            self.hide()
        else:
            self.show()

    def show(self) -> None:
        """Show the library."""
        if not self.is_shown:
            self._state = self._main.saveState()
            around = (*self._main.docks.values(), self._main.settings_bar.parentWidget())
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
        """Go back to the desk, with its panels where they were."""
        if not self.is_shown:
            return
        self.view.details.keep_notes()
        self._pages.setCurrentIndex(0)
        self._pages.setVisible(self._shows_desk)
        for widget in self._hidden:
            widget.show()
        self._main.restoreState(self._state)
        self.shown_changed.emit(False)


_MOST_DUPLICATES = 12


class LibraryPresenter(QObject):
    """`page` is where the view is shown."""

    def __init__(
        self,
        library: Library,
        *,
        opener: ModelOpener,
        document: LayoutDocument,
        layouts: Layouts,
        live: LiveRig,
        settings: Settings,
        presets: PresetBook,
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
        details.layouts.keep_requested.connect(self._keep_layout)

    def add_folder(self) -> None:
        """Ask for a folder to look into."""
        name = QFileDialog.getExistingDirectory(self._main, tr("Add a folder with models"))
        if name:
            self._library.add_folder(Path(name))

    # ------------------------------------------------------------------ showing

    def _on_shown_changed(self, shown: bool) -> None:
        if shown:
            self._view.show_starters(starters_for(self._live.rig))
            self._library.wake()

    def _on_contents_changed(self, contents: LibraryContents) -> None:
        self._view.show_models(contents.models, contents.problems, is_looked=contents.is_scanned)

    def _on_model_shown(self, model: Listed | None) -> None:
        if model is None:
            return
        current = self._document.model
        paths = {copy.path for each in model.entry.quantisations for copy in each.copies}
        self._view.details.layouts.set_can_keep(current is not None and current.paths[0] in paths)
        self._library.find_documents(marks_of(model.entry))

    # ------------------------------------------------------------------ opening

    def _open(self, wish: OpenWish, document: KeptDocument | None = None) -> None:
        """Open a file of the library; `document` is a layout to apply once that file is open."""

        def apply() -> None:
            if document is not None:
                self._layouts.use(document.name, document.text)

        if wish.projector is not None:
            kept = self._settings.side_files(wish.path)
            self._settings.keep_side_files(wish.path, KeptSideFiles(str(wish.projector), kept.device, kept.adapters))
        self.page.hide()
        self._opener.open(wish.path, opened=apply)

    def _open_with(self, document: KeptDocument) -> None:
        wish, current = self._view.details.wish, self._document.model
        if wish is None:
            return
        if current is not None and current.paths[0] == wish.path:
            self.page.hide()
            self._layouts.use(document.name, document.text)
        else:
            self._open(wish, document)

    def _try_demo(self) -> None:
        self.page.hide()
        self._opener.try_demo()

    # ------------------------------------------------------------------ keeping

    def _note(self, wish: NotesWish) -> None:
        self._library.note(marks_of(wish.model.entry), **wish.change)

    def _keep_layout(self, name: str) -> None:
        model, text, shown = self._document.model, self._layouts.text(), self._view.list_view.current
        if model is not None and text is not None and shown is not None:
            document = KeptDocument("layout", name, text)
            self._library.save_document(model.paths[0], document, marks_of(shown.entry))

    def _forget_layout(self, document: KeptDocument) -> None:
        current = self._view.list_view.current
        if current is not None:
            self._library.remove_document(marks_of(current.entry), document)

    # ------------------------------------------------------------------ removing

    def _plan_removal(self, wish: RemovalWish) -> None:
        self._removing = f"{wish.entry.title} {wish.quantisation.label}".strip()
        self._library.plan_removal(wish.entry, wish.quantisation, wish.copy)

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
            self._question(tr("Duplicates"), tr("No file is there twice."), close=True).open()
            return
        wasted = sum(each.wasted_bytes for each in duplicates)
        lines = [tr("{wasted} would be free without copies.", wasted=format_bytes(wasted))]
        for each in duplicates[:_MOST_DUPLICATES]:
            cost = (
                tr("links to one file")
                if each.is_linked
                else tr("{wasted} too much", wasted=format_bytes(each.wasted_bytes))
            )
            lines += ["", f"{cost}:", *(f"{file.path}  ({file.store.words})" for file in each.files)]
        if len(duplicates) > _MOST_DUPLICATES:
            lines += ["", tr("And {count} more.", count=len(duplicates) - _MOST_DUPLICATES)]
        self._question(tr("Duplicates"), "\n".join(lines), close=True).open()

    def _question(self, title: str, text: str, *, close: bool = False) -> QMessageBox:
        box = QMessageBox(self._main)
        box.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        box.setWindowTitle(title)
        box.setTextFormat(Qt.TextFormat.PlainText)
        box.setText(text)
        if close:
            box.addButton(QMessageBox.StandardButton.Close)
        return box

    # ------------------------------------------------------------------ folders

    def _show_folders(self) -> None:
        """Show the folders that were added, each to be taken off the list."""
        menu = QMenu(self._view)
        menu.addAction(tr("&Add a Folder…"), self.add_folder)
        menu.addAction(tr("&Look Again Now"), self._library.scan)
        menu.addSeparator()
        for folder in self._library.contents.folders:
            text = str(folder).replace("&", "&&")
            menu.addAction(tr("Stop looking into {text}", text=text), partial(self._library.remove_folder, folder))
        button = self._view.folders_button
        menu.popup(button.mapToGlobal(button.rect().bottomLeft()))

    def _find_starter(self, starter: Starter) -> None:
        self._view.show_find(starter.address)
