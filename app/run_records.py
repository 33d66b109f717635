"""Run marks: each running window has a file with its process id and the models that it has open.

A mark whose process has ended means that the window crashed or was killed; the next window opens its models again.
Python's faulthandler writes a crash into a second file with the same name. Both are deleted when the window closes.
These files contain no text of conversations.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec
from msgspec import Struct

from app.bug_report import scrub, versions
from engine.base.files import read_at_most, write_whole
from engine.base.json_file import MAX_FILE_BYTES, read_struct
from engine.base.values import replace
from engine.chat.database import is_alive, our_name

VERSION = 1
MAX_CRASH_CHARACTERS = 20_000
_MARK, _FAULTS = ".json", ".faults"


class OpenedModel(Struct, frozen=True):
    """An open model of a window.

    `path`: path of its first file.
    `layout`: its layout, as the content of a layout file; empty if the user has not edited the proposed layout.
    """

    path: str
    layout: str = ""


class RunRecord(Struct, frozen=True):
    """The content of a run mark: a running window and its open models.

    `process`: id and start time of the process. `models`: the open models; the visible one is last.
    `restored`: whether the models were opened again after a crash. If this window crashes too, they stay closed.
    """

    version: int
    process: str
    models: tuple[OpenedModel, ...] = ()
    restored: bool = False


class EndedRun(Struct, frozen=True):
    """A window that crashed or was killed.

    `mark`: its run mark, the file that a running window writes.
    `seen_s`: time of the mark's last modification, in seconds since the epoch.
    `faults`: output of Python's faulthandler, or empty.
    """

    mark: RunRecord
    seen_s: float
    faults: str

    @property
    def report(self) -> str:
        """A text that describes the crash, for a bug report.

        The home folder, model names and conversations do not appear in it.
        """
        seen = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.seen_s))
        count = len(self.mark.models)
        open_text = f"{count} {'model' if count == 1 else 'models'}"
        lines = [
            "A window of Layerdeck ended without closing.",
            versions(),
            f"Seen last: {seen}. Open: {open_text}{', after another end like this' if self.mark.restored else ''}.",
            "",
            self.faults or "Python wrote nothing of a crash: the process was killed, or the computer stopped.",
        ]
        return scrub("\n".join(lines))


class RunRecords:
    """Writes the run mark of this process (a file that exists while the window runs), and reads marks of other windows.

    Each call accesses the disk.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Process ids are used again: the mark itself has the start time of the process, too.
        self._path = folder / f"{os.getpid()}{_MARK}"
        self._lock = threading.Lock()
        self._mark = RunRecord(VERSION, our_name())
        self._crash_file: IO[str] | None = None
        self._has_ended = False

    def begin(self) -> None:
        """Write the run mark (file) of this window, and make faulthandler write crashes to a second file next to it.

        Raises:
            OSError: the folder cannot be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        # Kept open: at a crash faulthandler can only write to a descriptor that it has.
        self._crash_file = self._path.with_suffix(_FAULTS).open("w", encoding="utf-8")
        faulthandler.enable(self._crash_file)
        self._write(self._mark)

    def keep(self, models: tuple[OpenedModel, ...], *, restored: bool) -> None:
        """Write the open models into the run mark (this window's file). Nothing is written after `end`.

        `restored`: whether this window opened the models of a crashed window again.
        """
        self._write(replace(self._mark, models=models, restored=restored))

    def end(self) -> None:
        """Delete this window's run mark and the file of faulthandler, so that the next start sees no crash."""
        with self._lock:
            self._has_ended = True
            if self._crash_file is not None:
                # Before the file is closed: its descriptor may belong to another file then.
                faulthandler.disable()
                self._crash_file.close()
            for suffix in (_MARK, _FAULTS):
                with suppress(OSError):
                    self._path.with_suffix(suffix).unlink(missing_ok=True)

    def take_ended(self) -> tuple[EndedRun, ...]:
        """Return the windows that crashed or were killed, newest first, and delete the run marks (files) they left."""
        ended = []
        for path in self._folder.glob(f"*{_MARK}"):
            mark = read_struct(path, RunRecord, MAX_FILE_BYTES, version=None)
            if path == self._path or (mark is not None and is_alive(mark.process)):
                continue
            faults = path.with_suffix(_FAULTS)
            seen_s, words = _changed_s(path), _read_crash(faults)
            try:
                path.unlink()
            except FileNotFoundError:  # Another window that starts at the same moment has taken it.
                continue
            faults.unlink(missing_ok=True)
            if mark is not None and mark.version == VERSION:
                ended.append(EndedRun(mark, seen_s, words))
        return tuple(sorted(ended, key=lambda run: -run.seen_s))

    def has_others(self) -> bool:
        """Return whether another window runs, by its run mark (the file that a running window writes)."""
        others = (path for path in self._folder.glob(f"*{_MARK}") if path != self._path)
        marks = (read_struct(path, RunRecord, MAX_FILE_BYTES, version=None) for path in others)
        return any(mark is not None and is_alive(mark.process) for mark in marks)

    def _write(self, mark: RunRecord) -> None:
        # `keep` is called in a worker's thread, and may come after `end`.
        with self._lock:
            if not self._has_ended:
                self._mark = mark
                write_whole(self._path, msgspec.json.encode(mark))


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _read_crash(path: Path) -> str:
    try:
        return read_at_most(path, MAX_CRASH_CHARACTERS, timeout_s=0.0).decode("utf-8", "replace").strip()
    except OSError:
        return ""
