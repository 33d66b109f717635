"""Workers bound to NUMA nodes: their devices, and the binding of their processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from engine.base.errors import ArgumentError, EngineError
from engine.base.numa import NumaNode, numbers_text, read_nodes
from engine.base.units import GIB, MIB
from engine.devices.device import Device, Rig, make_host
from engine.devices.rig_file import encode_rig, parse_rig
from engine.machines.bench.candidates import numa_candidates
from engine.machines.rigs.lab import LabRig, _lab_device, memory_not_bound, numa_rig
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import single_device, split_evenly
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.plan.report import DeviceRow
from engine.planning.settings.context_settings import ContextSettings
from tests.support.models import write_tiny_llama

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone describes NUMA nodes")


@pytest.fixture(scope="module")
def node() -> NumaNode:
    found = [each for each in read_nodes() if each.can_serve]
    if not found:
        pytest.skip("this kernel describes no NUMA nodes")
    return found[0]


def test_workers_of_nodes_and_the_cpu_are_planned_with_one_memory(tmp_path: Path) -> None:
    """Both workers and the CPU would fit alone, and not together."""
    model = read_model(write_tiny_llama(tmp_path / "m.gguf", n_layers=3))
    nodes = [NumaNode(number, frozenset({number}), GIB) for number in (0, 1)]
    devices = tuple(_lab_device(number, node, 5000 + number, GIB) for number, node in enumerate(nodes))
    layout = split_evenly(3, ["NODE0", "NODE1", "CPU"])

    def rows(host_bytes: int) -> list[DeviceRow]:
        rig = Rig(devices, make_host("host", host_bytes, host_bytes))
        return list(Plan(ModelMemory(model), rig, Edit(layout, ContextSettings(n_ctx=512))).report.rows)

    need_bytes = sum(row.need_bytes for row in rows(4 * GIB))
    assert not any(row.is_short for row in rows(need_bytes))
    assert all(row.is_short for row in rows(need_bytes - 1))
    assert parse_rig(encode_rig(Rig(devices, make_host("host", GIB)))).pool is not None
    simulated = _lab_device(0, None, 5000, GIB)
    assert not simulated.unified


def test_a_worker_computes_on_its_node_with_its_memory(node: NumaNode) -> None:
    with LabRig([64 * MIB], nodes=[node]) as lab:
        (device,) = lab.rig.devices
        assert (device.id, device.total_bytes) == (f"NODE{node.number}", 64 * MIB)
        assert device.name.startswith(f"NUMA node {node.number}, CPUs ")
        pid = lab.pid(device.id)
        assert lab.processes[device.endpoint or ""].pid == pid
        if lab.unbound_nodes:
            pytest.skip("this container does not let a process bind memory")
        # The main thread and the server's thread; heaps of the server's are made after the binding.
        maps = Path(f"/proc/{pid}/numa_maps").read_text(encoding="utf-8", errors="replace")
        assert f" bind:{node.number} " in maps
        for task in Path(f"/proc/{pid}/task").iterdir():
            status = (task / "status").read_text(encoding="utf-8", errors="replace")
            if "rpc-server" in (task / "comm").read_text():
                assert f"Cpus_allowed_list:\t{numbers_text(node.processors)}\n" in status


def test_a_node_that_does_not_exist_is_refused(node: NumaNode) -> None:
    missing = NumaNode(1023, node.processors, GIB)
    with pytest.raises(EngineError, match="There is no NUMA node 1023 with processors and memory"):
        LabRig([16 * MIB], nodes=[missing]).start()


def test_one_node_is_not_split() -> None:
    with pytest.raises(ArgumentError, match=r"one NUMA node .*cannot be split"):
        numa_rig([NumaNode(0, frozenset({0, 1}), GIB)])


def test_each_node_lends_its_free_memory_less_a_share() -> None:
    nodes = [NumaNode(0, frozenset({0}), 16 * GIB, 8 * GIB), NumaNode(3, frozenset({1}), 16 * GIB)]
    assert numa_rig(nodes)._caps_bytes == (7 * GIB, 14 * GIB)


def test_what_the_system_does_not_bind_is_told() -> None:
    assert memory_not_bound(()) == ""
    assert "NODE0, NODE1" in memory_not_bound(("NODE0", "NODE1"))


def test_the_split_is_compared_with_the_cpu_alone(tmp_path: Path) -> None:
    model = read_model(write_tiny_llama(tmp_path / "m.gguf", n_layers=4))
    devices = tuple(
        Device(f"NODE{number}", "node", "RPC", "gpu", GIB, GIB, endpoint=f"127.0.0.1:{5000 + number}")
        for number in (0, 1)
    )
    rig = Rig(devices, make_host("host", 2 * GIB))
    base = Plan(ModelMemory(model), rig, Edit(single_device(4, "NODE0"), ContextSettings(n_ctx=512)))
    found = numa_candidates(base)
    assert [each.name for each in found] == ["CPU", "CPU, distribute", "NUMA nodes"]
    assert [each.plan.settings.numa for each in found] == ["off", "distribute", "off"]
    layouts = [each.plan.edit.layout for each in found]
    assert layouts[0].devices == layouts[1].devices == ("CPU",)
    assert [layouts[2].device_of(layer) for layer in range(4)] == ["NODE0", "NODE0", "NODE1", "NODE1"]
