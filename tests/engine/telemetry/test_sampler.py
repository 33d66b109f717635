"""The sampler thread: pace, errors, and a clean end."""

from __future__ import annotations

import logging
import queue
import threading

import pytest

from engine.telemetry.sample import Sample
from engine.telemetry.sampler import Sampler
from tests.support.patience import DEADLINE_S


class Source:
    """Counts what is asked of it; `failures` readings fail, and `hold` makes one wait."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.reads = 0
        self.is_closed = False
        self.hold: threading.Event | None = None
        self.is_reading = threading.Event()
        self.thread: threading.Thread | None = None

    def read(self) -> tuple[Sample, ...]:
        self.thread = threading.current_thread()
        self.reads += 1
        self.is_reading.set()
        if self.hold is not None:
            assert self.hold.wait(DEADLINE_S)
        if self.reads <= self.failures:
            raise OSError("the bus is gone")
        return (Sample("CPU", float(self.reads), self.reads, 10),)

    def close(self) -> None:
        self.is_closed = True


def test_samples_keep_coming_until_stopped() -> None:
    source, received = Source(), queue.Queue[tuple[Sample, ...]]()
    sampler = Sampler(source, received.put, interval_s=0.001)

    sampler.start()
    times = [received.get(timeout=DEADLINE_S)[0].time_s for _ in range(5)]

    assert sampler.stop()
    assert times == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert source.thread is not threading.current_thread()
    assert source.is_closed


def test_stopping_does_not_wait_for_the_interval() -> None:
    received: queue.Queue[tuple[Sample, ...]] = queue.Queue()
    sampler = Sampler(Source(), received.put, interval_s=3600)
    sampler.start()
    received.get(timeout=DEADLINE_S)

    assert sampler.stop(DEADLINE_S)


def test_a_failing_reading_is_logged_once_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    received: queue.Queue[tuple[Sample, ...]] = queue.Queue()
    sampler = Sampler(Source(failures=3), received.put, interval_s=0.001)
    with caplog.at_level(logging.ERROR):
        sampler.start()
        assert received.get(timeout=DEADLINE_S)[0].used_bytes == 4
        assert sampler.stop()

    assert len(caplog.records) == 1
    assert "the bus is gone" in caplog.text


def test_stop_is_bounded_while_a_reading_hangs_and_nothing_comes_after() -> None:
    source, received = Source(), queue.Queue[tuple[Sample, ...]]()
    source.hold = threading.Event()
    sampler = Sampler(source, received.put, interval_s=0.001)
    sampler.start()
    assert source.is_reading.wait(DEADLINE_S)

    assert not sampler.stop(timeout_s=0.01)

    source.hold.set()
    assert sampler.stop(DEADLINE_S)
    assert received.empty()


def test_it_can_start_again() -> None:
    source, received = Source(), queue.Queue[tuple[Sample, ...]]()
    sampler = Sampler(source, received.put, interval_s=3600)
    for _ in range(2):
        sampler.start()
        sampler.start()
        received.get(timeout=DEADLINE_S)
        assert sampler.stop(DEADLINE_S)

    assert source.reads == 2
    assert sampler.stop()
