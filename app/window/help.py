"""The Help menu: handbook, keys, the log, and what this is. What it shows is read when it is asked for."""

from __future__ import annotations

from functools import partial

from PySide6.QtCore import QUrl
from PySide6.QtGui import QDesktopServices
from PySide6.QtWidgets import QWidget

from app.background import Background
from app.notices import Notices
from app.paths import log_path
from app.window.keys_dialog import KeysDialog
from app.window.main_window import MainWindow
from engine.devices.device import Rig
from engine.language import tr
from widgets.layout_editor.keyboard import KEYS


def show_keys(parent: QWidget, shortcuts: dict[str, str]) -> None:
    """Show the keys of the editor and the window's `shortcuts`."""
    KeysDialog(parent, ((tr("Layout editor"), KEYS), (tr("Window"), shortcuts))).open()


def show_handbook(main: MainWindow) -> None:
    """Show the handbook's page about what has the keyboard."""
    from app.window.handbook import HandbookWindow, page_about

    window = main.findChild(HandbookWindow) or HandbookWindow(main)
    window.show_page(page_about(main, main.focusWidget()))
    window.show()
    window.raise_()
    window.activateWindow()


def open_log(notices: Notices) -> None:
    """Show the folder with the log: a file browser is everywhere, a program for .log files is not."""
    folder = log_path().parent
    if not QDesktopServices.openUrl(QUrl.fromLocalFile(str(folder))):
        notices.say(tr("No file browser answered. The log is in {folder}", folder=folder))


def show_about(main: MainWindow, background: Background, notices: Notices, rig: Rig) -> None:
    """Show what this is, the versions of what it is made of on the devices of `rig`, and licences."""
    from app.window.about_dialog import AboutDialog
    from app.window.versions import Facts, gather_facts

    def show(facts: Facts) -> None:
        AboutDialog(main, facts).open()

    background.run("Looking up versions", partial(gather_facts, rig), show, notices.tell, quiet=True)
