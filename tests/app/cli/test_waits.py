"""Waits of the command line are on events and do not poll."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator

import pytest

from app.cli.follow import IDLE_POLL_S, Follower
from app.cli.talk import LineReader
from engine.runtime.session.events import Failed
from tests.support.patience import DEADLINE_S


@pytest.fixture
def ends() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    os.close(writing)


def test_a_chat_that_waits_for_a_line_wakes_for_events_only(ends: tuple[int, int]) -> None:
    reader = LineReader(ends[0])
    follower = Follower()
    follower.wake = reader.wake
    for happens in (lambda: follower._receive(Failed(kind="stalled", message="x")), follower._interrupt):
        timer = threading.Timer(0, happens)
        timer.start()
        with pytest.raises(queue.Empty):
            reader.next(None)
        timer.join(DEADLINE_S)
    os.write(ends[1], b"hello\n")
    assert reader.next(None) == "hello"


@pytest.mark.skipif(os.name == "nt", reason="a wait without limit would hold up signal handlers there")
def test_no_timer_runs_while_a_person_thinks() -> None:
    assert IDLE_POLL_S is None
