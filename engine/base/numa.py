"""NUMA nodes of this machine: the processors and memory of each node, and binding of a process to a node.

A processor reads memory of its own node faster than memory of another node. Linux describes the nodes in
`/sys/devices/system/node` (`Documentation/admin-guide/mm/numaperf.rst`). On other systems this module finds no nodes.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec import Struct

from engine.base.control_groups import kernel_text
from engine.base.language import tr
from engine.base.processor import parse_list, usable_processors
from engine.base.units import format_bytes

NODES = Path("/sys/devices/system/node")
STATUS = Path("/proc/self/status")
_NAME = re.compile(r"node(\d{1,4})", re.ASCII)
_LINE = re.compile(r"Node \d+ ([\w()]+): +(\d+) kB", re.ASCII)
_RECLAIMABLE = ("MemFree", "Active(file)", "Inactive(file)")
"""Lines of a node's `meminfo` that add up to its free memory. Page cache counts, because the kernel can drop it."""
_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
"""System call numbers of `set_mempolicy` and `get_mempolicy`, by CPU architecture.

libnuma, which wraps these calls, is not on every system.
"""
_BIND = 2
"""Linux's memory policy MPOL_BIND: allocate memory on the given nodes only.

With MPOL_PREFERRED, memory would come from another node if the page cache fills the given one.
"""
MAX_NODES = 15
"""Largest number of nodes that get a worker: llama.cpp's device list has at most `MAX_ENTRIES` entries."""
_MASK_BITS = 1024
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


class NumaNode(Struct, frozen=True):
    """NUMA node of this machine.

    `number`: the kernel's number of the node.
    `processors`: the node's logical processors that this process may use; empty for a node with memory only.
    `total_bytes`: memory that this process may use; 0 for a node with processors only.
    `free_bytes`: free memory and page cache at the time of reading; None: not reported.
    `distances`: relative cost of accesses from this node to each online node, in the order of the nodes. The distance
    to the node itself is 10.
    """

    number: int
    processors: frozenset[int]
    total_bytes: int
    free_bytes: int | None = None
    distances: tuple[int, ...] = ()

    @property
    def can_serve(self) -> bool:
        """Whether a worker can be bound to the node. A worker needs both processors and memory."""
        return bool(self.processors) and self.total_bytes > 0


def read_nodes(
    usable: frozenset[int] | None = None, folder: Path = NODES, status: Path = STATUS
) -> tuple[NumaNode, ...]:
    """Return the online NUMA nodes in the order of their numbers; empty if the system describes no nodes.

    `usable`: logical processors that this process may use; None: query the system.
    `folder`: folder in which Linux describes the nodes. `status`: the file /proc/self/status.
    """
    usable = usable_processors() if usable is None else usable
    online = parse_list(kernel_text(folder / "online")) or _listed(folder)
    allowed = _allowed(status)
    return tuple([_node(number, folder / f"node{number}", usable, allowed) for number in sorted(online)])


def _listed(folder: Path) -> frozenset[int]:
    try:
        names = [_NAME.fullmatch(entry.name) for entry in folder.iterdir()]
    except OSError:
        return frozenset()
    return frozenset(int(name[1]) for name in names if name)


def _node(number: int, folder: Path, usable: frozenset[int], allowed: frozenset[int]) -> NumaNode:
    sizes = {name: int(kib) * 1024 for name, kib in _LINE.findall(kernel_text(folder / "meminfo"))}
    # A control group (cpuset) can forbid the memory of a node.
    total_bytes = sizes.get("MemTotal", 0) if not allowed or number in allowed else 0
    free_bytes = sum(sizes.get(name, 0) for name in _RECLAIMABLE) if "MemFree" in sizes and total_bytes else None
    return NumaNode(
        number,
        parse_list(kernel_text(folder / "cpulist")) & usable,
        total_bytes,
        None if free_bytes is None else min(free_bytes, total_bytes),
        tuple(int(each) for each in kernel_text(folder / "distance").split() if each.isdecimal()),
    )


def _allowed(status: Path) -> frozenset[int]:
    for line in kernel_text(status).splitlines():
        name, _, value = line.partition(":")
        if name == "Mems_allowed_list":
            return parse_list(value.strip())
    return frozenset()


def serving_nodes(nodes: Sequence[NumaNode]) -> tuple[NumaNode, ...]:
    """Return the nodes to which workers can be bound, at most `MAX_NODES`; empty if there are fewer than two."""
    serving = tuple(node for node in nodes if node.can_serve)
    return serving[:MAX_NODES] if len(serving) > 1 else ()


def left_nodes_sentence(nodes: Sequence[NumaNode]) -> str:
    """Return a sentence on the nodes beyond `MAX_NODES`, which get no worker; empty if there are no such nodes."""
    left = [node.number for node in nodes if node.can_serve][MAX_NODES:]
    if not left:
        return ""
    return tr(
        "llama.cpp uses at most {most} devices at a time, so no RPC worker is started for the NUMA nodes {left}.",
        most=MAX_NODES,
        left=numbers_text(left),
    )


def numbers_text(numbers: Iterable[int]) -> str:
    """Return numbers as text in the kernel's list format, such as "0-3,8"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def numa_sentence(nodes: Sequence[NumaNode]) -> str:
    """Return a sentence for users on the NUMA nodes of this machine, and whether a worker can be bound to each."""
    if not nodes:
        return tr("This system reports no NUMA nodes, so the CPU cannot be split.")
    listed = "; ".join(node_text(node) for node in nodes)
    if serving_nodes(nodes):
        sentence = tr("The CPU can be split into one device for each NUMA node: {nodes}.", nodes=listed)
        return " ".join(filter(None, (sentence, left_nodes_sentence(nodes))))
    if len(nodes) == 1:
        return tr("This computer has only one NUMA node ({nodes}), so the CPU cannot be split.", nodes=listed)
    return tr(
        "Fewer than two NUMA nodes have both processors and memory ({nodes}), so the CPU cannot be split.",
        nodes=listed,
    )


def node_text(node: NumaNode) -> str:
    """Return the number, processors and memory of a NUMA node, such as "node 0: CPUs 0-7, 64.0 GiB"."""
    processors = numbers_text(node.processors) or tr("none")
    memory = format_bytes(node.total_bytes)
    return tr("node {number}: CPUs {processors}, {memory}", number=node.number, processors=processors, memory=memory)


def bind_to_node(node: NumaNode) -> bool:
    """Bind this thread, and the threads that it starts, to a node's processors and memory.

    Return whether the memory is bound. A container may refuse to bind memory (Docker does, without CAP_SYS_NICE). Then
    a page of memory still comes from the node of the processor that first writes to it, if the node has free memory.

    Raises:
        OSError: the thread cannot be bound to the processors.
    """
    os.sched_setaffinity(0, node.processors)
    set_policy, _ = _CALLS.get(platform.machine(), (0, 0))
    if not set_policy:
        return False
    mask = (ctypes.c_ulong * (_MASK_BITS // _WORD_BITS))()
    mask[node.number // _WORD_BITS] = 1 << node.number % _WORD_BITS
    # The kernel reads one bit less than it is told (`get_nodes` in mm/mempolicy.c).
    return _call(set_policy, _BIND, mask, _MASK_BITS + 1) == 0 and bound_nodes() == {node.number}


def bound_nodes() -> frozenset[int]:
    """Return the numbers of the nodes to which this thread's memory is bound; empty if it is not bound."""
    _, get_policy = _CALLS.get(platform.machine(), (0, 0))
    if not get_policy or not sys.platform.startswith("linux"):
        return frozenset()
    mode, mask = ctypes.c_int(), (ctypes.c_ulong * (_MASK_BITS // _WORD_BITS))()
    if _call(get_policy, ctypes.byref(mode), mask, _MASK_BITS, None, 0) or mode.value != _BIND:
        return frozenset()
    return frozenset(bit for bit in range(_MASK_BITS) if mask[bit // _WORD_BITS] >> bit % _WORD_BITS & 1)


def _call(number: int, *arguments: object) -> int:
    call = ctypes.CDLL(None).syscall
    call.restype = ctypes.c_long
    return int(call(number, *arguments))
