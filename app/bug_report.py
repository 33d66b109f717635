"""Bugs: any exception nobody expected is logged and shown in a dialog that can be copied."""

from __future__ import annotations

import logging
import platform
import sys
import threading
import traceback
from pathlib import Path
from types import TracebackType

import PySide6
from PySide6.QtCore import QObject, Qt, Signal
from PySide6.QtGui import QFontDatabase
from PySide6.QtWidgets import QApplication, QDialog, QDialogButtonBox, QLabel, QPlainTextEdit, QVBoxLayout, QWidget

from engine.base.language import tr

_log = logging.getLogger("layerdeck.bug")


def scrub(text: str, home: Path | None = None) -> str:
    """Return `text` with the user's home folder written as `~`."""
    folder = str(home or Path.home())
    return text if folder in ("/", "") else text.replace(folder, "~")


def versions() -> str:
    """Return what this program is and runs on, in one line."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        own = version("layerdeck")
    except PackageNotFoundError:
        own = "not installed"
    return f"Layerdeck {own}, Python {platform.python_version()}, PySide6 {PySide6.__version__}, {platform.platform()}"


def describe_bug(error: BaseException) -> str:
    """Return a report of `error`: versions and traceback, without paths of the user's home."""
    lines = "".join(traceback.format_exception(error))
    return scrub(f"{versions()}\n\n{lines}")


class BugReporter(QObject):
    """Takes over the exception hooks. Reports from other threads arrive in the GUI thread; one dialog at a time."""

    _reported = Signal(str)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._dialog: BugDialog | None = None
        self._reported.connect(self._on_reported, Qt.ConnectionType.QueuedConnection)

    def install(self) -> None:
        """Report unexpected exceptions of all threads from now on."""
        sys.excepthook = self._on_exception
        threading.excepthook = self._on_thread_exception

    def report(self, error: BaseException) -> None:
        """Log `error` and show it."""
        text = describe_bug(error)
        _log.error("%s", text)
        sys.stderr.write(f"{text}\n")
        self._reported.emit(text)

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            QApplication.quit()
            return
        self.report(error.with_traceback(trace))

    def _on_thread_exception(self, arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_value is not None:
            self.report(arguments.exc_value)

    def _on_reported(self, text: str) -> None:
        if self._dialog is not None and self._dialog.isVisible():
            self._dialog.add(text)
            return
        self._dialog = BugDialog(text, QApplication.activeWindow())
        self._dialog.show()


class BugDialog(QDialog):
    """Shows a report; it can be copied, and nothing is lost by closing it."""

    def __init__(self, text: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle(tr("Something went wrong"))
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose, False)
        self.resize(720, 420)
        label = QLabel(
            tr("This is a bug in Layerdeck. Your layout and chat are still there. The report below says what happened.")
        )
        label.setWordWrap(True)
        self._text = QPlainTextEdit(text)
        self._text.setReadOnly(True)
        self._text.setAccessibleName(tr("The report"))
        self._text.setFont(QFontDatabase.systemFont(QFontDatabase.SystemFont.FixedFont))
        buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Close)
        copy = buttons.addButton(tr("Copy report"), QDialogButtonBox.ButtonRole.ActionRole)
        copy.clicked.connect(self._on_copy)
        buttons.rejected.connect(self.reject)
        layout = QVBoxLayout(self)
        for part in (label, self._text, buttons):
            layout.addWidget(part)

    def add(self, text: str) -> None:
        """Append another report."""
        self._text.appendPlainText("\n" + text)

    def text(self) -> str:
        return self._text.toPlainText()

    def _on_copy(self) -> None:
        QApplication.clipboard().setText(self.text())
