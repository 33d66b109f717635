"""Calls from several threads at once, and many loads: each gets one ending, and no process is left.

The races are run for loads of one layout, and for loads that may step back.
"""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from engine.base.errors import ArgumentError
from engine.base.units import GIB
from engine.base.values import replace
from engine.devices.device import Rig, make_host
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import Layout, Run
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.protocol.requests import Generate
from engine.runtime.session.events import Done, Loaded
from engine.runtime.session.load_spec import LoadSpec, RetryPolicy
from engine.runtime.session.status import Phase
from tests.support.fake_worker import fake_worker_argv
from tests.support.load_specs import make_spec, spec_of
from tests.support.models import write_tiny_llama
from tests.support.patience import DEADLINE_S
from tests.support.selection import examples
from tests.support.session_log import SessionLog

N_LOADS = 8

Make = Callable[[], LoadSpec]


def stepping_back() -> LoadSpec:
    return replace(make_spec(), retry=RetryPolicy(3))


@pytest.fixture(params=[make_spec, stepping_back])
def make(request: pytest.FixtureRequest) -> Make:
    """What makes the plans that are loaded."""
    made: Make = request.param
    return made


class Users:
    """One thread loads, one generates as soon as it can, one interferes; all react to what the session tells."""

    def __init__(self, log: SessionLog, make_spec: Make, seed: int) -> None:
        self.log = log
        self.make_spec = make_spec
        self.random = random.Random(seed)
        self.generations = 0
        self.loads_done = False

    def load(self) -> None:
        for _ in range(N_LOADS):
            seen = len(self.log.endings)
            self.log.session.load(self.make_spec())
            if self.random.random() < 0.8:
                self.log.wait_until(partial(self._told_more, endings=seen))
        self.loads_done = True
        self.log.session.stop()  # a change of state or an event wakes the others

    def generate(self) -> None:
        while not self.loads_done:
            self.log.wait_until(lambda: self.loads_done or self.log.session.snapshot.is_ready, quietly=True)
            try:
                self.log.session.ask(Generate(prompt="x"))
                self.generations += 1
            except ArgumentError:
                continue  # The model was there a moment ago.
            seen = len(self.log.events)
            self.log.wait_until(partial(self._told_more, events=seen), quietly=True)

    def interfere(self) -> None:
        while not self.loads_done:
            wanted = len(self.log.events) + self.random.randrange(15, 60)
            self.log.wait_until(partial(self._told_more, events=wanted), quietly=True)
            self.random.choice((self.log.session.stop, self.log.session.unload, self.log.session.query_device_memory))()

    def _told_more(self, *, events: int = -1, endings: int = -1) -> bool:
        return self.loads_done or (len(self.log.events) > events and len(self.log.endings) > endings)


@pytest.mark.parametrize("mode", ["normal", "endless", "killed_generate", "failing_generate"])
def test_every_beginning_has_one_ending(make: Make, mode: str) -> None:
    with SessionLog(fake_worker_argv(mode), stop_timeout_s=1.0) as log:
        users = Users(log, make, seed=7)
        threads = [threading.Thread(target=each) for each in (users.load, users.generate, users.interfere)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(log.endings) == N_LOADS + users.generations
    assert log.session.snapshot.phase in (Phase.STOPPED, Phase.FAILED)


@pytest.mark.parametrize("calls", range(6))
def test_close_right_after_other_calls(make: Make, calls: int) -> None:
    log = SessionLog(fake_worker_argv("slow"))
    for _ in range(calls):
        log.session.load(make())
    log.session.close()
    assert len(log.endings) == calls


@pytest.mark.parametrize("turn", range(8))
def test_a_load_that_meets_a_generation(make: Make, turn: int) -> None:
    """Both are called at the same moment: the generation is accepted with an ending, or refused without one."""
    with SessionLog(fake_worker_argv("normal")) as log:
        log.session.load(make())
        log.wait_for_endings(1)
        together = threading.Barrier(2)

        def load() -> None:
            together.wait()
            log.session.load(make())

        loader = threading.Thread(target=load)
        loader.start()
        together.wait()
        expected = 2
        try:
            log.session.ask(Generate(prompt="x"))
            expected = 3
        except ArgumentError:
            pass
        loader.join()
        endings = log.wait_for_endings(expected)
    assert len(log.endings) == expected
    assert isinstance(endings[-1], Loaded | Done)


def test_close_from_several_threads_and_from_an_event(make: Make) -> None:
    log = SessionLog(fake_worker_argv("normal"))
    closed_inside = threading.Event()

    def close_inside(_: object) -> None:
        log.session.close()
        closed_inside.set()

    log.on_event = close_inside
    log.session.load(make())
    assert closed_inside.wait(DEADLINE_S)
    closers = [threading.Thread(target=log.session.close) for _ in range(3)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join()
    assert len(log.endings) == 1


WARM_CYCLES = 10
"""After so many everything that is made once has been made."""
N_CYCLES = max(examples(100), 3 * WARM_CYCLES)
MAX_GROWTH = 1.05


def held() -> tuple[int, int, int]:
    """Return (descriptors, threads, children) of this process."""
    process = psutil.Process()
    descriptors = process.num_handles() if psutil.WINDOWS else process.num_fds()
    return descriptors, threading.active_count(), len(process.children(recursive=True))


@pytest.mark.exhaustive
def test_nothing_grows_over_many_loads(tmp_path: Path) -> None:
    model = read_model(write_tiny_llama(tmp_path / "tiny.gguf", n_layers=1))
    spec = spec_of(
        model=model,
        rig=Rig((), make_host("host", 8 * GIB)),
        layout=Layout(1, (Run("CPU", 0, 0),), "CPU"),
        context=ContextSettings(n_ctx=64, n_batch=32, n_ubatch=32, threads=1),
    )
    process = psutil.Process()
    first, warm_bytes = held(), 0
    with SessionLog() as log:
        for cycle in range(N_CYCLES):
            log.session.load(spec)
            assert isinstance(log.wait_for_endings(1)[-1], Loaded)
            log.session.ask(Generate(prompt="x", max_tokens=1))
            assert isinstance(log.wait_for_endings(2)[-1], Done)
            log.session.unload()
            log.wait_for_phase(Phase.STOPPED)
            # the child's threads see its end, then they end themselves
            log.wait_until(lambda: not any("worker-" in each.name for each in threading.enumerate()), quietly=True)
            if cycle == 0:
                first = held()
            if cycle == WARM_CYCLES:
                gc.collect()
                warm_bytes = process.memory_info().rss
            log.events.clear()
            log.phases.clear()
        assert held() == first
        gc.collect()
        assert process.memory_info().rss <= warm_bytes * MAX_GROWTH
