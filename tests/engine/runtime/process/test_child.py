"""Supervision of one child process, without a session."""

from __future__ import annotations

import subprocess
import threading
import time
from types import SimpleNamespace

import psutil
import pytest

from engine.runtime.process import child as child_module
from engine.runtime.process.child import ChildProcess
from engine.runtime.process.outcome import EndReason, ProcessOutcome
from engine.runtime.process.system import wait_for_exit
from engine.runtime.protocol.messages import AnyMessage, Hello, Piece
from engine.runtime.protocol.requests import Generate
from tests.support.fake_worker import fake_worker_argv
from tests.support.patience import DEADLINE_S

STALL_S = 3.0
"""Long enough for a child to start on a busy machine: until it says hello it is watched too."""


def test_time_that_we_take_is_no_silence_of_the_child() -> None:
    """A receiver held up for longer than the stall limit holds up the child's pipe: that is our doing."""
    ended: list[ProcessOutcome] = []
    held, go_on, heard = threading.Event(), threading.Event(), threading.Event()

    def receive(message: AnyMessage) -> None:
        if isinstance(message, Hello):
            held.set()
            go_on.wait(DEADLINE_S)
        if isinstance(message, Piece):
            child.watch(False)
            heard.set()

    child = ChildProcess(receive, ended.append, argv=fake_worker_argv("normal"), stall_limit_s=STALL_S)
    child.start()
    assert held.wait(DEADLINE_S)
    assert child.wait(1.3 * STALL_S) is None
    go_on.set()
    child.send(Generate(prompt="x"))
    assert heard.wait(DEADLINE_S)
    child.stop()
    assert child.wait(DEADLINE_S) is not None
    assert [outcome.reason for outcome in ended] == [EndReason.STOPPED]


@pytest.mark.parametrize("is_unwatched", [True, False])
def test_time_in_which_this_process_was_stopped_is_no_silence_of_the_child(
    monkeypatch: pytest.MonkeyPatch, is_unwatched: bool
) -> None:
    """After a stop or a suspended machine, what the child said in the meantime is still in its pipe."""
    ahead_s = [0.0]
    monkeypatch.setattr(child_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s[0]))
    ended: list[ProcessOutcome] = []
    greeted, heard, unwatched = threading.Event(), threading.Event(), threading.Event()

    def receive(message: AnyMessage) -> None:
        (greeted if isinstance(message, Hello) else heard).set()

    child = ChildProcess(receive, ended.append, argv=fake_worker_argv("normal"))
    child.start()
    assert greeted.wait(DEADLINE_S)
    if is_unwatched:
        # The process stops after the limit was turned on, and before the supervisor has looked at the time.
        wait = child._condition.wait

        def note(timeout: float | None = None) -> bool:
            if timeout is None and not child._watched:
                unwatched.set()
            return wait(timeout)

        monkeypatch.setattr(child._condition, "wait", note)
        child.watch(False)
        assert unwatched.wait(DEADLINE_S)
    with child._condition:
        child.watch(True)
        ahead_s[0] = 3600.0
    child.send(Generate(prompt="x"))
    assert heard.wait(DEADLINE_S)
    child.stop()
    assert child.wait(DEADLINE_S) is not None
    assert [outcome.reason for outcome in ended] == [EndReason.STOPPED]


def test_the_end_of_a_large_child_is_told_when_its_process_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes up to minutes to free hundreds of GB, and the process exists until then."""

    def wait_longer(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
        return None if timeout_s < 170 else wait_for_exit(process, timeout_s)

    monkeypatch.setattr(child_module, "wait_for_exit", wait_longer)
    ended: list[ProcessOutcome] = []
    greeted = threading.Event()
    child = ChildProcess(lambda message: greeted.set(), ended.append, argv=fake_worker_argv("normal"))
    child.start()
    assert greeted.wait(DEADLINE_S)
    child.stop()
    assert child.wait(DEADLINE_S) is not None
    assert [outcome.reason for outcome in ended] == [EndReason.STOPPED]
    assert not ended[0].still_exists


@pytest.mark.parametrize("started", range(4))
def test_a_system_without_threads_ends_the_child(started: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[ProcessOutcome] = []
    child = ChildProcess(lambda message: None, ended.append, argv=fake_worker_argv("normal"))
    start, left = threading.Thread.start, [started]

    def limited_start(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", limited_start)
        child.start()
    (outcome,) = ended
    assert outcome.reason is EndReason.NOT_STARTED
    assert "thread" in outcome.sentence
    assert child.wait(0) is outcome
    assert psutil.Process().children() == []
