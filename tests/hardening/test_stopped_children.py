"""Children that are stopped, are taken over or leave others behind: nobody waits for ever, or keeps all words."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.cancellation import CancelToken
from engine.library import children
from engine.library.facts import Facts
from engine.programs import ask_once, never
from tests.support.patience import DEADLINE_S
from tests.support.stores import model_bytes, put

ENDLESS = "import sys\nwhile True: sys.stdout.buffer.write(bytes(1 << 16))"
STOPPED = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
HOLDING = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
with open({path!r} + ".part", "w") as file:
    file.write(str(child.pid))
os.rename(file.name, {path!r})
"""
"""Its child holds the pipe. It tells which that is, and ends."""
NOISY = "import sys; sys.stderr.write('x' * (1 << 20)); sys.stderr.flush(); import os; os._exit(3)"


def ask(
    script: str,
    data: bytes = b"",
    *,
    timeout_s: float = DEADLINE_S,
    max_bytes: int = 1000,
    own_group: bool = True,
    cancelled: Callable[[], bool] = never,
) -> bytes:
    return ask_once(
        [sys.executable, "-S", "-c", script],
        data,
        timeout_s=timeout_s,
        max_bytes=max_bytes,
        own_group=own_group,
        cancelled=cancelled,
    )


def test_an_answer_comes_whole() -> None:
    data = os.urandom(300_000)
    assert ask("import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())", data, max_bytes=len(data)) == data
    assert ask("") == b""


def test_who_says_too_much_is_not_listened_to() -> None:
    with pytest.raises(OSError, match="too large"):
        ask(ENDLESS)


def test_who_is_stopped_is_gone_in_time() -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(TimeoutError):
        ask(STOPPED, bytes(1 << 20), timeout_s=1.0)
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_who_is_left_behind_goes_with_the_group_once_nobody_waits(tmp_path: Path) -> None:
    path = tmp_path / "left"
    with pytest.raises(OSError, match=os.strerror(errno.ECANCELED)):
        ask(HOLDING.format(path=str(path)), bytes(1 << 20), cancelled=path.exists)
    deadline_s = time.monotonic() + DEADLINE_S
    while runs(int(path.read_text())) and time.monotonic() < deadline_s:
        threading.Event().wait(0.01)
    assert not runs(int(path.read_text()))


def runs(pid: int) -> bool:
    """Say whether a process runs; one that has ended may wait to be collected."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_a_child_is_of_our_group_where_it_is_to_go_with_us() -> None:
    script = "import os; print(os.getpgrp())"
    assert int(ask(script, own_group=False)) == os.getpgrp()
    assert int(ask(script)) != os.getpgrp()


@pytest.mark.parametrize("started", [0, 1])
def test_where_no_thread_is_to_be_had_nothing_stays_open(started: int, monkeypatch: pytest.MonkeyPatch) -> None:
    processes: list[subprocess.Popen[bytes]] = []
    left = [None] * started
    start, popen = threading.Thread.start, subprocess.Popen

    def start_few(thread: threading.Thread) -> None:
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        start(thread)

    def noted(*words: Any, **settings: Any) -> subprocess.Popen[bytes]:
        processes.append(popen(*words, **settings))
        return processes[-1]

    monkeypatch.setattr(subprocess, "Popen", noted)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_few)
        with pytest.raises(OSError, match="can't start new thread"):
            ask(ENDLESS)
    (process,) = processes
    assert process.returncode is not None
    assert process.stdin is not None
    assert process.stdout is not None
    assert (process.stdin.closed, process.stdout.closed) == (True, True)


def look_into(path: Path, script: str) -> Facts:
    found: list[Facts] = []
    argv = [sys.executable, "-S", "-c", script]
    children.read_headers([(path,)], lambda _, facts: found.append(facts), CancelToken(), argv=argv)
    (facts,) = found
    return facts


def test_a_stopped_child_of_the_library_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "SILENT_S", 0.5)
    assert "broke" in look_into(put(tmp_path / "a.gguf", model_bytes()), STOPPED).error


def test_a_child_of_the_library_that_complains_at_length_ends(tmp_path: Path) -> None:
    assert "broke" in look_into(put(tmp_path / "a.gguf", model_bytes()), NOISY).error
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("library-")]
