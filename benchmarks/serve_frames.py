"""Frame rate of the window while its API server streams answers to four programs, and while it is idle.

    python -m benchmarks.serve_frames [--model FILE.gguf] [--seconds 10] [--clients 4] [--hidden]

The whole window runs in this process, with a model that it loads itself, and with the server's panel shown. The clients
run in a process of their own. Frames are measured as in `benchmarks.frame_rate`. Printed for `idle` and `streams`:
frames per second, number of frames, number of slow ones (over 1/30 s), and the 99 % quantile and maximum of the
milliseconds between frames (wall clock). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtWidgets import QApplication

from benchmarks.frame_rate import Frames, figures, load, run_until, wait_for

if TYPE_CHECKING:
    from app.wiring import WindowObjects

CLIENTS = """
import http.client, json, sys, threading
address, key, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
tokens = [0] * count
def read(place):
    while True:
        connection = http.client.HTTPConnection(address)
        asked = {"messages": [{"role": "user", "content": f"Tell a long story about {place} layers."}],
                 "stream": True, "max_tokens": 100000, "repetition": "continue", "seed": tokens[place]}
        headers = {"Authorization": f"Bearer {key}"}
        connection.request("POST", "/v1/chat/completions", json.dumps(asked).encode(), headers)
        reply = connection.getresponse()
        while line := reply.readline():
            tokens[place] += b'"content"' in line
        connection.close()
for place in range(count):
    threading.Thread(target=read, args=(place,), daemon=True).start()
for _ in sys.stdin:
    print(*tokens, flush=True)
"""
"""Program of the clients: each streams one answer after another.

For each line of standard input it prints the number of tokens that each client has received.
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--hidden", action="store_true", help="without the panel")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
        os.environ["HOME"] = home
        for name in ("CONFIG", "DATA", "STATE", "CACHE"):
            os.environ[f"XDG_{name}_HOME"] = home
        result = measure(options.model, options.seconds, options.clients, is_shown=not options.hidden)
    for name in ("idle", "streams"):
        print(
            f"{name}: {result[f'{name}_fps']} frames/s, {result[f'{name}_slow']} of {result[f'{name}_frames']} slow,"
            f" 99 % within {result[f'{name}_p99_ms']} ms, longest {result[f'{name}_longest_ms']} ms"
        )
    print(json.dumps({"benchmark": "serve_frames", **result}))


def measure(path: Path | None, seconds: float, clients: int, *, is_shown: bool) -> dict[str, object]:
    """Return the frame figures of the idle and of the serving window, the tokens, and the updates of the panel."""
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
        load(window, path or ensure_demo(), clients)
        address, key = serve(window, is_shown=is_shown)
        idle = frames.over(seconds)
        command = [sys.executable, "-c", CLIENTS, address, key, str(clients)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as asking:
            wait_for(lambda: len(window.desk.loading.bridge.session.snapshot.requests) == clients)
            run_until(lambda: False, 2.0)
            before, updates = _tokens(asking), _updates(window)
            busy = frames.over(seconds)
            tokens, updates = _tokens(asking) - before, _updates(window) - updates
            asking.kill()
        found = {"clients": clients, "tokens": tokens, "updates": updates}
        return {**figures("idle", idle), **figures("streams", busy), **found}
    finally:
        window.main.close()


def serve(window: WindowObjects, *, is_shown: bool) -> tuple[str, str]:
    """Start the server; return its address and its API key. `is_shown`: show its panel."""
    server = window.desk.server
    # Not its usual port: another server may have that.
    window.desk.settings.serve_port = 18_080
    if is_shown:
        window.actions["serve"].trigger()
    server.start()
    wait_for(lambda: bool(server.state.url and server.state.key) or bool(server.state.fault))
    if server.state.fault:
        raise RuntimeError(server.state.fault)
    return server.state.url.removeprefix("http://"), server.state.key


def _tokens(asking: subprocess.Popen[str]) -> int:
    assert asking.stdin is not None
    assert asking.stdout is not None
    asking.stdin.write("\n")
    asking.stdin.flush()
    return sum(map(int, asking.stdout.readline().split()))


def _updates(window: WindowObjects) -> int:
    from app.window.serve_presenter import ServePresenter

    return sum(presenter.n_updates for presenter in window.main.findChildren(ServePresenter))


if __name__ == "__main__":
    main()
