"""The log file, without Qt: the window has one, and the commands that load a model."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path

from app.paths import make_folder
from engine.base.texts import escape, shorten

MAX_LOG_BYTES = 2 * 1024**2
KEPT_LOGS = 2
MAX_ENTRY = 20_000
"""Characters; a traceback has some thousand."""


def log_file(path: Path) -> logging.Handler:
    """Return what writes entries to `path`, which stays in bounds.

    Raises:
        OSError: where it cannot be written.
    """
    make_folder(path.parent)
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "it is not a regular file")
    handler = _LogFile(path, maxBytes=MAX_LOG_BYTES, backupCount=KEPT_LOGS, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(ENTRIES)
    return handler


@contextmanager
def command_log(path: Path) -> Iterator[None]:
    """Have what the engine logs in `path` and nowhere else; without a word where that cannot be written."""
    log = logging.getLogger("layerdeck")
    before = log.level, log.propagate
    try:
        handler: logging.Handler = log_file(path)
    except OSError:
        handler = logging.NullHandler()
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()
        log.setLevel(before[0])
        log.propagate = before[1]


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


ENTRIES = _OneEntryALine("%(asctime)s %(levelname)s %(name)s: %(message)s")
