"""Marks of windows that run, with what was open in each: one whose process is gone ended without closing.

A mark is a file named after the process, in the folder of the program's data; beside it lies what Python wrote of a
crash. Both go when the window closes. Nothing of conversations is in them.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from app.bug_report import scrub, versions
from engine.base.files import read_at_most, write_whole
from engine.base.json_file import MAX_FILE_BYTES, read_kept
from engine.chat.database import is_alive, our_name

VERSION = 1
MAX_FAULT_CHARACTERS = 20_000
_MARK, _FAULTS = ".json", ".faults"


class OpenedModel(msgspec.Struct, frozen=True):
    """A model that is open: its first file, and its layout as the text of a layout file; empty: as it was proposed."""

    path: str
    layout: str = ""


class RunMark(msgspec.Struct, frozen=True):
    """A window that runs in `process`. `models`: the one that is shown comes last.

    `restored`: it had opened what an earlier one had left.
    """

    version: int
    process: str
    models: tuple[OpenedModel, ...] = ()
    restored: bool = False


@dataclass(frozen=True, slots=True)
class EndedRun:
    """A window that ended without closing: when at the latest it was seen, and what Python wrote of its crash."""

    mark: RunMark
    seen_s: float
    faults: str

    @property
    def report(self) -> str:
        """What happened, for people to read and to send: without paths of the home, names of models, and words."""
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


class RunMarks:
    """The mark of this process, and those of others in `folder`. Every call touches the disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / f"{os.getpid()}{_MARK}"
        self._lock = threading.Lock()
        self._mark = RunMark(VERSION, our_name())
        self._fault_file: IO[str] | None = None
        self._has_ended = False

    def begin(self) -> None:
        """Mark this process as running, and have Python write down a crash of it.

        Raises:
            OSError: where nothing can be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        self._fault_file = self._path.with_suffix(_FAULTS).open("w", encoding="utf-8")
        faulthandler.enable(self._fault_file)
        self._write(self._mark)

    def keep(self, models: tuple[OpenedModel, ...], *, restored: bool) -> None:
        """Note what is open now. After the end nothing is noted any more."""
        self._write(msgspec.structs.replace(self._mark, models=models, restored=restored))

    def end(self) -> None:
        """Take the mark away, where it is still to be had: the window was closed."""
        with self._lock:
            self._has_ended = True
            if self._fault_file is not None:
                faulthandler.disable()
                self._fault_file.close()
            for suffix in (_MARK, _FAULTS):
                with suppress(OSError):
                    self._path.with_suffix(suffix).unlink(missing_ok=True)

    def take_ended(self) -> tuple[EndedRun, ...]:
        """Return the windows that ended without closing, the last one first; they are told once."""
        ended = []
        for path in self._folder.glob(f"*{_MARK}"):
            mark = read_kept(path, RunMark, MAX_FILE_BYTES)
            if path == self._path or (mark is not None and is_alive(mark.process)):
                continue
            faults = path.with_suffix(_FAULTS)
            if mark is not None and mark.version == VERSION:
                ended.append(EndedRun(mark, _changed_s(path), _read_faults(faults)))
            for file in (path, faults):
                file.unlink(missing_ok=True)
        return tuple(sorted(ended, key=lambda run: -run.seen_s))

    def _write(self, mark: RunMark) -> None:
        with self._lock:
            if not self._has_ended:
                self._mark = mark
                write_whole(self._path, msgspec.json.encode(mark))


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _read_faults(path: Path) -> str:
    try:
        return read_at_most(path, MAX_FAULT_CHARACTERS, timeout_s=0.0).decode("utf-8", "replace").strip()
    except OSError:
        return ""
