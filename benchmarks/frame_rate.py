"""Frame rate of the window while it streams four answers, and while it is idle.

    python -m benchmarks.frame_rate [--model FILE.gguf] [--seconds 10] [--answers 4]

The whole window runs in this process, with a model that it loads itself. One answer is shown in the chat; the pieces of
all answers pass through the GUI thread. A small widget asks to be painted 60 times a second, and each paint counts as a
frame. Any work that blocks the event loop delays the next frame. The Qt platform is offscreen unless QT_QPA_PLATFORM
names another.

Printed for `idle` and `answers`: frames per second, number of frames, number of slow ones (over 1/30 s), and the 99 %
quantile and maximum of the milliseconds between frames (wall clock). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QDeadlineTimer, QEventLoop, Qt, QTimer
from PySide6.QtGui import QPaintEvent
from PySide6.QtWidgets import QApplication, QWidget

if TYPE_CHECKING:
    from app.wiring import WindowObjects
    from engine.runtime.session.events import Token

FRAME_MS = 16
SLOW_FRAME_S = 1 / 30
TIMEOUT_S = 120
TOKENS = 100_000
"""Limit of tokens of an answer, more than it reaches during the measurement."""
N_CTX = 2048
"""Context length of each answer, in tokens."""


class Frames(QWidget):
    """Widget that asks to be painted 60 times a second, and records the time of each paint."""

    def __init__(self) -> None:
        super().__init__()
        self.setFixedSize(4, 4)
        self.times: list[float] = []
        self._timer = QTimer(self)
        self._timer.setTimerType(Qt.TimerType.PreciseTimer)
        self._timer.setInterval(FRAME_MS)
        self._timer.timeout.connect(self.update)
        self._timer.start()

    def paintEvent(self, _event: QPaintEvent) -> None:
        """Record the time. Nothing is drawn."""
        self.times.append(time.perf_counter())

    def over(self, seconds: float) -> list[float]:
        """Run the event loop for `seconds`; return the seconds between successive frames."""
        self.times.clear()
        run_until(lambda: False, seconds)
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--answers", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
        os.environ["HOME"] = home
        for name in ("CONFIG", "DATA", "STATE", "CACHE"):
            os.environ[f"XDG_{name}_HOME"] = home
        result = measure(options.model, options.seconds, options.answers)
    for name in ("idle", "answers"):
        print(f"{name}: {result[f'{name}_fps']} frames/s, {result[f'{name}_slow']} of {result[f'{name}_frames']} slow")
    print(json.dumps({"benchmark": "frame_rate", **result}))


def measure(path: Path | None, seconds: float, answers: int) -> dict[str, object]:
    """Return the figures of the idle window and of the window with answers, and the number of tokens that came."""
    from app.demo import ensure_demo
    from app.settings import Settings
    from app.theme import Theme
    from app.wiring import make_window

    application = QApplication(sys.argv[:1])
    window = make_window(Settings(), Theme(application, "dark"))
    frames = Frames()
    window.main.statusBar().addPermanentWidget(frames)
    window.main.show()
    try:
        load(window, path or ensure_demo(), answers)
        idle = frames.over(seconds)
        tokens = ask(window, answers)
        busy = frames.over(seconds)
        return {**figures("idle", idle), **figures("answers", busy), "answers": answers, "tokens": len(tokens)}
    finally:
        window.main.close()


def load(window: WindowObjects, path: Path, answers: int) -> None:
    """Load the model with as many slots as there are answers."""
    from engine.planning.settings.context_settings import ContextSettings
    from engine.runtime.session.status import Phase

    desk = window.desk
    window.start(files=[path], rig=None)
    wait_for(lambda: desk.document.edit is not None)
    # One thread: several wait for each other, and on a busy machine hardly a token would come to be shown.
    context = ContextSettings(n_ctx=N_CTX, threads=1, threads_batch=1)
    desk.document.set_context(context.with_requests(answers))
    desk.loader.load()
    wait_for(lambda: desk.loading.phase is Phase.READY)


def ask(window: WindowObjects, answers: int) -> list[object]:
    """Start `answers` answers, and wait for the first token of each; return a list to which each later token is added.

    When an answer ends, another one is started.
    """
    from engine.runtime.protocol.requests import Generate

    model = window.desk.models.current
    tokens: list[object] = []
    begun: set[object] = set()

    def note(event: Token) -> None:
        tokens.append(event)
        begun.add(event.request)

    def another() -> None:
        model.loading.generate(Generate(prompt=f"{len(tokens)} layers are", max_tokens=TOKENS, seed=len(tokens)))

    model.loading.bridge.token.connect(note)
    model.loading.answered.connect(another)
    model.conversation.send("Tell a long story about layers and devices.")
    for _ in range(1, answers):
        another()
    wait_for(lambda: len(begun) >= answers)
    tokens.clear()
    return tokens


def figures(name: str, gaps: list[float]) -> dict[str, object]:
    """Return the figures of the seconds between frames. `name` begins their keys."""
    return {
        f"{name}_fps": round(1 / statistics.median(gaps), 1),
        f"{name}_frames": len(gaps),
        f"{name}_slow": sum(gap > SLOW_FRAME_S for gap in gaps),
        f"{name}_p99_ms": round(sorted(gaps)[int(len(gaps) * 0.99)] * 1000, 1),
        f"{name}_longest_ms": round(max(gaps) * 1000, 1),
    }


def wait_for(condition: Callable[[], bool]) -> None:
    """Run the event loop until `condition` holds.

    Raises:
        RuntimeError: it does not hold within the time limit.
    """
    if not run_until(condition, TIMEOUT_S):
        raise RuntimeError("The window did not get there in time.")


def run_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Run the event loop until `condition` holds, or for `seconds`; return whether it holds."""
    deadline = QDeadlineTimer(int(seconds * 1000))
    while not condition():
        if deadline.hasExpired():
            return False
        QApplication.processEvents(QEventLoop.ProcessEventsFlag.WaitForMoreEvents)
    return True


if __name__ == "__main__":
    main()
