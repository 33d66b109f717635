"""Cold start of the window against a bare window of PySide6 and pyqtgraph, both until the first picture is painted.

Our window is constructed before it is shown, so its first picture is complete.

Each start is a new process with a home of its own. The two kinds take turns, so that a noisy machine hits both.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 7
TIMEOUT_S = 60
ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Measure and print."""
    times: dict[str, list[float]] = {"window": [], "bare": []}
    for number in range(ROUNDS + 1):
        for kind, taken in times.items():
            seconds = start_once(kind)
            if number:  # the first round fills the file cache
                taken.append(seconds)
    window_s, bare_s = (statistics.median(each) for each in times.values())
    result = {
        "benchmark": "cold_start",
        "window_ms": round(window_s * 1000, 1),
        "bare_ms": round(bare_s * 1000, 1),
        "ratio": round(window_s / bare_s, 3),
        "rounds": ROUNDS,
        "platform": os.environ.get("QT_QPA_PLATFORM", "offscreen"),
    }
    print(f"window {result['window_ms']} ms, bare {result['bare_ms']} ms, ratio {result['ratio']}")
    print(json.dumps(result))


def start_once(kind: str) -> float:
    """Return the seconds from the start of a process of `kind` to the first paint of its window."""
    with tempfile.TemporaryDirectory() as home:
        environment = {"QT_QPA_PLATFORM": "offscreen", **os.environ, "HOME": home, "XDG_CONFIG_HOME": home}
        environment.update(XDG_DATA_HOME=home, XDG_STATE_HOME=home, XDG_CACHE_HOME=home)
        begun = time.perf_counter()
        child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks._cold_start_child", kind],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
        )
        try:
            assert child.stdout is not None
            word = child.stdout.readline().strip()
            painted_s = time.perf_counter() - begun
            child.wait(TIMEOUT_S)
        finally:
            child.kill()
            child.wait()
            if child.stdout is not None:
                child.stdout.close()
    if word != b"painted":
        raise RuntimeError(f"the {kind} window did not come up")
    return painted_s


if __name__ == "__main__":
    main()
