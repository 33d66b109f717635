"""Windows killed at random moments: no painted message is lost, nothing is stored twice, and no child process survives.

    python -m benchmarks.killed_windows OUT.jsonl [--rounds 500] [--seed 1]

Each round starts the real window (offscreen). The window streams answers, edits, imports, downloads and changes
settings, until it is killed with SIGKILL at a random moment. Then the database is opened as the next window would open
it. OUT.jsonl gets a line with the findings of each round; a second call with the same file continues after its last
line. Goal: no findings and no process left one second after the kill. Otherwise the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil

from engine.chat.store import ChatStore
from tests.support.hub_server import HubServer, hub_server
from tests.support.models import write_tiny_llama
from tests.support.patience import DEADLINE_S
from tests.support.transfers import KIB, some_bytes

ROUNDS_OF_A_HOME = 25
"""Rounds that share a home folder. Later windows open what killed ones left; a new home keeps the lists short."""
LONGEST_S = 6.0
ORPHAN_S = 1.0
SHARE_WITH_WORDS = 0.8
FILES = {f"m{number}.gguf": some_bytes(3000 * KIB, seed=number) for number in range(7)}


def play_round(home: Path, model: Path, server: HubServer, seed: int) -> dict[str, Any]:
    """Run one window and kill it; return the findings."""
    chance = random.Random(f"kill {seed}")
    environment = {**os.environ, "HOME": str(home), "QT_QPA_PLATFORM": "offscreen", "TMPDIR": str(home / "tmp")}
    for variable in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        environment[variable] = str(home / variable.lower())
    (home / "tmp").mkdir(parents=True, exist_ok=True)
    (home / "models").mkdir(exist_ok=True)
    words = [sys.executable, "-m", "benchmarks._killed_window", str(seed), str(model), server.url]
    lines: list[dict[str, Any]] = []
    with (home / "stderr.txt").open("ab") as errors:
        process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=errors)
    assert process.stdout is not None
    giving_up = threading.Timer(DEADLINE_S, process.kill)
    giving_up.start()
    started_s = time.monotonic()
    lines.append(json.loads(process.stdout.readline() or b'{"kind": "did not open"}'))
    opened_s = round(time.monotonic() - started_s, 2)
    painted = threading.Event()

    def read() -> None:
        for line in _whole(process):
            lines.append(json.loads(line))
            if lines[-1]["kind"] == "painted":
                painted.set()

    reader = threading.Thread(target=read)
    reader.start()
    # Most windows show words first; the others are killed while they start, read and load.
    if chance.random() < SHARE_WITH_WORDS:
        painted.wait(DEADLINE_S / 2)
    time.sleep(chance.uniform(0.0, LONGEST_S))
    children = {each: _role(each) for each in psutil.Process(process.pid).children(recursive=True)}
    process.send_signal(signal.SIGKILL)
    status = process.wait()
    begun_s = time.monotonic()
    orphans = [role for each, role in children.items() if not _ends_by(each, begun_s + ORPHAN_S)]
    ended = all(_ends_by(each, begun_s + DEADLINE_S) for each in children)
    ended_s = round(time.monotonic() - begun_s, 2) if ended else None
    reader.join()
    giving_up.cancel()
    found = [*_lost(home, lines, status), *_wrong_files(home)]
    return {
        "seed": seed,
        "kinds": dict(Counter(line["kind"] for line in lines)),
        "orphans": orphans,
        "ended_s": ended_s,
        "opened_s": opened_s,
        "found": found,
        "bad_notices": sorted({line["text"] for line in lines if line["kind"] == "notice" and line["bad"]}),
    }


def _role(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()[-2:])
    except psutil.Error:
        return "ended"  # In the moment before it was asked.


def _ends_by(process: psutil.Process, limit_s: float) -> bool:
    """Return whether a process has ended by `limit_s` (`time.monotonic()`). A zombie counts as ended."""
    while True:
        try:
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        if time.monotonic() > limit_s:
            return False
        time.sleep(0.01)


def _whole(process: subprocess.Popen[bytes]) -> Iterator[bytes]:
    assert process.stdout is not None
    return (line for line in process.stdout if line.endswith(b"\n"))


def _lost(home: Path, lines: list[dict[str, Any]], status: int) -> list[str]:
    """Return a sentence for each painted message that is not stored, and for each question or import stored twice.

    `lines`: what the window reported. `status`: its exit status, for the message if it did not open.
    """
    path = home / "xdg_data_home" / "layerdeck" / "chats.sqlite3"
    if lines[0]["kind"] != "opened":
        errors = (home / "stderr.txt").read_text(encoding="utf-8", errors="replace")
        return [f"the window did not open; exit status {status}: {errors[-4000:]}"]
    painted = {line["id"]: line for line in lines if line["kind"] == "painted" and line["text"]}
    found = []
    with closing(ChatStore(path, makes_copies=False)) as store:
        if store.notice:
            found.append(store.notice)
        chats = store.conversations()
        trees = {chat.id: store.tree(chat.id) for chat in chats}
    stored = {message.id: message for tree in trees.values() for message in tree.messages.values()}
    for id, line in painted.items():
        kept = stored.get(id)
        if kept is None:
            found.append(f"{line['role']} {id} is gone: {line['text'][:60]!r}")
        elif line["text"] not in kept.content and line["role"] != "error":
            found.append(f"{line['role']} {id}: painted {line['text'][-60:]!r}, kept {kept.content[-60:]!r}")
    asked = Counter(message.content for message in stored.values() if message.role == "user")
    found += [f"{text!r} is there {count} times" for text, count in asked.items() if count > 1 and text != "hello"]
    titles = Counter(chat.title for chat in chats if chat.title.startswith("imported"))
    found += [f"{title!r} is there {count} times" for title, count in titles.items() if count > 1]
    return found


def _wrong_files(home: Path) -> list[str]:
    """Return a sentence for each downloaded file with a wrong content."""
    return [
        f"{path.name} is damaged" for path in (home / "models").glob("*.gguf") if path.read_bytes() != FILES[path.name]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    done = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    scratch = Path(tempfile.mkdtemp(prefix="layerdeck-killed-"))
    model = write_tiny_llama(scratch / "tiny.gguf", n_layers=2, n_ctx_train=1 << 16)
    with hub_server() as server, options.out.open("a") as out:
        server.plain.update(FILES)
        for number in range(len(done), options.rounds):
            home = scratch / f"home-{number // ROUNDS_OF_A_HOME}"
            if number % ROUNDS_OF_A_HOME == 0:
                shutil.rmtree(scratch / f"home-{number // ROUNDS_OF_A_HOME - 1}", ignore_errors=True)
            line = play_round(home, model, server, options.seed * 1_000_000 + number)
            done.append(line)
            out.write(json.dumps(line) + "\n")
            out.flush()
    bad = [line for line in done if line["found"] or line["orphans"]]
    print(json.dumps({"rounds": len(done), "bad": len(bad), "orphans": sum(bool(line["orphans"]) for line in done)}))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
