"""Waits of the command line are on events and do not poll."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from app.cli import follow
from app.cli.follow import IDLE_POLL_S, Ended, Follower
from app.cli.talk import LineReader
from engine.runtime.protocol.requests import Generate, SaveSequence
from engine.runtime.session.events import Cancelled, Failed, Loaded, RequestEvent, Saving, Token
from engine.runtime.session.session import ModelSession
from engine.runtime.session.status import Phase
from tests.support.fake_worker import fake_worker_argv
from tests.support.load_specs import make_spec
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


def test_a_long_save_is_told_and_an_interrupt_then_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "LONG_S", 0.0)
    follower, said = Follower(), list[str]()

    class Stream:
        is_stopped = False

        def next(self, _timeout_s: float) -> RequestEvent:
            if self.is_stopped:
                return Cancelled(stage="warm_up", request=0)
            if said:
                follower._interrupt()
            return Saving(request=0, saved_bytes=0, size_bytes=1)

        def stop(self) -> None:
            self.is_stopped = True

    monkeypatch.setattr(follower, "ask", lambda _request: Stream())
    answer = follower.answer_of(SaveSequence(path="s", of=0), stops=False, on_long=lambda: said.append("long"))
    assert isinstance(answer, Cancelled)
    assert said == ["long"]


def test_a_third_interrupt_does_not_wait_until_the_memory_of_a_killed_process_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    follower = Follower()
    closed: list[int] = []

    class Stream:
        def next(self, _timeout_s: float) -> RequestEvent:
            follower._interrupt()
            return Saving(request=0, saved_bytes=0, size_bytes=1)

    monkeypatch.setattr(follower.session, "close", lambda: closed.append(follower._interrupts))
    stream: Any = Stream()
    with pytest.raises(Ended):
        list(follower.events(stream, stop=lambda: None))
    assert closed == [2]
    assert follower._interrupts == 3


@pytest.mark.skipif(os.name == "nt", reason="a wait without limit would hold up signal handlers there")
def test_no_timer_runs_while_a_person_thinks() -> None:
    assert IDLE_POLL_S is None


def test_a_second_interrupt_does_not_wait_for_an_engine_that_is_busy() -> None:
    follower = Follower()
    argv = fake_worker_argv("stubborn_generate")
    follower.session = ModelSession(follower._receive, argv=argv, stop_timeout_s=0.8)
    with follower.loading(make_spec()):
        assert isinstance(follower.load(None), Loaded)
        stream = follower.ask(Generate(prompt="x"))
        stops: list[Phase] = []

        def stop() -> None:
            stream.stop()
            stops.append(follower.session.snapshot.phase)
            os.kill(os.getpid(), signal.SIGINT)

        events = follower.events(stream, stop=stop)
        assert isinstance(next(events), Token)
        os.kill(os.getpid(), signal.SIGINT)
        *_, ending = events
        assert stops == [Phase.STOPPING]
        assert isinstance(ending, Failed)
        assert "did not stop" in ending.message
        follower.mark_interrupt_handled()
        assert follower.interrupted
        with pytest.raises(Ended) as ended:
            follower.ask(Generate(prompt="x"))
        assert isinstance(ended.value.ending, Cancelled)
