"""An hour of use with faults, in one window with a lab rig: memory, descriptors, threads and processes must not grow.

    python -m benchmarks.soak [--minutes 60] [--seed 1] [--rounds N] [--only edits|loads|answers|kills] [--objects]

Each round moves layers, changes the context, loads, asks, stops some answers, and unloads. At random it kills a lab
worker or the model child, or takes memory from the machine for a moment. About once a minute the window rests, and a
reading is made: resident memory (after the allocator has returned its unused memory), descriptors, threads, child
processes, and the size of the log.

`--only`: one kind of step, which runs many times as often, to find what grows.
`--rounds`: end after so many rounds instead of `--minutes`, for busy machines.
`--objects`: print the types with more objects at the end than after the first readings.

The first sixth of the time, at most ten minutes, is not judged, since imports, caches and pools fill up. Goals: after
it memory grows by at most 5 MB, nothing else grows, no process is left, and the log stays within its limit. Otherwise
the exit code is 1. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import psutil
from msgspec import Struct
from msgspec.structs import asdict

from benchmarks._process_memory import give_back, object_counts, used_bytes
from engine.base.units import MIB
from engine.planning.layout.layout import Layout, make_layout

if TYPE_CHECKING:
    from PySide6.QtWidgets import QApplication

    from app.wiring import WindowObjects

CAPS = (96 * MIB, 64 * MIB, 96 * MIB)
GROWTH_LIMIT_BYTES = 5_000_000
SETTLE_SHARE = 6
SETTLE_MAX_S = 600.0
STEP_TIMEOUT_S = 120.0
READINGS = 20
"""Number of readings with `--rounds`."""
MOST = 30
"""Number of types that `--objects` prints."""
STEPS = ("edits", "loads", "answers", "kills")
LAYOUTS = 16
"""Number of layouts that are edited in turn. Each forecast is cached, so new layouts would fill caches for hours."""
PRESSURE_BYTES = 512 * MIB
_PRESSURE = (
    f"import time; taken = bytearray({PRESSURE_BYTES}); taken[::4096] = bytes(len(taken[::4096])); time.sleep(2)"
)
_log = logging.getLogger("layerdeck.soak")


class Options(Struct, frozen=True):
    """Options of a run. `rounds`: None if `minutes` limit it. `only`: None for all kinds of steps."""

    minutes: float
    seed: int
    rounds: int | None
    only: str | None
    counts_objects: bool

    def is_over(self, second: float, rounds: int) -> bool:
        """Return whether the run has reached its limit. `second`: since its start."""
        return second >= self.minutes * 60 if self.rounds is None else rounds >= self.rounds

    def is_settled(self, second: float, rounds: int) -> bool:
        """Return whether the first part of the run, which is not judged, is over."""
        if self.rounds is None:
            return second >= min(SETTLE_MAX_S, self.minutes * 60 / SETTLE_SHARE)
        return rounds >= self.rounds / SETTLE_SHARE

    def is_due(self, second: float, rounds: int, last: Reading | None) -> bool:
        """Return whether the next reading is due. `last`: the last reading; None before the first."""
        if last is None:
            return True
        if self.rounds is None:
            return second >= last.second + min(60.0, self.minutes * 3)
        return rounds >= last.rounds + max(1, self.rounds // READINGS)


class Reading(Struct, frozen=True):
    """Counts of the window's process at rest. `second`: since the start of the run. `rounds`: rounds done by then."""

    second: int
    rounds: int
    resident_bytes: int
    used_bytes: int
    """Bytes allocated from the C library.

    If only `resident_bytes` grows, the growth is freed memory that the library did not return.
    """
    python_blocks: int
    """Blocks in use of Python's own allocator."""
    descriptors: int
    threads: int
    children: int
    log_bytes: int


class Soak:
    """Drives one window through random rounds."""

    def __init__(self, application: QApplication, window: WindowObjects, model: Path, log: Path, seed: int) -> None:
        self._application, self._window, self._model, self._log = application, window, model, log
        self._desk = window.desk
        self._numbers = random.Random(seed)
        self._began_s = time.monotonic()
        self._layouts: list[Layout] = []
        self.done = dict.fromkeys(("rounds", "loads", "answers", "stopped", "killed workers", "killed children"), 0)

    def begin(self) -> None:
        """Start a lab rig and open the model."""
        self._start_lab()
        self._desk.opener.open(self._model)
        self._wait("the model is open", lambda: self._desk.document.edit is not None)

    def round(self, only: str | None = None) -> None:
        """Do one round: edits, a load, questions, faults and an unload. `only`: one kind of step instead."""
        self.done["rounds"] += 1
        match only:
            case "edits":
                self._edit()
            case "loads":
                self._load()
                self._unload()
            case "answers":
                if not self._is("READY"):
                    self._load()
                self._ask()
                self._delete_chat()
            case "kills":
                self._load()
                self._numbers.choice((self._kill_worker, self._kill_child))()
                self._unload()
            case _:
                self._all()

    def _all(self) -> None:
        self._edit()
        if self._numbers.random() < 0.2:
            with suppress(OSError):
                subprocess.Popen([sys.executable, "-c", _PRESSURE]).wait(STEP_TIMEOUT_S)
        self._load()
        for _ in range(self._numbers.randrange(1, 4)):
            if self._is("READY"):
                self._ask()
        if self._numbers.random() < 0.25:
            self._kill_worker()
        elif self._numbers.random() < 0.25:
            self._kill_child()
        self._delete_chat()
        self._unload()

    def _unload(self) -> None:
        self._desk.unloader.unload_current()
        self._wait("nothing is loaded", lambda: not self._desk.loading.has_child)

    def read(self) -> Reading:
        """Wait until the window is at rest, and return its counts."""
        self._wait("probes are done", lambda: len(self._probing_children()) <= self._desk.loading.has_child)
        self._pump(1.0)
        gc.collect()
        give_back()
        process = psutil.Process()
        return Reading(
            second=round(time.monotonic() - self._began_s),
            rounds=self.done["rounds"],
            resident_bytes=process.memory_info().rss,
            used_bytes=used_bytes(),
            python_blocks=sys.getallocatedblocks(),
            descriptors=process.num_fds(),
            threads=threading.active_count(),
            children=len(process.children(recursive=True)),
            log_bytes=sum(path.stat().st_size for path in self._log.parent.glob("*.log*")),
        )

    def _start_lab(self) -> None:
        started: list[bool] = []
        self._desk.rig.lab.start(CAPS, lambda: started.append(True))
        self._wait("the lab is up", lambda: bool(started))

    def _edit(self) -> None:
        document = self._desk.document
        assert document.edit is not None
        layouts = self._layouts or [self._random_layout(document.edit.layout.n_layers) for _ in range(LAYOUTS)]
        self._layouts = layouts
        for _ in range(self._numbers.randrange(2, 6)):
            document.set_layout(self._numbers.choice(layouts), "soak")
            self._pump(0.05)
        document.undo_group.undo()
        n_ctx = self._numbers.choice((256, 1024, 8192))
        document.set_context(msgspec.structs.replace(document.edit.context, n_ctx=n_ctx))

    def _random_layout(self, n_layers: int) -> Layout:
        ids = [*(device.id for device in self._desk.rig.live.rig.devices), "CPU"]
        cuts = sorted(self._numbers.choices(range(n_layers + 1), k=len(ids) - 1))
        places = [
            device
            for device, begin, end in zip(ids, [0, *cuts], [*cuts, n_layers], strict=True)
            for _ in range(end - begin)
        ]
        return make_layout(n_layers, places, self._numbers.choice(ids))

    def _load(self) -> None:
        self._desk.loader.load()
        self._pump(0.2)
        # A load may wait for the memory of the one before.
        self._wait("the load has ended", lambda: not self._desk.loading.is_busy and not self._desk.loader.is_waiting)
        self.done["loads"] += 1

    def _ask(self) -> None:
        self._desk.models.current.conversation.send(f"Tell me about {self._numbers.random()}")
        self._pump(2 * self._numbers.random())
        if self._is("ANSWERING"):
            self._desk.loading.stop_answer()
            self.done["stopped"] += 1
        self._wait("the answer has ended", lambda: not self._is("ANSWERING"))
        self.done["answers"] += 1

    def _delete_chat(self) -> None:
        """Delete the conversation. Stored conversations need memory, which must not count as growth."""
        conversation = self._desk.models.current.conversation
        chat = conversation.chat.id
        conversation.clear()
        self._desk.chat_controller.delete(chat)

    def _kill_worker(self) -> None:
        """Kill a worker of the lab rig, then start a new lab rig."""
        processes = [each.pid for each in self._desk.rig.lab.processes.values()]
        os.kill(self._numbers.choice(processes), signal.SIGKILL)
        self.done["killed workers"] += 1
        self._pump(1.0)
        self._unload()
        self._desk.rig.lab.stop()
        self._wait("the lab is down", lambda: not self._desk.rig.lab.processes)
        self._start_lab()

    def _kill_child(self) -> None:
        child = next((each for each in psutil.Process().children() if _role(each) == "worker"), None)
        if child is not None:
            child.kill()
            self.done["killed children"] += 1
            self._wait("the loss was seen", lambda: not self._desk.loading.has_child)

    def _is(self, state: str) -> bool:
        return self._desk.loading.phase.name == state

    def _probing_children(self) -> list[psutil.Process]:
        """Return the children that probe or hold a model, without lab workers and without the window's spare child."""
        lab = {each.pid for each in self._desk.rig.lab.processes.values()}
        return [each for each in psutil.Process().children() if each.pid not in lab and _role(each) != "probe"]

    def _wait(self, what: str, condition: Callable[[], bool]) -> None:
        end_s = time.monotonic() + STEP_TIMEOUT_S
        while not condition():
            if time.monotonic() > end_s:
                state, line = self._desk.loading.phase.name, self._window.main.status_line.text()
                raise TimeoutError(f"{what}: not within {STEP_TIMEOUT_S:g} s; {state}, {line}")
            self._pump(0.02)

    def _pump(self, seconds: float) -> None:
        """Process events of the window for `seconds`."""
        from PySide6.QtCore import QCoreApplication, QEvent, QEventLoop

        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            self._application.processEvents(QEventLoop.ProcessEventsFlag.AllEvents, round(left_s * 1000) + 1)
            # outside of `exec` nobody else deletes what is to be deleted later
            QCoreApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete)
            time.sleep(min(left_s, 0.005))


def _role(process: psutil.Process) -> str:
    """Return the last word of a child's command line, which names its purpose; empty if it has ended."""
    with suppress(psutil.Error, IndexError):
        return str(process.cmdline()[-1])
    return ""


def verdict(readings: list[Reading], options: Options) -> tuple[int, list[str]]:
    """Return the growth of memory after the first part of the run, and a sentence for each missed goal."""
    from app.log_file import MAX_LOG_BYTES, MAX_LOGS

    settled = [each for each in readings if options.is_settled(each.second, each.rounds)] or readings[-1:]
    first, last = settled[0], settled[-1]
    growth_bytes = last.resident_bytes - first.resident_bytes
    wrong = [f"memory grew by {growth_bytes} bytes"] if growth_bytes > GROWTH_LIMIT_BYTES else []
    for name in ("descriptors", "threads", "children"):
        least = min(getattr(reading, name) for reading in settled[len(settled) // 2 :])
        if least > getattr(first, name):
            wrong.append(f"{name} grew from {getattr(first, name)} to {least}")
    if last.log_bytes > (MAX_LOGS + 1) * (MAX_LOG_BYTES + MAX_LOG_BYTES // 10):
        wrong.append(f"the log has {last.log_bytes} bytes")
    return growth_bytes, wrong


@contextmanager
def open_real_window(theme: Literal["light", "dark"]) -> Iterator[tuple[Path, QApplication, WindowObjects]]:
    """Open the window as the program does, with a new home folder that is removed afterwards.

    Yield the home folder, the application and the window.
    """
    with tempfile.TemporaryDirectory(prefix="layerdeck-hour-") as home:
        os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
        os.environ["HOME"] = home
        for name in ("CONFIG", "CACHE", "DATA", "STATE"):
            os.environ[f"XDG_{name}_HOME"] = f"{home}/{name.lower()}"
        from PySide6.QtWidgets import QApplication

        from app.allocator import limit_malloc
        from app.garbage import GarbageCollector
        from app.logs import start_logging
        from app.paths import log_path
        from app.settings import Settings
        from app.theme import Theme
        from app.wiring import make_window

        limit_malloc()
        start_logging(log_path())
        application = QApplication(sys.argv[:1])
        collector = GarbageCollector(application)
        window = make_window(Settings(), Theme(application, theme))
        window.main.resize(1280, 800)
        window.main.show()
        window.start(files=[], rig=None)
        collector.begin()
        yield Path(home), application, window


def left_behind() -> list[str]:
    """Return a sentence for each child process that still runs."""
    return [f"left behind: {' '.join(each.cmdline())}" for each in psutil.Process().children(recursive=True)]


def run(options: Options) -> int:
    """Run the rounds; return the exit code."""
    with open_real_window("light") as (home, application, window):
        from app.paths import log_path
        from engine.model.demo.writer import write_demo_model

        model = home / "demo.gguf"
        write_demo_model(model)
        soak = Soak(application, window, model, log_path(), options.seed)
        readings: list[Reading] = []
        counts: Counter[str] | None = None
        soak.begin()
        begun_s = time.monotonic()
        while not options.is_over(time.monotonic() - begun_s, soak.done["rounds"]):
            soak.round(options.only)
            done = time.monotonic() - begun_s, soak.done["rounds"]
            if options.is_due(*done, readings[-1] if readings else None):
                readings.append(soak.read())
                print(json.dumps(asdict(readings[-1])), flush=True)
                if counts is None and options.counts_objects and options.is_settled(*done):
                    counts = object_counts()
        readings.append(soak.read())
        if counts is not None:
            more = (object_counts() - counts).most_common(MOST)
            print(json.dumps({"more_objects": dict(more)}), flush=True)
        window.main.close()
        growth_bytes, wrong = verdict(readings, options)
        wrong += left_behind()
        print(json.dumps({"growth_bytes": growth_bytes, "wrong": wrong, **soak.done}), flush=True)
        return 1 if wrong else 0


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(prog="soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, help="end after so many, whatever time they take")
    parser.add_argument("--only", choices=STEPS, help="do one kind of step")
    parser.add_argument("--objects", action="store_true", help="tell of which types there are more in the end")
    given = parser.parse_args()
    return run(Options(given.minutes, given.seed, given.rounds, given.only, given.objects))


if __name__ == "__main__":
    sys.exit(main())
