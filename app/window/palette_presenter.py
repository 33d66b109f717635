"""The command palette of the window: a search in all menu commands, models, load settings and saved layouts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from PySide6.QtCore import QObject
from PySide6.QtGui import QAction, QKeySequence
from PySide6.QtWidgets import QMenu
from shiboken6 import isValid

from app.library.library import Library
from app.models.layouts import Layouts
from app.models.open_models import OpenModels
from app.models.opener import ModelOpener
from app.settings import Settings
from app.window.main_window import MainWindow
from engine.base.language import tr
from engine.library.notes import SavedDocument
from engine.planning.settings.table import SETTINGS
from widgets.common.command_palette import CommandPalette, PaletteEntry
from widgets.controls.settings_dialog import FILE_ROWS

_NATIVE = QKeySequence.SequenceFormat.NativeText


class PalettePresenter(QObject):
    """Opens the command palette. Its entries are collected when it opens; disabled commands are left out."""

    def __init__(
        self,
        main: MainWindow,
        *,
        models: OpenModels,
        opener: ModelOpener,
        library: Library,
        layouts: Layouts,
        settings: Settings,
    ) -> None:
        super().__init__(main)
        self._main, self._models, self._opener = main, models, opener
        self._library, self._layouts, self._settings = library, layouts, settings
        self._palette: CommandPalette | None = None

    def show(self) -> None:
        """Open the palette, or close the open one.

        Saved layouts of the current model are added when they have been read.
        """
        if self._palette is not None and isValid(self._palette):
            self._palette.close()
            return
        recent = self._main.recent_menu  # Its models are listed with the others.
        commands = [entry for action in self._main.menuBar().actions() for entry in menu_entries(action, (), recent)]
        palette = self._palette = CommandPalette((*commands, *self._model_entries()), self._main)
        palette.open()
        file = self._models.current.file
        if file is not None:
            palette.add(self._setting_entries())
            path = file.paths[0].absolute()

            def add(documents: tuple[SavedDocument, ...]) -> None:
                # Qt deletes the palette when it closes, which may be before the layouts have been read.
                if isValid(palette):
                    palette.add(self._layout_entry(each) for each in documents if each.kind == "layout")

            self._library.run(tr("Finding layouts"), partial(self._library.catalogue.documents_of, path), add)

    def _layout_entry(self, document: SavedDocument) -> PaletteEntry:
        return PaletteEntry(
            document.name, tr("Saved layouts"), partial(self._layouts.use, document.name, document.text)
        )

    def _setting_entries(self) -> Iterator[PaletteEntry]:
        """Yield an entry for each load setting, and for each kind of file that is loaded with the model."""
        rows = {setting.key: setting.label for setting in SETTINGS} | dict(FILE_ROWS)
        for key, label in rows.items():
            yield PaletteEntry(label, tr("Load settings"), partial(self._main.settings_bar.setting_requested.emit, key))

    def _model_entries(self) -> Iterator[PaletteEntry]:
        """Yield an entry for each open model, then recent models, then models of the library; each file once."""
        seen = set[Path]()
        for model in self._models.all:
            if model.file is not None:
                seen.add(model.file.paths[0])
                yield PaletteEntry(model.file.name, tr("Open models"), partial(self._opener.show, model))
        known = [(recent.title, recent.path) for recent in self._settings.recent_models]
        for listed in self._library.contents.models:
            known += [(listed.entry.title, copy.path) for copy in listed.chosen.copies[:1]]
        for title, path in known:
            if path not in seen:
                seen.add(path)
                yield PaletteEntry(title, tr("Models"), partial(self._opener.open, path))


def menu_entries(action: QAction, groups: tuple[str, ...], left_out: QMenu) -> Iterator[PaletteEntry]:
    """Yield an entry for each enabled command of a menu and of its submenus, except commands in the menu `left_out`.

    `groups`: titles of the menus that contain `action`, from the menu bar inwards.
    """
    # In Qt's menu texts "&&" is an ampersand, and a single "&" marks the mnemonic.
    text = action.text().replace("&&", "\0").replace("&", "").replace("\0", "&").rstrip("…")
    menu = action.menu()
    if menu is left_out or not action.isEnabled() or not action.isVisible() or action.isSeparator():
        return
    if isinstance(menu, QMenu):
        for each in menu.actions():
            yield from menu_entries(each, (*groups, text), left_out)
    elif text:
        is_on = action.isCheckable() and action.isChecked()
        title = tr("{command} (on)", command=text) if is_on else text
        yield PaletteEntry(title, " › ".join(groups), action.trigger, action.shortcut().toString(_NATIVE))
