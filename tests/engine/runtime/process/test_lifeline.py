"""Children end with their parent, whatever both are doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.runtime.process.system import close_pipe, signal_process, spawn, wait_for_exit
from tests.support.patience import DEADLINE_S

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux signals the end of a pipe")

_PARENT = """
import sys, time
from engine.runtime.process.system import spawn
child = spawn([sys.executable, "-S", "-c", sys.argv[1]], {})
for name in child.stdout.readline().split():
    print(name.decode(), flush=True)
print("all", flush=True)
time.sleep(1000)
"""
_DEAF_CHILD = """
import os, signal, time
for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGIO):
    signal.signal(each, signal.SIG_IGN)
grandchild = os.fork()
if grandchild:
    print(os.getpid(), grandchild, flush=True)
while True:
    time.sleep(1)
"""


def test_children_that_read_nothing_end_with_a_killed_parent() -> None:
    """They read neither their input nor signals, and one is the child of a child."""
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, _DEAF_CHILD], stdout=subprocess.PIPE, cwd=Path(__file__).parents[4]
    )
    with parent:
        assert parent.stdout is not None
        lines = [line.strip().decode() for line in iter(parent.stdout.readline, b"all\n")]
        family = [int(line) for line in lines]
        assert len(family) == 2
        parent.send_signal(signal.SIGKILL)
        parent.wait(DEADLINE_S)
        limit_s = time.monotonic() + DEADLINE_S
        while any(map(_runs, family)) and time.monotonic() < limit_s:
            os.sched_yield()
    left = [pid for pid in family if _runs(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def _runs(pid: int) -> bool:
    """Return whether a process runs. One that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_other_children_do_not_notice_the_end_of_one() -> None:
    children = [spawn([sys.executable, "-S", "-c", "input()"], {}) for _ in range(3)]
    signal_process(children[0], kill=True)
    assert wait_for_exit(children[0], DEADLINE_S) == -signal.SIGKILL
    for child in children[1:]:
        assert child.stdin is not None
        child.stdin.write(b"\n")
        child.stdin.flush()
        assert wait_for_exit(child, DEADLINE_S) == 0
    for child in children:
        for pipe in (child.stdin, child.stdout, child.stderr):
            assert pipe is not None
            close_pipe(pipe)
