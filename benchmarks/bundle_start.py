"""Time from the start of the program to its window on the screen: the bundle in `dist/` and the checkout, in turns.

    python -m benchmarks.bundle_start [--bundle dist/layerdeck] [--rounds 9]

Each start is a new process with a new home folder, on a virtual screen (Xvfb). The bundle is made by `python3 make.py
bundle`. Printed are medians in milliseconds (wall clock), and the ratio of bundle to checkout. Goal: a ratio of at most
1.2. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks._turns import medians_in_turns
from tests.support.desktop import Desktop, open_desktop

ROOT = Path(__file__).resolve().parent.parent
CHECKOUT = [sys.executable, "-c", "import sys; from app.gui import main; sys.exit(main([]))"]
TIMEOUT_S = 120


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bundle", type=Path, default=ROOT / "dist" / "layerdeck")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    program = options.bundle.resolve() / "layerdeck"
    if not program.is_file():
        parser.error(f"{program} is not there: `python3 make.py bundle` makes it")
    commands = {"bundle": [str(program)], "checkout": CHECKOUT}
    with open_desktop() as desktop:
        medians = medians_in_turns(commands, lambda kind: start_once(desktop, commands[kind]), options.rounds)
    result = {
        "benchmark": "bundle_start",
        **{f"{kind}_ms": round(seconds * 1000, 1) for kind, seconds in medians.items()},
        "ratio": round(medians["bundle"] / medians["checkout"], 3),
        "rounds": options.rounds,
    }
    print(f"bundle {result['bundle_ms']} ms, checkout {result['checkout_ms']} ms, ratio {result['ratio']}")
    print(json.dumps(result))


def start_once(desktop: Desktop, command: Sequence[str]) -> float:
    """Return the seconds from the start of a program until its window is visible."""
    with tempfile.TemporaryDirectory() as home:
        environment = {"HOME": home, "PATH": "/usr/bin:/bin", "DISPLAY": desktop.environment["DISPLAY"]}
        begun = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            while not _window_of(desktop):
                if process.poll() is not None or time.perf_counter() - begun > TIMEOUT_S:
                    raise RuntimeError(f"{command[0]} did not come up")
            return time.perf_counter() - begun
        finally:
            process.terminate()
            process.wait(TIMEOUT_S)


def _window_of(desktop: Desktop) -> bool:
    words = ["xdotool", "search", "--onlyvisible", "--name", "Layerdeck"]
    return bool(subprocess.run(words, env=desktop.environment, capture_output=True, check=False).stdout.strip())


if __name__ == "__main__":
    main()
