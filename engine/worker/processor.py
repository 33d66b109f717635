"""How many threads to compute with when nobody chose."""

from __future__ import annotations

import os
from pathlib import Path

from engine.control_groups import OWN, ROOT, ControlGroup, control_groups

_TOPOLOGY = Path("/sys/devices/system/cpu")


def default_threads() -> int:
    """Return the physical cores that this process may use (affinity, cgroup quota), at least 1."""
    cores = _physical_cores(_usable_processors())
    quota = quota_cores()
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


def quota_cores(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Return the whole cores, rounded up, of the tightest quota above this process; None without one."""
    quotas = [quota for group in control_groups("cpu", root, own) if (quota := _quota(group)) is not None]
    return min(quotas, default=None)


def _quota(group: ControlGroup) -> int | None:
    if group.version == 1:
        texts = [group.text("cpu.cfs_quota_us"), group.text("cpu.cfs_period_us")]
    else:
        texts = group.text("cpu.max").split()
    try:
        quota, period = (int(text) for text in texts)
    except ValueError:
        return None  # "max", or no such file.
    return -(-quota // period) if quota > 0 and period > 0 else None
