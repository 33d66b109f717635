"""The spare child: used once, replaced after a crash, ended on close."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from engine.base.cancellation import CancelToken
from engine.base.errors import EngineError, WorkerCrashedError
from engine.runtime.process.blocking_child import BlockingChild, SpareChild
from engine.runtime.protocol.messages import DeviceList
from engine.runtime.protocol.requests import ListDevices
from tests.support.fake_worker import fake_worker_argv
from tests.support.patience import DEADLINE_S


@pytest.fixture
def spare() -> Iterator[SpareChild]:
    waiting = SpareChild(timeout_s=DEADLINE_S)
    yield waiting
    waiting.close()


def pid_of(child: BlockingChild) -> int:
    assert child.pid is not None
    return child.pid


def test_a_child_in_waiting_answers_and_is_used_once(spare: SpareChild) -> None:
    spare.prepare()
    first = spare.take()
    pid = pid_of(first)
    with first:
        assert first.ask(ListDevices(), DeviceList).devices
    assert not psutil.pid_exists(pid)
    second = spare.take()
    assert second is not first
    with second:
        assert second.ask(ListDevices(), DeviceList).devices


def test_preparing_twice_starts_one_child(spare: SpareChild) -> None:
    spare.prepare()
    spare.prepare()
    child = spare.take()
    assert child.pid is not None
    child.end()
    unprepared = spare.take()
    assert unprepared.pid is None


def test_a_child_that_died_in_waiting_is_replaced(spare: SpareChild) -> None:
    spare.prepare()
    child = spare.take()
    os.kill(pid_of(child), signal.SIGKILL)
    assert child.wait_for_end(DEADLINE_S)
    with child, pytest.raises(WorkerCrashedError):
        child.ask(ListDevices(), DeviceList)
    spare.prepare()
    with spare.take() as other:
        assert other.ask(ListDevices(), DeviceList).devices


def test_closing_ends_the_child_and_prepares_no_more(spare: SpareChild) -> None:
    spare.prepare()
    spare.close()
    spare.prepare()
    assert spare.take().pid is None


def test_a_child_whose_question_was_cancelled_is_killed_and_not_asked_to_end() -> None:
    cancel = CancelToken()
    child = BlockingChild(argv=fake_worker_argv("silent"), timeout_s=DEADLINE_S, cancel=cancel)
    cancel.cancel()
    with child, pytest.raises(EngineError, match="cancelled"):
        child.ask(ListDevices(), DeviceList)
    assert child.outcome is not None
    assert child.outcome.signal == signal.SIGKILL
