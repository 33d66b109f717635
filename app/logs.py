"""The log file, and Qt's own messages in it."""

from __future__ import annotations

import errno
import logging
from logging.handlers import RotatingFileHandler
from pathlib import Path

from PySide6.QtCore import QMessageLogContext, QtMsgType, qInstallMessageHandler

from app.paths import make_folder
from engine.texts import escape, shorten, show

MAX_LOG_BYTES = 2 * 1024**2
KEPT_LOGS = 2
MAX_ENTRY = 20_000
"""Characters; a traceback has some thousand."""

_LEVELS = {
    QtMsgType.QtDebugMsg: logging.DEBUG,
    QtMsgType.QtInfoMsg: logging.INFO,
    QtMsgType.QtWarningMsg: logging.WARNING,
    QtMsgType.QtCriticalMsg: logging.ERROR,
    QtMsgType.QtFatalMsg: logging.CRITICAL,
}


def start_logging(path: Path) -> None:
    """Log to `path` from now on. Where it cannot be written the program runs without a log."""
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    fault = ""
    try:
        make_folder(path.parent)
        if path.exists() and not path.is_file():
            raise FileExistsError(errno.EEXIST, "it is not a regular file")
        handler: logging.Handler = _LogFile(
            path, maxBytes=MAX_LOG_BYTES, backupCount=KEPT_LOGS, encoding="utf-8", errors="backslashreplace"
        )
    except OSError as error:
        handler = logging.StreamHandler()
        fault = f"No log file: {show(str(path))}: {error.strerror or error}"
    handler.setFormatter(_OneEntryALine("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root.addHandler(handler)
    if fault:
        logging.getLogger("layerdeck").warning("%s", fault)
    qInstallMessageHandler(_on_qt_message)


class _OneEntryALine(logging.Formatter):
    """What an entry quotes steers no terminal; its further lines are indented, so that none can pass for an entry."""

    def format(self, record: logging.LogRecord) -> str:
        text = shorten(escape(super().format(record), keep_lines=True), MAX_ENTRY)
        return text.replace("\n", "\n    ")


class _LogFile(RotatingFileHandler):
    """A disk that is full, or a folder that went away, costs entries and nothing else: nobody is told each time."""

    def handleError(self, _record: logging.LogRecord) -> None:
        """The entry is lost."""

    def doRollover(self) -> None:
        """Begin a new file; where the old one cannot be renamed it is emptied, so that it stays in bounds."""
        try:
            super().doRollover()
        except OSError:
            self.stream = self._open()
            self.stream.truncate(0)


def _on_qt_message(kind: QtMsgType, _context: QMessageLogContext, text: str) -> None:
    logging.getLogger("layerdeck.qt").log(_LEVELS.get(kind, logging.WARNING), "%s", text)
