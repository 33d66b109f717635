"""The processor that this process may use: its cores of full speed, within affinity and control groups."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from engine.base.control_groups import OWN, ROOT, ControlGroup, control_groups

DEVICES = Path("/sys/devices")
_FULL_SPEED_SHARE = 0.5
"""Of the fastest core's capacity: below this a core is one for saving power."""


@dataclass(frozen=True, slots=True)
class Processor:
    """Cores are physical ones that this process may run on: two threads of one core count once.

    `performance_cores` leaves out those that save power; it is `cores` where all are alike. `quota_cores` is the limit
    of a control group in whole cores, rounded up; None without one.
    """

    cores: int
    performance_cores: int
    quota_cores: int | None = None

    @property
    def threads(self) -> int:
        """What computes fastest: a thread on every full core, no more than the quota lets run at once."""
        return max(1, min(self.performance_cores, self.quota_cores or self.performance_cores))


@cache
def own_processor() -> Processor:
    """Return the processor of this machine as this process may use it, read once."""
    if sys.platform == "darwin":
        return _from_sysctl()
    return read_processor(usable_processors())


def default_threads() -> int:
    """Return how many threads to compute with when nobody chose."""
    return own_processor().threads


def usable_processors() -> frozenset[int]:
    """Return the numbers of the logical processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def read_processor(
    usable: frozenset[int], devices: Path = DEVICES, cgroup_root: Path = ROOT, own_cgroup: Path = OWN
) -> Processor:
    """Return what the system tells of the `usable` logical processors; what it does not tell counts as cores alike."""
    saving = usable & _power_saving(usable, devices)
    return Processor(
        cores=_count_cores(usable, devices),
        performance_cores=_count_cores(usable - saving or usable, devices),
        quota_cores=quota_cores(cgroup_root, own_cgroup),
    )


def quota_cores(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Return the whole cores, rounded up, of the tightest quota above this process; None without one."""
    quotas = [quota for group in control_groups("cpu", root, own) if (quota := _quota(group)) is not None]
    return min(quotas, default=None)


def _count_cores(processors: frozenset[int], devices: Path) -> int:
    """Count processors that share a core once, where the system tells."""
    cores = set()
    for processor in processors:
        siblings = _text(devices / f"system/cpu/cpu{processor}/topology/thread_siblings_list")
        cores.add(siblings or str(processor))
    return max(1, len(cores))


def _power_saving(usable: frozenset[int], devices: Path) -> frozenset[int]:
    """Return the processors that save power: x86 lists them as a unit of their own, ARM gives each a capacity."""
    listed = _parse_list(_text(devices / "cpu_atom/cpus"))
    if listed:
        return listed
    capacities: dict[int, int] = {}
    for processor in usable:
        text = _text(devices / f"system/cpu/cpu{processor}/cpu_capacity")
        if text.isdecimal():
            capacities[processor] = int(text)
    fastest = max(capacities.values(), default=0)
    return frozenset(each for each, capacity in capacities.items() if capacity < fastest * _FULL_SPEED_SHARE)


def _parse_list(text: str) -> frozenset[int]:
    """Return the numbers of a list such as `0-7,16`; empty for anything else."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            return frozenset()
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


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


def _from_sysctl() -> Processor:
    """Return the cores as macOS counts them; level 0 is that of the fastest."""
    logical = os.cpu_count() or 1
    cores = _sysctl_number("hw.physicalcpu") or logical
    return Processor(cores=cores, performance_cores=_sysctl_number("hw.perflevel0.physicalcpu") or cores)


def _sysctl_number(name: str) -> int | None:
    library = ctypes.CDLL(ctypes.util.find_library("c"))
    value = ctypes.c_int32()
    size = ctypes.c_size_t(ctypes.sizeof(value))
    failed = library.sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    return None if failed or value.value < 1 else value.value


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
