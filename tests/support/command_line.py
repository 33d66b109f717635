"""Runs the command line: to its end, line by line, or in this process if only its output matters."""

from __future__ import annotations

import io
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec import Struct

from app.cli import main
from engine.devices.packs.store import PACKS_VARIABLE
from tests.support.patience import DEADLINE_S
from tests.support.selection import BUNDLE_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
ENDINGS = ("done", "loaded", "out_of_memory", "failed", "crashed", "cancelled")


def program() -> tuple[str, ...]:
    """Return the arguments that start `layerdeck-cli`: of this checkout, or of the bundle under test."""
    bundle = os.environ.get(BUNDLE_VARIABLE)
    if bundle:
        return (str(Path(bundle, "layerdeck-cli")),)
    return (sys.executable, "-c", "import sys; from app.cli import main; sys.exit(main())")


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]

Event = dict[str, Any]


class Answer(Struct, frozen=True):
    """Exit code and output of a finished command. With `--json`, `out` must contain only documents or events."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The only document on standard output."""
        document = json.loads(self.out)
        assert isinstance(document, dict)
        return document

    @property
    def error(self) -> dict[str, Any]:
        """The error object of the only document on standard output."""
        document = self.document
        assert list(document) == ["error"]
        assert list(document["error"])[:2] == ["kind", "message"]
        return dict(document["error"])

    @property
    def events(self) -> list[Event]:
        """The events on standard output, one in each line. Their endings are checked."""
        events = [parse_event(line) for line in self.out.splitlines()]
        check_endings(events)
        return events


def parse_event(line: str) -> Event:
    """Return the event in a line. Its first key must be `event`."""
    event = json.loads(line)
    assert next(iter(event)) == "event", line
    return dict(event)


def check_endings(events: Sequence[Event]) -> None:
    """Fail unless the events have exactly one ending, as the last event.

    `loaded` may come before it if an answer follows, and again if the answer ran out of memory and continues in another
    layout.
    """
    endings = [event["event"] for event in events if event["event"] in ENDINGS]
    assert events[-1]["event"] == endings[-1], events[-1]
    assert set(endings[:-1]) <= {"loaded"}, endings
    attempts = sum(event["event"] == "attempt" for event in events)
    assert len(endings) <= 2 + attempts, endings
    assert endings[-2:] != ["loaded", "loaded"]


def run_cli(*words: str | Path, env: dict[str, str] | None = None, stdout: Any = subprocess.PIPE) -> Answer:
    """Run a command in a process of its own until it ends."""
    done = subprocess.run(
        [*program(), *map(str, words)],
        cwd=ROOT, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, timeout=DEADLINE_S,
        env={**os.environ, **(env or {})}, check=False,
    )  # fmt: skip
    return Answer(done.returncode, (done.stdout or b"").decode("utf-8"), done.stderr.decode("utf-8"))


def run_here(capsys: pytest.CaptureFixture[str], *words: str | Path) -> Answer:
    """Run a command in this process, which is faster. Signal handlers, log level and PACKS_VARIABLE are restored."""
    log = logging.getLogger("layerdeck")
    before = [(number, signal.getsignal(number)) for number in _SIGNALS]
    level = log.level
    packs = os.environ.get(PACKS_VARIABLE)
    capsys.readouterr()
    try:
        code = main([str(word) for word in words])
    finally:
        log.setLevel(level)
        if packs is None:
            os.environ.pop(PACKS_VARIABLE, None)
        for number, handler in before:
            signal.signal(number, handler)
    out, err = capsys.readouterr()
    return Answer(code, out, err)


def spawn_cli(*words: str | Path) -> subprocess.Popen[bytes]:
    """Start a command with pipes for its output. The caller reads them, waits and closes them."""
    return subprocess.Popen(
        [*program(), *map(str, words)],
        cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


class RunningCommand:
    """A command that runs in a process of its own; its output is read line by line."""

    def __init__(self, words: Sequence[str | Path]) -> None:
        self.process = spawn_cli(*words)
        self.events: list[Event] = []
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._errors: list[str] = []
        self._error_lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._read_out), threading.Thread(target=self._read_err)]
        for thread in self._threads:
            thread.start()

    @property
    def err(self) -> str:
        """The output on standard error so far; complete after `finish`."""
        return "".join(self._errors)

    def line(self) -> str | None:
        """Return the next line of standard output; None at its end."""
        return self._lines.get(timeout=DEADLINE_S)

    def error_line(self) -> str | None:
        """Return the next line of standard error; None at its end."""
        return self._error_lines.get(timeout=DEADLINE_S)

    def event(self) -> Event | None:
        """Return the next event; None at the end of the output."""
        line = self.line()
        if line is None:
            return None
        self.events.append(parse_event(line))
        return self.events[-1]

    def wait_for_event(self, kind: str, **fields: object) -> Event:
        """Read events up to one of this kind with these fields, and return it."""
        while (event := self.event()) is not None:
            if event["event"] == kind and all(event[key] == value for key, value in fields.items()):
                return event
        raise AssertionError(f"no {kind} {fields} in {self.events}; {self.err}")

    def document(self) -> dict[str, Any]:
        """Read and return one document, which may span several lines."""
        lines = []
        while (line := self.line()) is not None:
            lines.append(line)
            if line == "}":
                return dict(json.loads("\n".join(lines)))
        raise AssertionError(f"no document in {lines}; {self.err}")

    def children(self) -> list[psutil.Process]:
        """Return the running processes that the command has started."""
        found: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return found

    def finish(self) -> int:
        """Read the remaining events, wait for the end and return the exit code."""
        while self.event() is not None:
            pass
        return self.wait()

    def wait(self) -> int:
        """Wait for the end and return the exit code."""
        code = self.process.wait(DEADLINE_S)
        for thread in self._threads:
            thread.join(DEADLINE_S)
        return code

    def _read_out(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.decode("utf-8").rstrip("\n"))
        self._lines.put(None)

    def _read_err(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._errors.append(line.decode("utf-8"))
            self._error_lines.put(self._errors[-1])
        self._error_lines.put(None)


@contextmanager
def start_cli(*words: str | Path) -> Iterator[RunningCommand]:
    """Start a command; if it still runs at the end of the context, it is killed with its children."""
    command = RunningCommand(words)
    try:
        yield command
    finally:
        if command.process.poll() is None:
            command.process.kill()
        command.wait()
        for pipe in (command.process.stdout, command.process.stderr):
            if pipe is not None:
                pipe.close()


def all_gone(processes: Sequence[psutil.Process]) -> bool:
    """Wait for the end of processes, which need not be our children; return whether all have ended."""
    _, alive = psutil.wait_procs(processes, timeout=DEADLINE_S)
    return not alive


def role_of(process: psutil.Process) -> str:
    """Return the last word of a process's command line, which names its purpose; empty if it has just ended."""
    try:
        return str(process.cmdline()[-1])
    except (psutil.Error, IndexError):
        return ""
