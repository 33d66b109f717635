"""Which source reads which device, with real processes."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from engine.devices.device import Device, make_host
from engine.telemetry.process_memory import data_bytes, listening_pid, resident_bytes
from engine.telemetry.readings import REMOTE_NOTE, DeviceReadings
from engine.telemetry.rpc_worker import LOOK_AGAIN_S, LocalWorkerReader, WorkerProcess

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
    assert sample.note == "worker is gone"


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
