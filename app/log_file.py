"""The log file, for the window and for commands that load a model. This module does not import Qt."""

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
MAX_LOGS = 2
MAX_ENTRY = 20_000
"""Largest length of a log entry in characters; a traceback has a few thousand."""


def log_file(path: Path) -> logging.Handler:
    """Return a handler that writes to `path` and rotates the file at `MAX_LOG_BYTES`.

    Raises:
        OSError: the file cannot be written.
    """
    make_folder(path.parent)
    # Opening a pipe would wait for its reader.
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "it is not a regular file")
    handler = _LogFile(path, maxBytes=MAX_LOG_BYTES, backupCount=MAX_LOGS, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(ENTRIES)
    return handler


@contextmanager
def command_log(path: Path) -> Iterator[None]:
    """Write the engine's log to the file `path` and not to the terminal.

    If the file cannot be written, entries are dropped.
    """
    log = logging.getLogger("layerdeck")
    before = log.level, log.propagate
    try:
        handler: logging.Handler = log_file(path)
    except OSError:
        handler = logging.NullHandler()
    log.setLevel(logging.INFO)
    # Or the handler of the root logger would print the entries, too.
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
    """A log formatter that escapes control characters and indents the second and later lines of an entry.

    So no text that is quoted in an entry can look like another entry.
    """

    def format(self, record: logging.LogRecord) -> str:
        text = shorten(escape(super().format(record), keep_lines=True), MAX_ENTRY)
        return text.replace("\n", "\n    ")


class _LogFile(RotatingFileHandler):
    """A rotating file that loses entries silently if the disk is full or the folder is gone."""

    def handleError(self, _record: logging.LogRecord) -> None:
        """Drop the entry that cannot be written. Python's default would print a traceback for each entry."""

    def doRollover(self) -> None:
        """Rename the full log file and start a new one.

        If the file cannot be renamed, its content is deleted, so that its size stays bounded.
        """
        try:
            super().doRollover()
        except OSError:
            self.stream = self._open()
            self.stream.truncate(0)


ENTRIES = _OneEntryALine("%(asctime)s %(levelname)s %(name)s: %(message)s")
