"""How many threads to compute with when nobody chose."""

from __future__ import annotations

import os
from pathlib import Path

_TOPOLOGY = Path("/sys/devices/system/cpu")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def default_threads() -> int:
    """Return the physical cores that this process may use (affinity, cgroup quota), at least 1."""
    cores = _physical_cores(_usable_processors())
    quota = _quota_cores()
    return max(1, cores if quota is None else min(cores, quota))


def _usable_processors() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _physical_cores(processors: set[int]) -> int:
    """Count processors that share a core once, where the system tells."""
    cores = set()
    for processor in processors:
        siblings = _TOPOLOGY / f"cpu{processor}" / "topology" / "thread_siblings_list"
        try:
            cores.add(siblings.read_text(encoding="ascii").strip())
        except OSError:
            cores.add(str(processor))
    return len(cores)


def _quota_cores() -> int | None:
    """Return whole cores of the cgroup's quota, rounded up; None without one."""
    try:
        quota, period = _QUOTA.read_text(encoding="ascii").split()
        return -(-int(quota) // int(period))
    except (OSError, ValueError):
        return None
