"""The leak check: left-over processes and threads are found and named, and nothing else is."""

from __future__ import annotations

import subprocess
import sys
import threading

from tests.support.leftovers import Watch

WAIT_FOR_INPUT = [sys.executable, "-c", "input()"]


def test_nothing_is_found_where_all_ended() -> None:
    watch = Watch()
    thread = threading.Thread(target=int)
    thread.start()
    subprocess.run([sys.executable, "-c", ""], check=True)
    thread.join()
    assert watch.leftovers() == []


def test_running_process_is_named_and_killed() -> None:
    watch = Watch()
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # Its command line can be read when it runs.
        (line,) = watch.leftovers(grace_s=0)
        assert str(process.pid) in line
        assert "input()" in line
        assert Watch().leftovers(grace_s=0) == []


def test_process_from_before_is_not_ours() -> None:
    with subprocess.Popen(WAIT_FOR_INPUT, stdin=subprocess.PIPE) as process:
        assert Watch().leftovers(grace_s=0) == []
        process.communicate(b"\n")


def test_running_thread_is_named_with_its_origin() -> None:
    watch = Watch()
    released = threading.Event()
    thread = threading.Thread(target=released.wait, name="left over")
    thread.start()
    lines = watch.leftovers(grace_s=0)
    released.set()
    thread.join()
    assert len(lines) == 1
    assert "left over" in lines[0]
    assert "test_leftovers.py:" in lines[0]
