"""Set-up of Python's logging for the window, including the messages of Qt."""

from __future__ import annotations

import logging
from pathlib import Path

from PySide6.QtCore import QMessageLogContext, QtMsgType, qInstallMessageHandler

from app.log_file import ENTRIES, log_file
from engine.base.texts import show

_LEVELS = {
    QtMsgType.QtDebugMsg: logging.DEBUG,
    QtMsgType.QtInfoMsg: logging.INFO,
    QtMsgType.QtWarningMsg: logging.WARNING,
    QtMsgType.QtCriticalMsg: logging.ERROR,
    QtMsgType.QtFatalMsg: logging.CRITICAL,
}


def start_logging(path: Path) -> None:
    """Write the log to the file `path` from now on, or to standard error if the file cannot be written."""
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    fault = ""
    try:
        handler: logging.Handler = log_file(path)
    except OSError as error:
        handler = logging.StreamHandler()
        fault = f"No log file: {show(str(path))}: {error.strerror or error}"
    handler.setFormatter(ENTRIES)
    root.addHandler(handler)
    if fault:
        logging.getLogger("layerdeck").warning("%s", fault)
    # Qt writes to standard error, which nobody sees of a window that a menu has started.
    qInstallMessageHandler(_on_qt_message)


def _on_qt_message(kind: QtMsgType, _context: QMessageLogContext, text: str) -> None:
    logging.getLogger("layerdeck.qt").log(_LEVELS.get(kind, logging.WARNING), "%s", text)
