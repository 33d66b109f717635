"""Discovery: the devices made from a child's list, and the errors if there is no list."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Literal

import psutil
import pytest

from engine.base.cancellation import CancelToken
from engine.base.errors import (
    ArgumentError,
    BusyError,
    EngineError,
    UnreachableError,
    WorkerCrashedError,
    WorkerStalledError,
)
from engine.base.units import GIB, MIB
from engine.devices.device import CPU_ID, Capabilities
from engine.machines.rigs.discovery import (
    DEFAULT_GPU_MARGIN_BYTES,
    devices_of,
    discover,
    find_devices,
    find_workers,
    host_device,
)
from engine.machines.rigs.lab import LabRig
from engine.machines.rigs.self_test import SelfTest, keep_verdict
from engine.planning.memory.backends import TRAITS
from engine.runtime.protocol.messages import GgmlDevice
from tests.support.fake_worker import fake_worker_argv
from tests.support.previews import make_gpu, make_rig
from tests.support.rpc_peers import rpc_server


def test_the_host_is_this_machine() -> None:
    host = host_device()
    assert host.id == "CPU"
    assert host.name
    assert 0 < host.total_bytes <= psutil.virtual_memory().total
    assert host.free_bytes is not None
    assert 0 < host.free_bytes <= host.total_bytes


def test_verdicts_of_self_tests_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, verdicts = make_rig(make_gpu("CUDA0", 8)), tmp_path / "verdicts.json"
    monkeypatch.setattr("engine.machines.rigs.discovery.discover", lambda _endpoints: rig)
    assert not find_devices(verdicts).devices[0].capabilities.repeatable
    keep_verdict(verdicts, rig.devices[0], SelfTest(rounds=1, different=0))
    assert find_devices(verdicts).devices[0].capabilities.repeatable


def test_the_devices_of_a_worker_are_found_by_themselves_or_beside_this_machines(tmp_path: Path) -> None:
    with LabRig([16 * MIB]) as lab:
        endpoint = lab.rig.devices[0].endpoint
        assert endpoint is not None
        assert [device.endpoint for device in find_workers(endpoint, tmp_path / "checks.json")] == [endpoint]
        found = find_devices(tmp_path / "none.json", (endpoint,))
    assert endpoint in {device.endpoint for device in found.devices}
    assert found.ids[-1] == CPU_ID
    with pytest.raises(UnreachableError):
        find_workers(endpoint, tmp_path / "checks.json")


def test_this_machine_without_anything_remote() -> None:
    rig = discover()
    assert rig.ids[-1] == "CPU"
    assert all(device.backend != "CPU" for device in rig.devices)
    assert all(device.margin_bytes == DEFAULT_GPU_MARGIN_BYTES for device in rig.devices)


def test_a_list_with_every_kind() -> None:
    with rpc_server() as first, rpc_server() as second:
        rig = discover((first, second), argv=fake_worker_argv("normal"))
    assert rig.ids == ("CUDA0", "RPC0", "RPC1", "RPC2", "RPC3", "CPU")
    cuda = rig.devices[0]
    assert (cuda.name, cuda.kind, cuda.pci_bus_id) == ("Fast card", "gpu", "0000:01:00.0")
    # The child that told 23 GiB had a context of its own.
    free_bytes = 23 * GIB + TRAITS["CUDA"].overhead_bytes
    assert (cuda.total_bytes, cuda.free_bytes, cuda.margin_bytes) == (24 * GIB, free_bytes, DEFAULT_GPU_MARGIN_BYTES)
    assert cuda.capabilities == Capabilities(row_split=False, tensor_split=True)
    remote = [(device.endpoint, device.endpoint_device, device.margin_bytes) for device in rig.devices[1:]]
    assert remote == [(first, 0, 0), (first, 1, 0), (second, 0, 0), (second, 1, 0)]


@pytest.mark.parametrize("order", [1, -1])
def test_a_card_that_two_packs_list_is_there_once(order: int) -> None:
    """An NVIDIA and an AMD card: Vulkan lists both, and CUDA the first. One without a PCI id stays."""
    cards = [
        ("CUDA0", "CUDA", "0000:01:00.0"),
        ("Vulkan0", "Vulkan", "0000:01:00.0"),
        ("Vulkan1", "Vulkan", "0000:03:00.0"),
        ("Vulkan2", "Vulkan", None),
    ]
    found = [
        GgmlDevice(
            name=name,
            description=name,
            backend=backend,
            kind="gpu",
            free_bytes=GIB,
            total_bytes=GIB,
            pci_bus_id=slot,
        )
        for name, backend, slot in cards[::order]
    ]
    assert sorted(device.id for device in devices_of(found)) == ["CUDA0", "Vulkan1", "Vulkan2"]


@pytest.mark.parametrize(
    ("backend", "kind", "unified"),
    [("Metal", "gpu", True), ("CUDA", "igpu", True), ("Vulkan", "igpu", True), ("CUDA", "gpu", False)],
)
def test_integrated_devices_and_metal_share_the_hosts_memory(
    backend: str, kind: Literal["gpu", "igpu"], unified: bool
) -> None:
    listed = GgmlDevice(
        name="D0", description="device", backend=backend, kind=kind, free_bytes=GIB, total_bytes=2 * GIB
    )
    (device,) = devices_of([listed])
    assert device.unified is unified


def test_endpoints_that_do_not_answer() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(UnreachableError, match=endpoint) as refused:
            discover((endpoint,))
    assert refused.value.endpoint == endpoint
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(BusyError):
        discover((f"127.0.0.1:{silent.getsockname()[1]}",))


@pytest.mark.parametrize("endpoints", [("nowhere",), ("127.0.0.1:1", "127.0.0.1:1"), ("127.0.0.1:1", " 127.0.0.1:01")])
def test_endpoints_that_make_no_sense(endpoints: tuple[str, ...]) -> None:
    with pytest.raises(ArgumentError):
        discover(endpoints)


def test_blanks_around_an_endpoint_do_not_reach_the_engine() -> None:
    with rpc_server() as endpoint:
        rig = discover((f" {endpoint}\n",), argv=fake_worker_argv("normal"))
    assert {device.endpoint for device in rig.devices if device.is_rpc} == {endpoint}


def test_a_child_that_crashes_or_says_nothing() -> None:
    with pytest.raises(WorkerCrashedError, match="exit code 7"):
        discover(argv=fake_worker_argv("dies_after_hello"))
    with pytest.raises(WorkerStalledError):
        discover(argv=fake_worker_argv("silent"), timeout_s=0.3)


def test_a_cancel_ends_it() -> None:
    cancel = CancelToken()
    cancel.cancel()
    with pytest.raises(EngineError, match="cancelled"):
        discover(argv=fake_worker_argv("silent"), cancel=cancel)


def test_variables_that_hide_devices_are_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0")
    with caplog.at_level("INFO", "layerdeck.devices"):
        discover()
    assert 'ROCR_VISIBLE_DEVICES="0" can hide devices of HIP' in caplog.text
