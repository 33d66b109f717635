"""Reports of unexpected exceptions: written to the log, and shown in a dialog with text that can be copied."""

from __future__ import annotations

import logging
import platform
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import PySide6
from PySide6.QtCore import QObject, Qt, Signal
from PySide6.QtGui import QFontDatabase
from PySide6.QtWidgets import QApplication, QLabel, QPlainTextEdit, QWidget
from shiboken6 import isValid

from engine.base.engine_build import own_version
from engine.base.language import tr
from widgets.common.dialog import Dialog

_log = logging.getLogger("layerdeck.bug")


def scrub(text: str, home: Path | None = None) -> str:
    """Return `text` with the path of the home folder replaced by `~`. `home`: None for the user's home folder."""
    folder = str(home or Path.home())
    # The home of root in a container may be `/`, and a path has many of those.
    return text if folder in ("/", "") else text.replace(folder, "~")


def versions() -> str:
    """Return the versions of Layerdeck, Python, PySide6 and the system, in one line."""
    python = platform.python_version()
    return f"Layerdeck {own_version()}, Python {python}, PySide6 {PySide6.__version__}, {platform.platform()}"


def describe_bug(error: BaseException) -> str:
    """Return a report of `error`: versions and traceback, with the home folder written as `~`."""
    lines = "".join(traceback.format_exception(error))
    return scrub(f"{versions()}\n\n{lines}")


class BugReporter(QObject):
    """Installs exception hooks for all threads, and shows each unexpected exception in a dialog of the GUI thread.

    If the dialog is open, the reports of further exceptions are appended to its text.
    `window`: the main window, parent of the dialog; None before it exists.
    """

    _reported = Signal(str)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.window: QWidget | None = None
        self._dialog: BugDialog | None = None
        # Exceptions come from any thread; dialogs belong to the GUI thread.
        self._reported.connect(self._on_reported, Qt.ConnectionType.QueuedConnection)

    def install(self) -> None:
        """Install the hooks, so that unexpected exceptions of all threads are reported from now on."""
        sys.excepthook = self._on_exception
        threading.excepthook = self._on_thread_exception

    def report(self, error: BaseException) -> None:
        """Log `error`, write it to standard error, and show it in a dialog. May be called in any thread."""
        text = describe_bug(error)
        _log.error("%s", text)
        self._reported.emit(text)
        # Standard error may be missing or closed, and an exception in a hook is shown nowhere else.
        if sys.stderr is not None:
            with suppress(OSError, ValueError):
                sys.stderr.write(f"{text}\n")

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # Ctrl+C in the middle of a slot is no bug.
        if issubclass(kind, KeyboardInterrupt):
            QApplication.quit()
            return
        self.report(error.with_traceback(trace))

    def _on_thread_exception(self, arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_value is not None:
            self.report(arguments.exc_value)

    def _on_reported(self, text: str) -> None:
        # A bug in a paint event would otherwise open a dialog for each frame.
        # A dialog that was closed, or whose parent was, is deleted: any call of it would be the next bug.
        if self._dialog is not None and isValid(self._dialog) and self._dialog.isVisible():
            self._dialog.add(text)
            return
        self._dialog = BugDialog(text, self._parent_widget())
        self._dialog.show()

    def _parent_widget(self) -> QWidget | None:
        """Return the parent of the dialog: the active modal dialog, else the main window; None if neither is visible.

        If a modal dialog is open, it must be the parent, because it blocks all windows except its children. Without a
        parent, the bug dialog keeps the program running, so that users can read it even if there is no main window.
        """
        modal = QApplication.activeModalWidget()
        if modal is not None:
            return modal
        return self.window if self.window is not None and self.window.isVisible() else None


class BugDialog(Dialog):
    """A dialog with the report of a bug; reports of further bugs are appended to it."""

    def __init__(self, text: str, parent: QWidget | None = None) -> None:
        super().__init__(tr("Something went wrong"), parent, once=True)
        self.resize(720, 420)
        label = QLabel(
            tr("This is a bug in Layerdeck. Your layout and chat are still there. The report below says what happened.")
        )
        label.setWordWrap(True)
        self._text = QPlainTextEdit(text)
        self._text.setReadOnly(True)
        self._text.setAccessibleName(tr("The report"))
        self._text.setFont(QFontDatabase.systemFont(QFontDatabase.SystemFont.FixedFont))
        self.add_button(tr("Copy report"), self._on_copy)
        self.lay_out(label, self._text)

    def add(self, text: str) -> None:
        """Append the report of another bug."""
        self._text.appendPlainText("\n" + text)

    def text(self) -> str:
        return self._text.toPlainText()

    def _on_copy(self) -> None:
        QApplication.clipboard().setText(self.text())
