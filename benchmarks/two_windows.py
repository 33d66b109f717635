"""Two windows and a command line on the same database, library and downloads: nothing is lost or stored twice.

    python -m benchmarks.two_windows [--minutes 10] [--seed 1]

Both windows (offscreen) stream answers, edit, import, download and change settings, as in `benchmarks.killed_windows`.
Meanwhile the command line chats, lists and searches conversations, scans the library and downloads the same files. Then
the windows are closed, and all questions, painted answers and files are checked. Goals: none is missing, stored twice
or damaged, and no command fails. Otherwise the exit code is 1. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.killed_windows import FILES
from engine.chat.store import ChatStore
from tests.support.command_line import program
from tests.support.hub_server import HubServer, hub_server
from tests.support.models import write_tiny_llama
from tests.support.patience import DEADLINE_S


class OpenWindow:
    """A window in a process of its own, with the reports that it has printed."""

    def __init__(self, seed: int, model: Path, url: str, environment: dict[str, str], errors: Path) -> None:
        words = [sys.executable, "-m", "benchmarks._killed_window", str(seed), str(model), url]
        with errors.open("ab") as log:
            self._process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=log)
        self.lines: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(json.loads(line))

    def close(self) -> int:
        """Close the window with SIGTERM, as the end of a desktop session does; return its exit code."""
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._reader.join()
        return code


class CommandLine:
    """Runs random commands one after another.

    `asked`: questions that were answered.
    `failed`: a sentence for each failed command.
    """

    def __init__(self, seed: int, model: Path, url: str, environment: dict[str, str]) -> None:
        self._chance = random.Random(f"commands {seed}")
        self._model, self._url, self._environment = model, url, environment
        self.asked: list[str] = []
        self.counts: Counter[str] = Counter()
        self.failed: list[str] = []

    def step(self) -> None:
        """Run one random command."""
        folder = Path(self._environment["HOME"], "models")
        number = sum(self.counts.values())
        question = f"command question {number}"
        name = self._chance.choice(sorted(FILES))
        words: tuple[str, ...] = self._chance.choice(
            (
                ("chat", str(self._model), "--prompt", question, "--max-tokens", "8", "--ctx", "512"),
                ("chat", "--list"),
                ("chat", "--search", "question"),
                ("library", "--json", "--folder", str(folder)),
                ("download", f"{self._url}/plain/{name}", "--to", str(folder), "--reserve", "1MiB"),
            )
        )
        done = subprocess.run(
            [*program(), *words], env=self._environment, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        self.counts[" ".join(words[:2]) if words[1].startswith("--") else words[0]] += 1
        if done.returncode:
            self.failed.append(f"{' '.join(words)}: {done.returncode}, {done.stderr.decode()[-300:]}")
        elif "--prompt" in words:
            self.asked.append(question)


def use_together(home: Path, model: Path, server: HubServer, seconds: float, seed: int) -> dict[str, Any]:
    """Run the windows and the command line for `seconds`; return counts of what was done, and the findings."""
    environment = {**os.environ, "HOME": str(home), "QT_QPA_PLATFORM": "offscreen", "TMPDIR": str(home / "tmp")}
    for variable in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        environment[variable] = str(home / variable.lower())
    for name in ("tmp", "models"):
        (home / name).mkdir(parents=True)
    windows = [
        OpenWindow(seed * 1000 + number, model, server.url, environment, home / f"stderr-{number}.txt")
        for number in range(2)
    ]
    commands = CommandLine(seed, model, server.url, environment)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        commands.step()
    codes = [window.close() for window in windows]
    found = [*commands.failed, *(f"a window ended with {code}" for code in codes if code)]
    lines = [line for window in windows for line in window.lines]
    kinds = Counter(line["kind"] for line in lines)
    told = sorted({line["text"] for line in lines if line["kind"] == "notice" and line["bad"]})
    found += [*_lost(home, lines, commands.asked), *_wrong_files(home)]
    return {"kinds": dict(kinds), "commands": dict(commands.counts), "bad_notices": told, "found": found}


def _lost(home: Path, lines: list[dict[str, Any]], asked: list[str]) -> list[str]:
    """Return a sentence for each question or painted message that is not stored, and for each that is stored twice."""
    path = home / "xdg_data_home" / "layerdeck" / "chats.sqlite3"
    with closing(ChatStore(path, makes_copies=False)) as store:
        found = [store.notice] if store.notice else []
        chats = store.conversations()
        stored = {message.id: message for chat in chats for message in store.tree(chat.id).messages.values()}
    for line in lines:
        if line["kind"] != "painted" or not line["text"] or line["role"] == "error":
            continue
        kept = stored.get(line["id"])
        if kept is None:
            found.append(f"{line['role']} {line['id']} is gone: {line['text'][:60]!r}")
        elif line["text"] not in kept.content:
            found.append(f"{line['role']} {line['id']}: painted {line['text'][-60:]!r}, kept {kept.content[-60:]!r}")
    questions = Counter(message.content for message in stored.values() if message.role == "user")
    found += [f"{text!r} is there {count} times" for text, count in questions.items() if count > 1 and text != "hello"]
    found += [f"{text!r} of the command line is gone" for text in asked if not questions[text]]
    titles = Counter(chat.title for chat in chats if chat.title.startswith("imported"))
    found += [f"{title!r} is there {count} times" for title, count in titles.items() if count > 1]
    return found


def _wrong_files(home: Path) -> list[str]:
    """Return a sentence for each file in the folder of downloads that is damaged or does not belong there."""
    found = []
    for path in (home / "models").iterdir():
        if path.suffix == ".gguf" and path.read_bytes() != FILES[path.name]:
            found.append(f"{path.name} is damaged")
        elif path.name not in FILES and ".part" not in path.name:
            found.append(f"{path.name} was left")
    return found


def main() -> int:
    """Read the command line and begin."""
    parser = argparse.ArgumentParser(prog="two_windows", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="layerdeck-two-") as folder, hub_server() as server:
        server.plain.update(FILES)
        model = write_tiny_llama(Path(folder, "tiny.gguf"), n_layers=2, n_ctx_train=1 << 16)
        result = use_together(Path(folder, "home"), model, server, given.minutes * 60, given.seed)
    print(json.dumps(result, indent=1))
    return 1 if result["found"] else 0


if __name__ == "__main__":
    sys.exit(main())
