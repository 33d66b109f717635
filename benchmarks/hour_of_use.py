"""An hour of typical use of one window: whether its memory grows, and how much processor time it needs while idle.

    python -m benchmarks.hour_of_use OUT.jsonl [--minutes 60] [--seed 1] [--seconds-of-rest 30]

It loads models, types questions, edits messages, moves layers, scans the library, opens conversations and unloads, with
a step about every two seconds. Each minute it reads the resident memory of the window and of its children, and the
window's once more after the C allocator has returned its unused memory.

At the start, every ten minutes and at the end it rests, with a model loaded and with none. A rest measures the
processor time of each process, the wake-ups per second of each thread, and the events per second of Qt's timers.

Goals: from the tenth minute on memory grows by at most 5 MB, a rest takes less than 1 % of a core, and nothing wakes
more than once a second. Otherwise the exit code is 1. OUT.jsonl gets all lines. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from PySide6.QtCore import QCoreApplication, QEvent, QEventLoop, QObject, QTimer
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication

from benchmarks._process_memory import give_back, used_bytes
from benchmarks.soak import GROWTH_LIMIT_BYTES, Soak, left_behind, open_real_window

if TYPE_CHECKING:
    from app.wiring import WindowObjects

SETTLE_S = 600.0
STEP_S = 2.0
LONGEST_ANSWER_S = 6.0
IDLE_SHARE = 0.01
TIMERS_PER_S = 1.2
"""Timer events per second that are reported as too many. It is above 1, since they are not in step with our clock."""
WAKES_PER_S = 2.2
"""Wake-ups of a thread per second that are reported as too many. A sample wakes the GUI thread, which may then wait for
the interpreter lock: the kernel counts both."""
QUESTIONS = ("Tell me about layers", "And a longer one\nwith two lines", "Why is **that** so?", "`code`, and $x^2$")


class Firings(QObject):
    """Event filter that counts the application's timer events by the object that receives them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() is QEvent.Type.Timer:
            parent = watched.parent()
            self.counts[f"{type(watched).__name__} {watched.objectName()} of {type(parent).__name__}"] += 1
        return False


class Hour(Soak):
    """Uses one window as a person does."""

    def __init__(self, application: QApplication, window: WindowObjects, model: Path, log: Path, seed: int) -> None:
        super().__init__(application, window, model, log, seed)
        # One timer for all waits. Each `QTimer.singleShot` with a delay leaves a block of memory behind (PySide6 6.11).
        self._loop = QEventLoop()
        self._timer = QTimer(singleShot=True)
        self._timer.timeout.connect(self._loop.quit)

    def step(self) -> None:
        """Do one random action, and wait until it has ended."""
        self.done["rounds"] += 1
        if not self._is("READY"):
            self._load()
        chance = self._numbers.random()
        for share, act in (
            (0.45, self._type_question),
            (0.60, self._edit),
            (0.68, self._edit_question),
            (0.76, self._desk.library.scan),
            (0.84, self._open_conversation),
            (0.92, self._delete_chat),
            (1.00, self._unload),
        ):
            if chance < share:
                act()
                break

    def rest(self, seconds: float, loaded: bool) -> dict[str, Any]:
        """Do nothing for `seconds`; return processor time, wake-ups and timer events of that time.

        `loaded`: whether a model is loaded during the rest.
        """
        if loaded and not self._is("READY"):
            self._load()
        elif not loaded:
            self._unload()
        self._pump(10.0)
        before, clock_s = _threads(), time.monotonic()
        self._pump(seconds)
        after, passed_s = _threads(), time.monotonic() - clock_s
        shares: Counter[str] = Counter()
        wakes = {}
        for key, (role, used_s, woken) in after.items():
            _, used_before_s, woken_before = before.get(key, (role, 0.0, 0))
            shares[role] += used_s - used_before_s  # type: ignore[assignment]
            if woken > woken_before:
                wakes[f"{role}/{key[1]}"] = round((woken - woken_before) / passed_s, 2)
        firings = Firings()
        application = QCoreApplication.instance()
        assert application is not None
        application.installEventFilter(firings)
        self._pump(seconds / 3)
        application.removeEventFilter(firings)
        return {
            "loaded": loaded,
            "share_of_core": {role: round(used_s / passed_s, 4) for role, used_s in shares.items()},
            "wakes_per_s": dict(sorted(wakes.items(), key=lambda each: -each[1])[:12]),
            "timers_per_s": {name: round(count / (seconds / 3), 2) for name, count in firings.counts.most_common(8)},
        }

    def sample(self) -> dict[str, Any]:
        """Return memory and other counts of the window's process, and the resident memory of its children."""
        process = psutil.Process()
        resident_bytes = process.memory_info().rss
        gc.collect()
        give_back()
        children: Counter[str] = Counter()
        for each in process.children(recursive=True):
            with suppress(psutil.Error):
                children[_short(each)] += each.memory_info().rss
        return {
            "resident_bytes": resident_bytes,
            "trimmed_bytes": process.memory_info().rss,
            "used_bytes": used_bytes(),
            "python_blocks": sys.getallocatedblocks(),
            "descriptors": process.num_fds(),
            "threads": process.num_threads(),
            "children": dict(children),
            "processor_s": round(sum(process.cpu_times()[:2]), 1),
        }

    def _type_question(self) -> None:
        chat = self._window.views.current.chat
        edit = chat.prompt_edit
        edit.setFocus()
        text = f"{self._numbers.choice(QUESTIONS)} {self.done['rounds']}"
        for letter in text.replace("\n", " "):
            QTest.keyClicks(edit, letter)
            self._pump(0.02)
        self._desk.models.current.conversation.send(text)
        edit.clear()
        self._let_answer(2 * self._numbers.random() if self._numbers.random() < 0.5 else LONGEST_ANSWER_S)

    def _edit_question(self) -> None:
        chat = self._desk.models.current.conversation
        asked = [each for each in chat.prompt_path if each.role == "user"]
        if asked and not chat.is_answering and chat.can_send:
            chat.edit(self._numbers.choice(asked).id, f"edited {self.done['rounds']}")
            self._let_answer(LONGEST_ANSWER_S)

    def _let_answer(self, seconds: float) -> None:
        """Wait until the answer has ended, or stop it after `seconds`."""
        end_s = time.monotonic() + seconds
        self._pump(0.5)
        while self._is("ANSWERING") and time.monotonic() < end_s:
            self._pump(0.1)
        if self._is("ANSWERING"):
            self._desk.loading.stop_answer()
            self.done["stopped"] += 1
        self._wait("the answer has ended", lambda: not self._is("ANSWERING"))
        self.done["answers"] += 1

    def _open_conversation(self) -> None:
        chats = self._desk.archive.chats
        if chats:
            self._desk.chat_controller.open(self._numbers.choice(chats).id)
        # People keep conversations; what is looked for is the rest.
        for each in chats[6:]:
            self._desk.chat_controller.delete(each.id)

    def _pump(self, seconds: float) -> None:
        """Run Qt's event loop for `seconds`. Unlike repeated `processEvents` it sleeps while there is no event."""
        self._timer.start(round(seconds * 1000))
        self._loop.exec()
        QCoreApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete)


def _short(process: psutil.Process) -> str:
    words = process.cmdline()
    return " ".join(Path(word).name[:40] for word in words[-2:])


def _threads() -> dict[tuple[int, str], tuple[str, float, int]]:
    """Return role, processor seconds and number of wake-ups of each thread of the window and its children.

    Keys are (process id, name and id of the thread). A wake-up is a voluntary context switch.
    """
    found: dict[tuple[int, str], tuple[str, float, int]] = {}
    me = psutil.Process()
    tick = os.sysconf("SC_CLK_TCK")
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.Error, OSError):
            role = "window" if process == me else f"{_short(process)} {process.pid}"
            for task in Path(f"/proc/{process.pid}/task").iterdir():
                status = (task / "status").read_text()
                fields = (task / "stat").read_text().rpartition(")")[2].split()
                name = status.split("\n", 1)[0].partition("\t")[2]
                woken = int(status.partition("\nvoluntary_ctxt_switches:")[2].split(None, 1)[0])
                found[process.pid, f"{name} {task.name}"] = (role, (int(fields[11]) + int(fields[12])) / tick, woken)
    return found


def verdict(samples: list[dict[str, Any]], rests: list[dict[str, Any]], settle_s: float) -> dict[str, Any]:
    """Return the growth of memory after `settle_s`, the largest processor share of a rest, and the missed goals."""
    settled = [each for each in samples if each["second"] >= settle_s] or samples[-1:]
    growth_bytes = settled[-1]["trimmed_bytes"] - settled[0]["trimmed_bytes"]
    shares = [sum(each["share_of_core"].values()) for each in rests]
    often = {
        name: wakes
        for each in rests
        for key, limit in (("wakes_per_s", WAKES_PER_S), ("timers_per_s", TIMERS_PER_S))
        for name, wakes in each[key].items()
        if wakes > limit
    }
    wrong = [f"memory grew by {growth_bytes} bytes"] if growth_bytes > GROWTH_LIMIT_BYTES else []
    wrong += [f"rest took {max(shares):.2%} of a core"] if max(shares) >= IDLE_SHARE else []
    wrong += [f"{name} wakes {wakes} times a second" for name, wakes in often.items()]
    return {"growth_bytes": growth_bytes, "rest_share": round(max(shares), 4), "wrong": wrong}


def run(out: Callable[[dict[str, Any]], None], minutes: float, seed: int, rest_s: float) -> int:
    """Use a window for `minutes`; return the exit code. `out` is called with each line of the result."""
    with open_real_window("dark") as (home, application, window):
        from app.paths import log_path
        from engine.model.demo.writer import write_demo_model

        models = home / "models"
        models.mkdir()
        for number in range(4):
            write_demo_model(models / f"demo-{number}.gguf")
        hour = Hour(application, window, models / "demo-0.gguf", log_path(), seed)
        hour.begin()
        begun_s = time.monotonic()
        samples: list[dict[str, Any]] = []
        rests: list[dict[str, Any]] = []
        while (second := time.monotonic() - begun_s) < minutes * 60:
            if len(rests) < 2 * (1 + second // SETTLE_S):
                for loaded in (True, False):
                    rests.append(hour.rest(rest_s, loaded))
                    out({"second": round(second), **rests[-1]})
            if second >= 60 * len(samples):
                samples.append({"second": round(second), "steps": hour.done["rounds"], **hour.sample()})
                out(samples[-1])
            hour.step()
            hour._pump(STEP_S)
        rests += [hour.rest(rest_s, loaded) for loaded in (True, False)]
        samples.append({"second": round(second), "steps": hour.done["rounds"], **hour.sample()})
        for each in (*rests[-2:], samples[-1]):
            out(each)
        window.main.close()
        found = verdict(samples, rests, min(SETTLE_S, minutes * 10))
        found["wrong"] += left_behind()
        out({**found, **hour.done})
        return 1 if found["wrong"] else 0


def main() -> int:
    """Read the command line and start."""
    parser = argparse.ArgumentParser(prog="hour_of_use", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds-of-rest", type=float, default=30.0)
    given = parser.parse_args()

    def write(line: dict[str, Any]) -> None:
        with given.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)

    return run(write, given.minutes, given.seed, given.seconds_of_rest)


if __name__ == "__main__":
    sys.exit(main())
