"""Calls that meet the search for a lost RPC worker: the search ends, and nothing gets two endings or the wrong one."""

from __future__ import annotations

import errno
import itertools
import socket
import threading
from contextlib import AbstractContextManager, suppress

import pytest

from engine.errors import ArgumentError
from engine.protocol.messages import Generate
from engine.session.events import Crashed, Failed, Loaded
from engine.session.status import Phase
from tests.support.fake_worker import fake_worker_argv
from tests.support.orders import make_order, worker_device
from tests.support.patience import DEADLINE_S
from tests.support.rpc_peers import ANSWER, HELLO_BYTES, answer_questions, receive, serve_peer
from tests.support.session_log import SessionLog


def answers_once() -> AbstractContextManager[str]:
    """Answer one hello and keep silent after it, so that a search takes until its time limit."""
    turns = itertools.count()

    def talk(client: socket.socket) -> None:
        receive(client, HELLO_BYTES)
        if next(turns) == 0:
            client.sendall(ANSWER)
            answer_questions(client)
        with suppress(ConnectionResetError):
            client.recv(1)

    return serve_peer(talk)


def test_a_load_called_during_the_search_is_loaded() -> None:
    with SessionLog(fake_worker_argv("rpc_lost")) as log, answers_once() as attic:
        log.session.load(make_order([worker_device("attic", attic)]))
        log.wait_for_phase(Phase.STOPPING)
        log.session.load(make_order())
        lost, second = log.wait_for_endings(2)
    assert isinstance(lost, Failed)
    assert lost.kind == "unreachable"
    assert "attic" in lost.message
    assert isinstance(second, Crashed)  # this child goes down in every load; what counts is that it began
    assert len(log.endings) == 2


def test_a_generation_called_as_the_model_is_lost_ends_once() -> None:
    with SessionLog(fake_worker_argv("lost_after_query")) as log, answers_once() as attic:
        log.session.load(make_order([worker_device("attic", attic)]))
        log.wait_for_endings(1)
        log.session.query_device_memory()
        log.session.ask(Generate(prompt="x"))  # The child goes down before it reads this.
        log.wait_for_phase(Phase.STOPPING)
        log.session.stop()
        endings = log.wait_for_endings(2)
    assert isinstance(endings[0], Loaded)
    assert isinstance(endings[1], Failed)
    assert endings[1].request == 0
    assert "attic" in endings[1].message
    assert len(log.endings) == 2


def test_a_generation_called_after_the_model_was_lost_is_refused() -> None:
    """Whoever is late to hear of it is told at once: the session knows."""
    told, go_on = threading.Event(), threading.Event()

    def hold_up(_: object) -> None:
        told.set()
        go_on.wait(DEADLINE_S)

    with SessionLog(fake_worker_argv("lost_after_query")) as log, answers_once() as attic:
        log.on_device_memory = hold_up
        log.session.load(make_order([worker_device("attic", attic)]))
        log.wait_for_endings(1)
        log.session.query_device_memory()
        assert told.wait(DEADLINE_S)
        log.wait_until(lambda: not any("supervisor" in thread.name for thread in threading.enumerate()), quietly=True)
        with pytest.raises(ArgumentError, match="load one first"):
            log.session.ask(Generate(prompt="x"))
        go_on.set()
        log.session.stop()
        endings = log.wait_for_endings(2)
    assert isinstance(endings[1], Failed)
    assert "attic" in endings[1].message
    assert len(log.endings) == 2


def test_endpoints_that_cannot_be_asked_are_an_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptors(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socketpair", no_descriptors)
    with SessionLog(fake_worker_argv("normal")) as log:
        log.session.load(make_order([worker_device("attic", "127.0.0.1:9")]))
        (ending,) = log.wait_for_endings(1)
    assert isinstance(ending, Failed)
    assert ending.kind == "unreachable"
    assert "Too many open files" in ending.message
