"""NUMA nodes from Linux's files, and binding a thread to one."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from engine.base.numa import (
    MAX_NODES,
    NumaNode,
    bind_to_node,
    bound_nodes,
    left_nodes_sentence,
    numa_sentence,
    numbers_text,
    read_nodes,
    serving_nodes,
)
from engine.base.units import GIB
from engine.devices.device import make_host, node_lines
from engine.planning.layout.engine_parameters import MAX_ENTRIES

ALL = frozenset(range(64))
FREE_KIB, FILE_KIB = 1 << 20, 1 << 19


def machine(folder: Path, nodes: dict[int, tuple[str, int]], online: str = "") -> Path:
    """Write /sys/devices/system/node for nodes of (list of processors, GiB), and return its path."""
    folder.mkdir(parents=True)
    (folder / "online").write_text(f"{online or numbers_text(nodes)}\n")
    for number, (processors, gib) in nodes.items():
        node = folder / f"node{number}"
        node.mkdir()
        (node / "cpulist").write_text(f"{processors}\n")
        (node / "distance").write_text(" ".join("10" if each == number else "21" for each in nodes) + "\n")
        sizes = {"MemTotal": gib << 20, "MemFree": FREE_KIB if gib else 0, "Active(file)": FILE_KIB if gib else 0}
        lines = [f"Node {number} {name + ':':<16}{kib:8} kB" for name, kib in sizes.items()]
        (node / "meminfo").write_text("\n".join([*lines, f"Node {number} HugePages_Total:     0"]) + "\n")
    return folder


def read(folder: Path, usable: frozenset[int] = ALL, allowed: str = "0-63") -> tuple[NumaNode, ...]:
    status = folder.parent / "status"
    status.write_text(f"Name:\tx\nMems_allowed_list:\t{allowed}\n")
    return read_nodes(usable, folder, status)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_nodes_are_read_with_processors_memory_and_distances(count: int, tmp_path: Path) -> None:
    nodes = {number: (f"{4 * number}-{4 * number + 3}", 16) for number in range(count)}
    found = read(machine(tmp_path / "node", nodes))
    assert [node.number for node in found] == list(range(count))
    assert found[-1].processors == frozenset(range(4 * count - 4, 4 * count))
    assert (found[0].total_bytes, found[0].free_bytes) == (16 * GIB, GIB + GIB // 2)
    assert found[0].distances == (10, *[21] * (count - 1))
    assert serving_nodes(found) == (found if count > 1 else ())
    assert len(node_lines(make_host("host", GIB, nodes=found))) == (count if count > 1 else 0)


def test_a_node_without_processors_or_without_memory_gets_no_worker(tmp_path: Path) -> None:
    found = read(machine(tmp_path / "node", {0: ("0-3", 16), 1: ("", 64), 2: ("4-7", 0), 3: ("8-11", 16)}))
    assert [node.can_serve for node in found] == [True, False, False, True]
    assert (found[1].processors, found[2].total_bytes, found[2].free_bytes) == (frozenset(), 0, None)
    assert [node.number for node in serving_nodes(found)] == [0, 3]
    assert "node 1: CPUs none, 64.00 GiB" in numa_sentence(found)


def test_processors_that_cannot_be_used_do_not_count(tmp_path: Path) -> None:
    # The affinity of a process has no offline processor.
    folder = machine(tmp_path / "node", {0: ("0-3", 16), 1: ("4-7", 16)})
    assert [node.processors for node in read(folder, frozenset({1, 2, 7}))] == [frozenset({1, 2}), frozenset({7})]
    assert serving_nodes(read(folder, frozenset({0, 1}))) == ()


def test_memory_that_a_control_group_forbids_does_not_count(tmp_path: Path) -> None:
    folder = machine(tmp_path / "node", {0: ("0-3", 16), 1: ("4-7", 16)})
    assert [node.total_bytes for node in read(folder, allowed="0")] == [16 * GIB, 0]


def test_offline_nodes_are_left_out_and_numbers_may_have_gaps(tmp_path: Path) -> None:
    folder = machine(tmp_path / "node", {0: ("0-3", 16), 4: ("4-7", 16), 8: ("8-11", 16)}, online="0,8")
    assert [node.number for node in read(folder)] == [0, 8]
    (folder / "online").unlink()
    assert [node.number for node in read(folder)] == [0, 4, 8]


def test_a_system_without_nodes_says_so(tmp_path: Path) -> None:
    assert read(tmp_path / "nothing") == ()
    assert numa_sentence(()) == "This system reports no NUMA nodes, so the CPU cannot be split."
    assert "one NUMA node" in numa_sentence([NumaNode(0, frozenset({0}), GIB)])


def test_damaged_files_give_nodes_that_serve_nothing(tmp_path: Path) -> None:
    folder = machine(tmp_path / "node", {0: ("0-3", 16)})
    for name, text in (("cpulist", "0-99999999999"), ("meminfo", "Node x"), ("distance", "far")):
        (folder / "node0" / name).write_text(text)
    assert read(folder) == (NumaNode(0, frozenset(), 0),)


@pytest.mark.parametrize(("numbers", "text"), [((), ""), ((3,), "3"), ((0, 1, 2, 5, 7, 8), "0-2,5,7-8")])
def test_numbers_are_listed_as_the_kernel_does(numbers: tuple[int, ...], text: str) -> None:
    assert numbers_text(numbers) == text


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux binds memory to a node")
def test_a_thread_is_bound_and_others_are_not() -> None:
    nodes = [node for node in read_nodes() if node.can_serve]
    if not nodes:
        pytest.skip("this kernel describes no NUMA nodes")
    seen: list[object] = []

    def bind() -> None:
        seen.append(bind_to_node(nodes[0]))
        seen.append(bound_nodes())
        inner = threading.Thread(target=lambda: seen.append(bound_nodes()))
        inner.start()
        inner.join()

    thread = threading.Thread(target=bind)
    thread.start()
    thread.join()
    if seen[0] is False:
        pytest.skip("this container does not let a process bind memory")
    assert seen == [True, {nodes[0].number}, {nodes[0].number}]
    assert bound_nodes() == frozenset()


def test_of_more_nodes_than_the_engine_has_devices_the_first_ones_get_a_worker() -> None:
    assert MAX_NODES == MAX_ENTRIES
    nodes = [NumaNode(number, frozenset({number}), GIB) for number in range(18)]
    assert [node.number for node in serving_nodes(nodes)] == list(range(MAX_NODES))
    assert numa_sentence(nodes).endswith(
        "llama.cpp uses at most 15 devices at a time, so no RPC worker is started for the NUMA nodes 15-17."
    )
    assert left_nodes_sentence(nodes[:MAX_NODES]) == ""
