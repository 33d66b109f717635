"""Measured speeds of real devices: the host and lab workers."""

from __future__ import annotations

import socket

import pytest

from engine.base.cancellation import CancelToken
from engine.base.errors import EngineError
from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Rig, make_host
from engine.machines.rigs import speeds
from engine.machines.rigs.discovery import host_device
from engine.machines.rigs.lab import LabRig
from engine.machines.rigs.speeds import measure_speeds
from engine.runtime.process.blocking_child import request_child
from engine.runtime.protocol.messages import DeviceSpeed
from engine.runtime.protocol.requests import DeviceRef, MeasureSpeed
from tests.support.patience import DEADLINE_S
from tests.support.selection import some

RECURRENT = {"scan", "scan.decays", "convolution"}
SMALL = make_host("host", 16 * GIB, 256 * MIB)
"""A host with so little free memory that the test is quick."""


@pytest.fixture(autouse=True)
def few_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure few types of weights with a small matrix every day: each takes half a second of each device."""
    monkeypatch.setattr(speeds, "MAX_BYTES", 8 * MIB)
    monkeypatch.setattr(speeds, "_TYPES", dict(some(list(speeds._TYPES.items()), least=1)))


@pytest.mark.exhaustive
def test_host_and_lab_workers_are_measured() -> None:
    with LabRig([64 * MIB, 64 * MIB]) as lab:
        gone = replace(lab.rig.devices[0], id="gone", endpoint="127.0.0.1:1")
        held = lab.rig.devices[1]
        rig = Rig((lab.rig.devices[0], held, gone), SMALL)
        measured = measure_speeds(rig, held=[str(held.endpoint)])
    assert set(measured.speeds) == {CPU_ID, lab.rig.devices[0].id}
    for speed in measured.speeds.values():
        assert 1e8 < speed.read_bytes_per_second < 1e13
        assert 0 < speed.round_trip_s < 1
        assert speed.sent_bytes_per_second > 1e6
        assert speed.products["F16"] > 1e8
        # A busy machine is slow; a scan is slower than a product.
        assert all(1e5 < each < 1e15 for each in speed.products.values()), speed.products
    on_worker = measured.speeds[lab.rig.devices[0].id].products.keys()
    assert not RECURRENT & on_worker, "a server would end if its device had no such kernel"
    assert not any(".repacked" in name for name in on_worker), "only a load's own CPU repacks weights"
    assert measured.speeds[CPU_ID].round_trip_s < measured.speeds[lab.rig.devices[0].id].round_trip_s
    assert [problem.split(":")[0].split(" ")[0] for problem in measured.problems] == [held.id, "gone"]


def test_kernels_of_a_cpu_are_measured() -> None:
    request = MeasureSpeed(
        device=DeviceRef(id=CPU_ID, backend="CPU"),
        size_bytes=4 * MIB,
        n_threads=1,
        enough_s=DEADLINE_S,
        types={"Q4_0": 2},
        repacked=("Q4_0",),
        scans=True,
    )
    speed = request_child(request, DeviceSpeed, timeout_s=2 * DEADLINE_S)
    attention = {f"attention.{width}{suffix}" for width in (64, 128, 256) for suffix in ("", ".1", ".1.alone")}
    products = {"F16", "Q4_0", "F16.experts", "Q4_0.experts", *attention, *RECURRENT}
    repacked = set() if "Q4_0.repacked" not in speed.by_type else {"Q4_0.repacked", "Q4_0.repacked.experts"}
    assert speed.products.keys() == products | repacked, "processors without AVX2 have no repacked weights"
    assert all(1e6 < each < 1e15 for each in speed.products.values())


def test_types_are_left_out_where_the_time_for_them_is_over() -> None:
    request = MeasureSpeed(
        device=DeviceRef(id=CPU_ID, backend="CPU"), size_bytes=4 * MIB, n_threads=1, enough_s=0, types={"Q8_0": 8}
    )
    speed = request_child(request, DeviceSpeed, timeout_s=DEADLINE_S)
    assert speed.read_bytes_per_second > 1e8
    assert speed.op_s is not None
    assert speed.by_type == speed.products == {}


def test_a_device_that_is_gone_is_told_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "_ENOUGH_S", 0.0)
    missing = Device("CUDA7", "missing", "CUDA", "gpu", 8 * GIB)
    accelerator = Device("BLAS", "library", "BLAS", "accel", 0)
    measured = measure_speeds(Rig((missing, accelerator), SMALL))
    assert set(measured.speeds) == {CPU_ID}
    (problem,) = measured.problems
    assert problem.startswith("CUDA7: ")
    assert "no longer exists" in problem


def test_a_busy_worker_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "_ENOUGH_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        worker = Device("RPC0", "attic", "RPC", "gpu", GIB, endpoint=endpoint)
        measured = measure_speeds(Rig((worker,), SMALL))
    assert "RPC0" not in measured.speeds
    assert "did not answer" in measured.problems[0]


def test_cancelled() -> None:
    cancel = CancelToken()
    cancel.cancel()
    with pytest.raises(EngineError):
        measure_speeds(Rig((), host_device()), cancel=cancel)
