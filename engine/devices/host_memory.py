"""The memory that this process may use: the machine's, or less where a control group limits it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from engine.base.control_groups import OWN, ROOT, ControlGroup, control_groups

_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
"""By version: limit, usage, and the line of memory.stat with page cache that goes away under pressure."""
_UNLIMITED_BYTES = 1 << 60
"""Version 1 says "no limit" with a number near 2**63."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """`free_bytes` is what can be had without swapping: free and reclaimable."""

    total_bytes: int
    free_bytes: int

    @property
    def used_bytes(self) -> int:
        return self.total_bytes - self.free_bytes


def read_host_memory(cgroup_root: Path = ROOT, own_cgroup: Path = OWN) -> HostMemory:
    """Return the memory of this machine, within the tightest control group above this process."""
    machine = psutil.virtual_memory()
    total_bytes, free_bytes = int(machine.total), int(machine.available)
    for group in control_groups("memory", cgroup_root, own_cgroup):
        limits = _limits(group)
        if limits is not None:
            limit_bytes, used_bytes = limits
            total_bytes = min(total_bytes, limit_bytes)
            free_bytes = min(free_bytes, max(limit_bytes - used_bytes, 0))
    return HostMemory(total_bytes, min(free_bytes, total_bytes))


def _limits(group: ControlGroup) -> tuple[int, int] | None:
    """Return (limit, committed) in bytes, None for a group without a limit."""
    limit_name, usage_name, cache_line = _FILES[group.version]
    limit_bytes, usage_bytes = group.number(limit_name), group.number(usage_name)
    if limit_bytes is None or usage_bytes is None or limit_bytes >= _UNLIMITED_BYTES:
        return None
    return limit_bytes, max(usage_bytes - _statistic(group, cache_line), 0)


def _statistic(group: ControlGroup, name: str) -> int:
    for line in group.text("memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdecimal():
            return int(value)
    return 0
