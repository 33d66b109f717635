"""Children that are stopped, taken over, or leave processes: no wait is endless, and output is bounded."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from engine.base.cancellation import CancelToken
from engine.library import children
from engine.library.facts import Facts
from engine.runtime.process.system import output_of
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


def ask(script: str, *, timeout_s: float = DEADLINE_S, max_bytes: int = 1000) -> bytes:
    return output_of([sys.executable, "-S", "-c", script], timeout_s=timeout_s, max_bytes=max_bytes)


def test_an_answer_comes_whole() -> None:
    assert ask("print('x' * 300_000, end='')", max_bytes=300_000) == b"x" * 300_000
    assert ask("") == b""


def test_who_says_too_much_is_not_listened_to() -> None:
    with pytest.raises(OSError, match="too large"):
        ask(ENDLESS)


def test_who_is_stopped_is_gone_in_time() -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(TimeoutError):
        ask(STOPPED, timeout_s=1.0)
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_who_is_left_behind_goes_with_the_group_once_the_time_is_up(tmp_path: Path) -> None:
    path = tmp_path / "left"
    for timeout_s in (2.0, 10.0, DEADLINE_S):  # more, if the machine was too busy to start it
        with pytest.raises(TimeoutError):
            ask(HOLDING.format(path=str(path)), timeout_s=timeout_s)
        if path.exists():
            break
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


def test_a_system_without_threads_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def start_none(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_none)
        with pytest.raises(OSError, match="can't start new thread"):
            ask(ENDLESS)
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def look_into(path: Path, script: str) -> Facts:
    found: list[Facts] = []
    argv = [sys.executable, "-S", "-c", script]
    children.read_headers([(path,)], lambda _, facts: found.append(facts), CancelToken(), argv=argv)
    (facts,) = found
    return facts


def test_a_stopped_child_of_the_library_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "SILENT_S", 0.5)
    assert "crashed" in look_into(put(tmp_path / "a.gguf", model_bytes()), STOPPED).error


def test_a_child_of_the_library_that_complains_at_length_ends(tmp_path: Path) -> None:
    assert "crashed" in look_into(put(tmp_path / "a.gguf", model_bytes()), NOISY).error
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("library-")]
