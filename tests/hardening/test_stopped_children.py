"""Children that are stopped, are taken over or leave others behind: nobody waits for ever, or keeps all words."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import psutil
import pytest

from engine.cancellation import CancelToken
from engine.library import children
from engine.library.facts import Facts
from engine.programs import ask_once
from tests.support.patience import DEADLINE_S
from tests.support.stores import model_bytes, put

ENDLESS = "import sys\nwhile True: sys.stdout.buffer.write(bytes(1 << 16))"
STOPPED = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
HOLDING = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
NOISY = "import sys; sys.stderr.write('x' * (1 << 20)); sys.stderr.flush(); import os; os._exit(3)"


def ask(script: str, data: bytes = b"", *, timeout_s: float = DEADLINE_S, max_bytes: int = 1000) -> bytes:
    return ask_once([sys.executable, "-S", "-c", script], data, timeout_s=timeout_s, max_bytes=max_bytes)


def test_an_answer_comes_whole() -> None:
    data = os.urandom(300_000)
    assert ask("import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())", data, max_bytes=len(data)) == data
    assert ask("") == b""


def test_who_says_too_much_is_not_listened_to() -> None:
    with pytest.raises(OSError, match="too large"):
        ask(ENDLESS)


@pytest.mark.parametrize("script", [STOPPED, HOLDING], ids=["stopped", "holding"])
def test_who_is_stopped_or_leaves_another_behind_is_gone_in_time(script: str) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(TimeoutError):
        ask(script, bytes(1 << 20), timeout_s=1.0)
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


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
