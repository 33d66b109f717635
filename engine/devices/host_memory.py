"""The memory that this process may use: the machine's, or less where a control group limits it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
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


def read_host_memory(cgroup_root: Path = CGROUP_ROOT, own_cgroup: Path = OWN_CGROUP) -> HostMemory:
    """Return the memory of this machine, within the tightest control group above this process."""
    machine = psutil.virtual_memory()
    return _within_groups(int(machine.total), int(machine.available), cgroup_root, own_cgroup)


def _within_groups(total_bytes: int, free_bytes: int, cgroup_root: Path, own_cgroup: Path) -> HostMemory:
    for limit_bytes, used_bytes in _limits(cgroup_root, own_cgroup):
        total_bytes = min(total_bytes, limit_bytes)
        free_bytes = min(free_bytes, max(limit_bytes - used_bytes, 0))
    return HostMemory(total_bytes, min(free_bytes, total_bytes))


def _limits(root: Path, own_cgroup: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, committed) in bytes of each limited group from ours up to the root."""
    for line in _text(own_cgroup).splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0":
            top, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        own = (top / path.lstrip("/")).resolve()
        groups = [own, *own.parents] if own.is_relative_to(top.resolve()) else []
        for group in [folder for folder in groups if folder.is_relative_to(top.resolve())] or [top]:
            limit_bytes = _number(group / names[0])
            current_bytes = _number(group / names[1])
            if limit_bytes is not None and current_bytes is not None and limit_bytes < _UNLIMITED_BYTES:
                yield limit_bytes, max(current_bytes - _stat(group / "memory.stat", names[2]), 0)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _stat(path: Path, name: str) -> int:
    """Return a line of memory.stat: page cache that goes away under pressure is not committed."""
    for line in _text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdecimal():
            return int(value)
    return 0
