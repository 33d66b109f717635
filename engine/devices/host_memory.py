"""Memory of the host that this process may use: all of it, or less if a control group limits it."""

from __future__ import annotations

from pathlib import Path

import psutil
from msgspec import Struct

from engine.base.control_groups import OWN, ROOT, ControlGroup, control_groups

_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
"""Names of control files, by version of control groups.

Each entry has the file of the memory limit, the file of the used memory, and the key of the reclaimable page cache in
`memory.stat`.
"""
_UNLIMITED_BYTES = 1 << 60
"""Limits of at least this many bytes mean "no limit": version 1 of control groups then reports a number near 2**63."""


class HostMemory(Struct, frozen=True):
    """Memory of the host. `free_bytes`: available without swapping, reclaimable page cache included."""

    total_bytes: int
    free_bytes: int

    @property
    def used_bytes(self) -> int:
        return self.total_bytes - self.free_bytes


def read_host_memory(cgroup_root: Path = ROOT, own_cgroup: Path = OWN) -> HostMemory:
    """Return the host's memory, within the tightest limit of this process's control groups."""
    machine = psutil.virtual_memory()
    total_bytes, free_bytes = int(machine.total), int(machine.available)
    # Every group above counts: a container may have a limit, and the slice around it a tighter one.
    for group in control_groups("memory", cgroup_root, own_cgroup):
        limits = _limits(group)
        if limits is not None:
            limit_bytes, used_bytes = limits
            total_bytes = min(total_bytes, limit_bytes)
            free_bytes = min(free_bytes, max(limit_bytes - used_bytes, 0))
    return HostMemory(total_bytes, min(free_bytes, total_bytes))


def read_free_swap() -> int:
    """Return the free swap space in bytes, within the limits of this process's control groups (version 2)."""
    free_bytes = int(psutil.swap_memory().free)
    for group in control_groups("memory", ROOT, OWN):
        limit_bytes, used_bytes = group.number("memory.swap.max"), group.number("memory.swap.current")
        if limit_bytes is not None and used_bytes is not None:
            free_bytes = min(free_bytes, max(limit_bytes - used_bytes, 0))
    return free_bytes


def _limits(group: ControlGroup) -> tuple[int, int] | None:
    """Return the limit of a control group and its used bytes without reclaimable cache; None if there is no limit."""
    limit_name, usage_name, cache_line = _FILES[group.version]
    limit_bytes, usage_bytes = group.number(limit_name), group.number(usage_name)
    if limit_bytes is None or usage_bytes is None or limit_bytes >= _UNLIMITED_BYTES:
        return None
    # Inactive page cache counts as usage, but the kernel reclaims it before it refuses memory.
    return limit_bytes, max(usage_bytes - _statistic(group, cache_line), 0)


def _statistic(group: ControlGroup, name: str) -> int:
    for line in group.text("memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdecimal():
            return int(value)
    return 0
