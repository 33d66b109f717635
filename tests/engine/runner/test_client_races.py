"""Calls from several threads at once: nothing begun is left without its one ending, whoever wins.

All of it for a runner, for one with the load loop around it, and for one whose loads may step back.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from engine.errors import ArgumentError
from engine.runner.client import LoadOrder, RunnerState
from engine.runner.events import Done, Loaded
from engine.runner.load_order import RetryPolicy
from engine.runner.protocol import Generate
from tests.support.fake_worker import fake_worker_argv
from tests.support.orders import make_order
from tests.support.patience import DEADLINE_S
from tests.support.runner_log import LoopLog, RunnerLog

N_LOADS = 8

AnyLog = RunnerLog | LoopLog
Kind = tuple[type[RunnerLog] | type[LoopLog], Callable[[], LoadOrder]]


def stepping_back() -> LoadOrder:
    return replace(make_order(), retry=RetryPolicy(3))


@pytest.fixture(params=["runner", "loop", "retries"])
def kind(request: pytest.FixtureRequest) -> Kind:
    """The type of log, and of the jobs that are loaded."""
    kinds: dict[str, Kind] = {
        "runner": (RunnerLog, make_order), "loop": (LoopLog, make_order), "retries": (LoopLog, stepping_back)
    }  # fmt: skip
    return kinds[request.param]


class Users:
    """One thread loads, one generates as soon as it can, one interferes; all react to what the runner tells."""

    def __init__(self, log: AnyLog, make_order: Callable[[], LoadOrder], seed: int) -> None:
        self.log = log
        self.make_order = make_order
        self.random = random.Random(seed)
        self.generations = 0
        self.loads_done = False

    def load(self) -> None:
        for _ in range(N_LOADS):
            seen = len(self.log.endings)
            self.log.runner.load(self.make_order())
            if self.random.random() < 0.8:
                self.log.wait_until(partial(self._told_more, endings=seen))
        self.loads_done = True
        self.log.runner.stop()  # a change of state or an event wakes the others

    def generate(self) -> None:
        while not self.loads_done:
            self.log.wait_until(lambda: self.loads_done or self.log.runner.is_ready, quietly=True)
            try:
                self.log.runner.generate(Generate(prompt="x"))
                self.generations += 1
            except ArgumentError:
                continue  # The model was there a moment ago.
            seen = len(self.log.events)
            self.log.wait_until(partial(self._told_more, events=seen), quietly=True)

    def interfere(self) -> None:
        while not self.loads_done:
            wanted = len(self.log.events) + self.random.randrange(15, 60)
            self.log.wait_until(partial(self._told_more, events=wanted), quietly=True)
            self.random.choice((self.log.runner.stop, self.log.runner.unload, self.log.runner.query_device_memory))()

    def _told_more(self, *, events: int = -1, endings: int = -1) -> bool:
        return self.loads_done or (len(self.log.events) > events and len(self.log.endings) > endings)


@pytest.mark.parametrize("mode", ["normal", "endless", "killed_generate", "failing_generate"])
def test_every_beginning_has_one_ending(kind: Kind, mode: str) -> None:
    log_type, make = kind
    with log_type(fake_worker_argv(mode), stop_timeout_s=1.0) as log:
        users = Users(log, make, seed=7)
        threads = [threading.Thread(target=each) for each in (users.load, users.generate, users.interfere)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(log.endings) == N_LOADS + users.generations
    assert log.runner.state in (RunnerState.STOPPED, RunnerState.FAILED)


@pytest.mark.parametrize("calls", range(6))
def test_close_right_after_other_calls(kind: Kind, calls: int) -> None:
    log_type, make = kind
    log = log_type(fake_worker_argv("slow"))
    for _ in range(calls):
        log.runner.load(make())
    log.runner.close()
    assert len(log.endings) == calls


@pytest.mark.parametrize("turn", range(8))
def test_a_load_that_meets_a_generation(kind: Kind, turn: int) -> None:
    """Both are called at the same moment: the generation is accepted with an ending, or refused without one."""
    log_type, make = kind
    with log_type(fake_worker_argv("normal")) as log:
        log.runner.load(make())
        log.wait_for_endings(1)
        together = threading.Barrier(2)

        def load() -> None:
            together.wait()
            log.runner.load(make())

        loader = threading.Thread(target=load)
        loader.start()
        together.wait()
        expected = 2
        try:
            log.runner.generate(Generate(prompt="x"))
            expected = 3
        except ArgumentError:
            pass
        loader.join()
        endings = log.wait_for_endings(expected)
    assert len(log.endings) == expected
    assert isinstance(endings[-1], Loaded | Done)


def test_close_from_several_threads_and_from_an_event(kind: Kind) -> None:
    log_type, make = kind
    log = log_type(fake_worker_argv("normal"))
    closed_inside = threading.Event()

    def close_inside(_: object) -> None:
        log.runner.close()
        closed_inside.set()

    log.on_event = close_inside
    log.runner.load(make())
    assert closed_inside.wait(DEADLINE_S)
    closers = [threading.Thread(target=log.runner.close) for _ in range(3)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join()
    assert len(log.endings) == 1
