"""Commands of the Help menu: handbook, keys, log folder and About. Pages and texts are read when they are opened."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from PySide6.QtCore import Qt, QUrl
from PySide6.QtGui import QDesktopServices
from PySide6.QtWidgets import QGridLayout, QScrollArea, QWidget

from app.background import Background
from app.notices import Notices
from app.paths import log_path
from app.window.main_window import MainWindow
from engine.base.language import tr
from engine.devices.device import Rig
from widgets.common.dialog import Dialog
from widgets.common.roles import plain_label
from widgets.layout_editor.keyboard import KEYS


def show_keys(parent: QWidget, shortcuts: dict[str, str]) -> None:
    """Show a dialog with the keys of the layout editor and the shortcuts of the window.

    `shortcuts`: maps each shortcut to the text of its action.
    """
    KeysDialog(parent, ((tr("Layout editor"), KEYS), (tr("Window"), shortcuts))).open()


def show_handbook(main: MainWindow) -> None:
    """Show the handbook page about the part of the window that has the keyboard focus."""
    from app.window.handbook import HandbookWindow, page_about

    # A closed handbook is only hidden: the window stays its parent.
    window = main.findChild(HandbookWindow) or HandbookWindow(main)
    window.show_page(page_about(main, main.focusWidget()))
    window.show()
    window.raise_()
    window.activateWindow()


def open_log(notices: Notices) -> None:
    """Show the log folder in the file manager. Not the log file: few desktops have a program for `.log` files."""
    folder = log_path().parent
    if not QDesktopServices.openUrl(QUrl.fromLocalFile(str(folder))):
        notices.show(tr("No file manager was found. The log is in {folder}", folder=folder))


def show_about(main: MainWindow, background: Background, notices: Notices, rig: Rig) -> None:
    """Show the About dialog with versions, the devices of `rig`, and licences."""
    from app.window.about_dialog import AboutContents, AboutDialog, gather_contents

    def show(contents: AboutContents) -> None:
        AboutDialog(main, contents).open()

    # In the background: the metadata of many packages is read.
    background.run("Looking up versions", partial(gather_contents, rig), show, notices.show_error, quiet=True)


class KeysDialog(Dialog):
    """A dialog with tables of keyboard shortcuts.

    `groups`: for each table, its title and a mapping from shortcuts to their meanings.
    """

    def __init__(self, parent: QWidget, groups: tuple[tuple[str, Mapping[str, str]], ...]) -> None:
        super().__init__(tr("Keyboard Shortcuts"), parent, once=True)
        content = QWidget()
        grid = QGridLayout(content)
        grid.setHorizontalSpacing(24)
        grid.setVerticalSpacing(6)
        grid.setColumnStretch(1, 1)
        for title, keys in groups:
            grid.addWidget(plain_label(title, "title"), grid.rowCount(), 0, 1, 2)
            for name, meaning in keys.items():
                row = grid.rowCount()
                grid.addWidget(plain_label(name, "strong"), row, 0, Qt.AlignmentFlag.AlignTop)
                grid.addWidget(plain_label(meaning, wrap=True), row, 1)
        grid.setRowStretch(grid.rowCount(), 1)
        scroll = QScrollArea()
        scroll.setAccessibleName(tr("Keyboard Shortcuts"))
        scroll.setWidgetResizable(True)
        scroll.setWidget(content)
        self.lay_out(scroll)
        self.resize(560, 600)
