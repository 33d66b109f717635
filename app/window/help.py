"""The Help menu: keys, the log, and what this is."""

from __future__ import annotations

from PySide6.QtCore import QUrl
from PySide6.QtGui import QDesktopServices
from PySide6.QtWidgets import QWidget

from app.bug_report import versions
from app.notices import Notices
from app.paths import log_path
from app.window import dialogs
from app.window.keys_dialog import KeysDialog
from widgets.layout_editor.keys import KEYS

ABOUT = "Layerdeck places the layers of a model on your devices, loads exactly that, and chats with the result."


def show_keys(parent: QWidget, shortcuts: dict[str, str]) -> None:
    """Show the keys of the editor and the window's `shortcuts`."""
    KeysDialog(parent, (("Layout editor", KEYS), ("Window", shortcuts))).open()


def open_log(notices: Notices) -> None:
    """Show the folder with the log: a file browser is everywhere, a program for .log files is not."""
    folder = log_path().parent
    if not QDesktopServices.openUrl(QUrl.fromLocalFile(str(folder))):
        notices.say(f"No file browser answered. The log is in {folder}")


def show_about(parent: QWidget) -> None:
    """Show what this is, and the versions of what it is made of."""
    dialogs.show_text(parent, "About Layerdeck", f"{ABOUT}\n\n{versions()}")
