"""The log file, and Qt's own messages in it."""

from __future__ import annotations

import logging
from logging.handlers import RotatingFileHandler
from pathlib import Path

from PySide6.QtCore import QMessageLogContext, QtMsgType, qInstallMessageHandler

MAX_LOG_BYTES = 2 * 1024**2
KEPT_LOGS = 2

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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler: logging.Handler = RotatingFileHandler(
            path, maxBytes=MAX_LOG_BYTES, backupCount=KEPT_LOGS, encoding="utf-8"
        )
    except OSError as error:
        handler = logging.StreamHandler()
        logging.getLogger("layerdeck").warning("No log file: %s", error)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root.addHandler(handler)
    qInstallMessageHandler(_on_qt_message)


def _on_qt_message(kind: QtMsgType, _context: QMessageLogContext, text: str) -> None:
    logging.getLogger("layerdeck.qt").log(_LEVELS.get(kind, logging.WARNING), "%s", text)
