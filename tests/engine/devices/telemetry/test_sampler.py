"""The readings of all devices, and the thread that takes them."""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import psutil
import pytest

from engine.devices.device import Device, make_host
from engine.devices.telemetry import processes
from engine.devices.telemetry.processes import (
    LOOK_AGAIN_S,
    LocalWorkerReader,
    WorkerProcess,
    data_bytes,
    descendants,
    listening_pid,
    resident_bytes,
)
from engine.devices.telemetry.sample import Sample
from engine.devices.telemetry.sampler import REMOTE_NOTE, DeviceReadings, Sampler
from tests.support.patience import DEADLINE_S

MIB = 1 << 20
# Takes memory when told a number of bytes, and listens on a port of its own.
CHILD = """
import socket, sys
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    blocks = []
    for line in sys.stdin:
        blocks.append(b"x" * int(line))
        print("taken", flush=True)
"""


class Child:
    """A process that stands for a worker."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def take(self, size_bytes: int) -> None:
        """Have it hold `size_bytes` more."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{size_bytes}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "taken\n"

    def end(self) -> None:
        """Wait until it is gone."""
        self.process.communicate(timeout=10)


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child()
    yield child
    if child.process.poll() is None:
        child.end()


def rpc(endpoint: str, cap_bytes: int | None = None) -> Device:
    return Device("RPC0", "lab", "RPC", "gpu", 1024 * MIB, endpoint=endpoint, cap_bytes=cap_bytes)


def test_the_host_counts_what_our_children_hold(child: Child) -> None:
    readings = DeviceReadings([make_host("here", 1)])
    (before,) = readings.read()
    child.take(64 * MIB)
    (after,) = readings.read()

    assert before.own_bytes is not None
    assert after.own_bytes is not None
    assert after.own_bytes - before.own_bytes >= 60 * MIB
    assert after.total_bytes is not None
    assert after.used_bytes is not None
    assert 0 < after.used_bytes < after.total_bytes <= psutil.virtual_memory().total


def test_utilisation_needs_two_readings() -> None:
    readings = DeviceReadings([make_host("here", 1)])

    (first,) = readings.read()
    (second,) = readings.read()

    assert first.utilization_percent is None
    assert second.utilization_percent is not None


@pytest.mark.skipif(sys.platform != "linux", reason="VmData is Linux's number")
def test_a_worker_of_ours_is_read_beyond_its_baseline(child: Child) -> None:
    baseline_bytes = data_bytes(child.process.pid)
    assert baseline_bytes is not None
    endpoint = f"127.0.0.1:{child.port}"
    workers = {endpoint: WorkerProcess(child.process.pid, baseline_bytes)}
    readings = DeviceReadings([rpc(endpoint, cap_bytes=256 * MIB)], workers)
    (empty,) = readings.read()
    child.take(64 * MIB)
    (full,) = readings.read()

    assert empty.used_bytes == 0
    assert full.used_bytes is not None
    assert 64 * MIB <= full.used_bytes < 66 * MIB
    assert full.total_bytes == 256 * MIB
    assert full.own_bytes == full.used_bytes


def test_a_worker_that_ended_is_a_gap(child: Child) -> None:
    endpoint = f"127.0.0.1:{child.port}"
    readings = DeviceReadings([rpc(endpoint)], {endpoint: WorkerProcess(child.process.pid, 0)})
    child.end()

    (sample,) = readings.read()

    assert sample.used_bytes is None
    assert sample.note == "worker stopped"


def test_a_local_worker_is_found_by_its_port(child: Child) -> None:
    child.take(32 * MIB)

    (sample,) = DeviceReadings([rpc(f"127.0.0.1:{child.port}")]).read()

    assert listening_pid(child.port) == child.process.pid
    assert sample.used_bytes is not None
    assert sample.used_bytes >= 32 * MIB
    assert sample.total_bytes == 1024 * MIB


def test_a_port_without_a_process_is_looked_up_again_later(child: Child) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        free_port = server.getsockname()[1]
    nobody = LocalWorkerReader(rpc(f"127.0.0.1:{free_port}"))
    assert nobody.read(0.0).note == "worker not found"

    moved = LocalWorkerReader(rpc(f"127.0.0.1:{child.port}"))
    assert moved.read(0.0).used_bytes is not None
    child.end()
    assert moved.read(1.0).used_bytes is None
    assert moved.read(LOOK_AGAIN_S + 1.0).used_bytes is None


@pytest.mark.parametrize(
    ("device", "note"),
    [
        (Device("RPC9", "attic", "RPC", "gpu", 1, endpoint="192.0.2.7:50052"), REMOTE_NOTE),
        (Device("Metal0", "M2", "Metal", "gpu", 1), "Metal"),
    ],
)
def test_what_cannot_be_read_is_a_gap_with_a_reason(device: Device, note: str) -> None:
    (sample,) = DeviceReadings([device]).read()

    assert (sample.used_bytes, sample.total_bytes) == (None, None)
    assert note in sample.note


def test_devices_can_change_between_readings() -> None:
    readings = DeviceReadings([make_host("here", 1)])
    readings.set_devices([rpc("192.0.2.7:50052"), make_host("here", 1)])

    assert [sample.device for sample in readings.read()] == ["RPC0", "CPU"]


def test_a_process_that_is_gone_holds_nothing(child: Child) -> None:
    pid = child.process.pid
    assert resident_bytes(pid)
    child.end()
    assert resident_bytes(pid) is None


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


def test_it_can_start_again_while_a_reading_of_the_stopped_thread_hangs() -> None:
    source, received = Source(), queue.Queue[tuple[Sample, ...]]()
    source.hold = threading.Event()
    sampler = Sampler(source, received.put, interval_s=3600)
    sampler.start()
    assert source.is_reading.wait(DEADLINE_S)
    assert not sampler.stop(timeout_s=0.0)

    sampler.start()
    source.hold.set()

    assert received.get(timeout=DEADLINE_S)[0].used_bytes == 2
    assert sampler.stop(DEADLINE_S)


def test_all_descendants_are_found_whichever_thread_started_them(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "import subprocess, sys; subprocess.Popen(['sleep', '60']); print(flush=True); sys.stdin.read()"
    started: queue.Queue[subprocess.Popen[bytes]] = queue.Queue()
    go_on = threading.Event()

    def start() -> None:
        # The thread must live on: children of an ended one are its process's main thread's.
        started.put(subprocess.Popen([sys.executable, "-c", words], stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        go_on.wait(DEADLINE_S)

    thread = threading.Thread(target=start)
    thread.start()
    with started.get(timeout=DEADLINE_S) as child:
        assert child.stdout is not None
        child.stdout.readline()
        found = set(descendants(os.getpid()))
        below = descendants(child.pid)
        monkeypatch.setattr(processes, "_lists_children", lambda: False)
        assert set(descendants(os.getpid())) == found
        for pid in below:
            os.kill(pid, signal.SIGKILL)
        child.kill()
    go_on.set()
    thread.join()
    assert {child.pid, *below} <= found
    assert len(below) == 1
    monkeypatch.undo()
    assert descendants(child.pid) == ()
