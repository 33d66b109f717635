"""Lab workers: real children that serve, have a memory cap, and end with their owner."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from engine.base.cancellation import CancelToken
from engine.base.errors import ArgumentError, EngineError, WorkerCrashedError
from engine.base.units import MIB
from engine.devices.endpoint import GreetingStatus, greet, parse_endpoint
from engine.devices.telemetry.processes import listening_pid
from engine.machines.rigs.discovery import discover
from engine.machines.rigs.lab import LabRig, serve
from tests.support.fake_worker import fake_worker_argv
from tests.support.patience import DEADLINE_S

ROOT = Path(__file__).resolve().parents[4]


def endpoint_of(lab: LabRig, index: int) -> str:
    endpoint = lab.rig.devices[index].endpoint
    assert endpoint is not None
    return endpoint


def test_workers_serve_under_their_caps_and_are_gone_afterwards() -> None:
    with LabRig([64 * MIB, 32 * MIB]) as lab:
        first, second = lab.rig.devices
        assert (first.id, second.id, first.name) == ("RPC0", "RPC1", "simulated device 0")
        assert (first.total_bytes, first.free_bytes, first.available_bytes) == (64 * MIB, 64 * MIB, 64 * MIB)
        assert second.total_bytes == 32 * MIB
        assert first.endpoint != second.endpoint
        assert lab.caps_enforced == sys.platform.startswith("linux")
        for index in (0, 1):
            assert greet(*parse_endpoint(endpoint_of(lab, index))).status is GreetingStatus.OK
        ports = [parse_endpoint(endpoint_of(lab, index))[1] for index in (0, 1)]
        assert [listening_pid(port) for port in ports] == [lab.pid("RPC0"), lab.pid("RPC1")]
        assert lab.baseline_bytes("RPC0") > 0
        assert lab.pid("RPC9") is None
        pids = [lab.pid("RPC0"), lab.pid("RPC1")]
    assert not any(psutil.pid_exists(pid) for pid in pids if pid)
    assert [listening_pid(port) for port in ports] == [None, None]


def test_discovery_lists_workers_in_the_order_given() -> None:
    with LabRig([64 * MIB, 64 * MIB]) as lab:
        endpoints = (endpoint_of(lab, 1), endpoint_of(lab, 0))
        rig = discover(endpoints)
    workers = [device for device in rig.devices if device.is_rpc]
    assert [(device.id, device.endpoint) for device in workers] == [("RPC0", endpoints[0]), ("RPC1", endpoints[1])]
    assert all(device.margin_bytes == 0 for device in workers)
    assert rig.host.id == "CPU"
    assert rig.host.total_bytes > 0


def test_a_worker_that_is_killed_is_told_once() -> None:
    ended: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
    with LabRig([32 * MIB, 32 * MIB], on_worker_ended=lambda *told: ended.put(told)) as lab:
        pid = lab.pid("RPC1")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        device_id, sentence = ended.get(timeout=DEADLINE_S)
        assert device_id == "RPC1"
        assert "RPC1" in sentence
        assert greet(*parse_endpoint(endpoint_of(lab, 0))).ok
    assert ended.empty()


@pytest.mark.parametrize("mode", ["dies_after_hello", "other_version"])
def test_one_that_does_not_start_ends_all_and_says_which(mode: str) -> None:
    with pytest.raises(EngineError, match="Lab worker 0 did not start"):
        LabRig([32 * MIB, 32 * MIB], argv=fake_worker_argv(mode)).start()
    assert psutil.Process().children() == []


def test_a_worker_that_never_serves_is_not_waited_for_without_end() -> None:
    with pytest.raises(EngineError, match="did not start"):
        LabRig([32 * MIB], argv=fake_worker_argv("deaf"), start_timeout_s=0.3).start()


@pytest.mark.parametrize("caps_bytes", [[], [0], [-5, MIB]])
def test_caps_that_make_no_sense(caps_bytes: list[int]) -> None:
    with pytest.raises(ArgumentError):
        LabRig(caps_bytes).start()


def test_close_in_every_state() -> None:
    never_started = LabRig([32 * MIB])
    never_started.close()
    never_started.close()
    with pytest.raises(EngineError, match="closed"):
        never_started.start()


def test_killing_the_owner_leaves_no_worker() -> None:
    program = (
        "import json, sys, threading\n"
        "from engine.machines.rigs.lab import LabRig\n"
        "lab = LabRig([33554432, 33554432])\n"
        "lab.start()\n"
        "print(json.dumps([lab.pid('RPC0'), lab.pid('RPC1')]), flush=True)\n"
        "threading.Event().wait()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as owner:
        assert owner.stdout is not None
        workers = [psutil.Process(pid) for pid in json.loads(owner.stdout.readline())]
        owner.kill()
        owner.wait()
    _, alive = psutil.wait_procs(workers, timeout=DEADLINE_S)
    assert alive == []


def test_serving_until_told_to_stop() -> None:
    until = CancelToken()
    ports: queue.SimpleQueue[int] = queue.SimpleQueue()
    thread = threading.Thread(
        target=lambda: serve(port=0, cap_bytes=32 * MIB, until=until, on_serving=lambda it: ports.put(it.port))
    )
    thread.start()
    try:
        port = ports.get(timeout=DEADLINE_S)
        assert greet("127.0.0.1", port).ok
    finally:
        until.cancel()
        thread.join(DEADLINE_S)
    assert greet("127.0.0.1", port).status is GreetingStatus.REFUSED


def test_serving_on_a_port_in_use_says_so() -> None:
    with LabRig([32 * MIB]) as lab:
        _, port = parse_endpoint(endpoint_of(lab, 0))
        with pytest.raises(ArgumentError, match=str(port)):
            serve(port=port)


def test_serving_an_unknown_device_says_so() -> None:
    with pytest.raises(ArgumentError, match=r"CUDA77.*choose one of.*CPU"):
        serve(port=0, device="CUDA77")


def test_a_server_that_is_killed_is_an_error() -> None:
    def kill(serving: object) -> None:
        (child,) = psutil.Process().children()
        child.kill()

    with pytest.raises(WorkerCrashedError, match="SIGKILL"):
        serve(port=0, on_serving=kill)
