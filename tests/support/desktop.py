"""The program on a virtual screen, with a window manager, a real mouse and a real keyboard."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support.patience import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.02
LOG_END_CHARACTERS = 3000
STANDING = {
    "status": "status_text",
    "report": "load_report.badge_text",
    "load button": "settings_bar.load_buttons.load_button.toolTip",
}
"""Texts of the window for the message of a test whose wait failed, by name: the path for `window_host`."""
TOOLS = ("Xvfb", "xdotool", "openbox")


class Desktop:
    """A virtual screen (X server), with mouse and keyboard through xdotool."""

    def __init__(self, display: str) -> None:
        self.environment = {**os.environ, "DISPLAY": display, "QT_QPA_PLATFORM": "xcb"}

    def mouse(self, *words: object) -> None:
        """Run xdotool with these arguments."""
        subprocess.run(["xdotool", *map(str, words)], env=self.environment, check=True, timeout=DEADLINE_S)

    def click(self, x: int, y: int, *, button: int = 1) -> None:
        """Press and release a button at a point of the screen."""
        self.mouse("mousemove", x, y, "click", button)

    def drag(self, start: tuple[int, int], end: tuple[int, int], *, steps: int = 8) -> None:
        """Press the button at `start`, move to `end` in `steps` steps, and release it."""
        self.mouse("mousemove", "--sync", *start, "mousedown", 1)
        for step in range(1, steps + 1):
            x = start[0] + (end[0] - start[0]) * step // steps
            y = start[1] + (end[1] - start[1]) * step // steps
            self.mouse("mousemove", "--sync", x, y)
        self.mouse("mouseup", 1)

    def type_text(self, text: str) -> None:
        self.mouse("type", "--delay", 5, text)

    def key(self, *keys: str) -> None:
        self.mouse("key", *keys)

    def picture(self, path: Path) -> None:
        """Save an image of the whole screen, if ImageMagick is installed."""
        if shutil.which("import"):
            subprocess.run(
                ["import", "-window", "root", str(path)], env=self.environment, check=True, timeout=DEADLINE_S
            )


class Window:
    """The program's window in a process of its own, questioned through `window_host`."""

    def __init__(self, process: subprocess.Popen[str], desktop: Desktop, home: Path) -> None:
        self.process = process
        self.desktop = desktop
        self._home = home

    def ask(self, question: str, path: str = "") -> Any:
        """Return the answer of `window_host` to a question.

        Raises:
            AssertionError: the window ended, or the question failed.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({question: path}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the window ended with {self.process.wait()}")
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise AssertionError(f"{question} {path}: {answer['error']}")
        return answer

    def wait_for(self, what: str, condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
        """Wait until `condition` holds. `what`: named in the error message after the deadline."""
        end = time.monotonic() + deadline_s
        while not condition():
            if time.monotonic() > end:
                raise AssertionError(f"{what} did not happen; {self._how_it_stands()}")
            # Leaves the processor to the window; ends at once when it ends, and then `ask` says so.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(POLL_S)

    def _how_it_stands(self) -> str:
        """Return state and texts of the window and the end of its log, for the message of a test whose wait failed."""
        said = {name: self.ask("text", path) for name, path in STANDING.items()}
        ends = [log.read_text("utf-8")[-LOG_END_CHARACTERS:] for log in self._home.rglob("layerdeck.log")]
        return f"the window is {self.ask('state')} and says {said}; the log ends with:\n{''.join(ends)}"

    def click(self, path: str) -> None:
        """Click the middle of a widget."""
        x, y, width, height = self.ask("rect", path)
        self.desktop.click(x + width // 2, y + height // 2)

    def drag_layers(self, layer: int, source: str, target: str) -> None:
        """Drag a layer from one lane to another."""
        start = self.ask("layer", f"{layer}@{source}")
        end = self.ask("layer", f"{layer}@{target}")
        self.desktop.drag((start[0], start[1]), (end[0], end[1]))


@contextlib.contextmanager
def open_desktop(size: str = "1280x800") -> Iterator[Desktop]:
    """Start an X server on a free display, with a window manager. Both are ended at the end of the context."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise RuntimeError(f"{', '.join(missing)} missing: `python3 make.py test` installs what the tests need")
    reading, writing = os.pipe()
    server = subprocess.Popen(
        ["Xvfb", "-displayfd", str(writing), "-screen", "0", f"{size}x24", "-nolisten", "tcp"],
        pass_fds=[writing],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(writing)
    manager: subprocess.Popen[bytes] | None = None
    try:
        with os.fdopen(reading) as numbers:
            number = numbers.readline().strip()
        if not number:
            raise RuntimeError("the virtual screen did not start")
        desktop = Desktop(f":{number}")
        manager = subprocess.Popen(
            ["openbox"], env=desktop.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        yield desktop
    finally:
        for process in (manager, server):
            if process is not None:
                process.terminate()
                process.wait(DEADLINE_S)


@contextlib.contextmanager
def open_window(
    desktop: Desktop, home: Path, *, theme: str = "dark", model: Path | None = None, rig: Path | None = None
) -> Iterator[Window]:
    """Run the program with `home` as home folder. If it still runs at the end of the context, it gets SIGTERM."""
    environment = {**desktop.environment, "HOME": str(home)}
    for variable in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        environment[variable] = str(home / variable.lower())
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.window_host", theme, str(model or ""), str(rig or "")],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Window(process, desktop, home)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
