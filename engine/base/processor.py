"""The CPU cores that this process may use, given its CPU affinity and control groups."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys
from functools import cache
from pathlib import Path

from msgspec import Struct

from engine.base.control_groups import OWN, ROOT, ControlGroup, control_groups, kernel_text

DEVICES = Path("/sys/devices")
_MAX_DIGITS = 5
_MAX_NUMBERS = 8192
"""Largest number of processors in a parsed list: Linux supports no more.

The limit is needed because a faulty text may contain a range of any length.
"""
_FULL_SPEED_SHARE = 0.5
"""Share of the fastest core's capacity below which a core counts as an efficiency core."""


class Processor(Struct, frozen=True):
    """The physical cores that this process may run on. Two hardware threads of one core count once.

    `cores`: number of cores.
    `performance_cores`: number of cores that are not efficiency cores; equal to `cores` if all are efficiency cores.
    `quota_cores`: CPU limit of a control group in whole cores, rounded up; None: no limit.
    """

    cores: int
    performance_cores: int
    quota_cores: int | None = None

    @property
    def threads(self) -> int:
        """The number of threads that makes computations fastest: one per performance core, limited by the quota."""
        return max(1, min(self.performance_cores, self.quota_cores or self.performance_cores))


@cache
def own_processor() -> Processor:
    """Return the CPU cores that this process may use. The result of the first call is cached."""
    if sys.platform == "darwin":
        return _from_sysctl()
    return read_processor(usable_processors())


def default_threads() -> int:
    """Return the default number of CPU threads for a computation: one per performance core, at most the CPU quota."""
    return own_processor().threads


def usable_processors() -> frozenset[int]:
    """Return the numbers of the logical processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def core_cpus(usable: frozenset[int] | None = None, devices: Path = DEVICES) -> tuple[tuple[int, ...], ...]:
    """Return the logical processors of each physical core that is not an efficiency core, sorted.

    If this process may use efficiency cores only, those are returned. The result is empty if the system does not report
    which processors share a core.

    `usable`: logical processors of this process; None: query the system.
    `devices`: folder in which Linux describes devices and processors.
    """
    usable = usable_processors() if usable is None else usable
    cores: set[tuple[int, ...]] = set()
    # A process that may use efficiency cores only has to compute with those.
    for processor in usable - _power_saving(usable, devices) or usable:
        siblings = parse_list(kernel_text(devices / f"system/cpu/cpu{processor}/topology/thread_siblings_list"))
        if not siblings:
            return ()
        cores.add(tuple(sorted(siblings & usable)))
    return tuple(sorted(cores))


def read_processor(
    usable: frozenset[int], devices: Path = DEVICES, cgroup_root: Path = ROOT, own_cgroup: Path = OWN
) -> Processor:
    """Return the cores to which the `usable` logical processors belong.

    If the system does not describe a processor, it counts as a core of its own and not as an efficiency core.
    `devices`: folder in which Linux describes devices and processors.
    `cgroup_root`: folder of the control groups. `own_cgroup`: file that lists the groups of this process.
    """
    saving = usable & _power_saving(usable, devices)
    return Processor(
        cores=_count_cores(usable, devices),
        # A processor may consist of efficiency cores alone.
        performance_cores=_count_cores(usable - saving or usable, devices),
        quota_cores=quota_cores(cgroup_root, own_cgroup),
    )


def quota_cores(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Return the smallest CPU quota of this process's control groups, in whole cores, rounded up; None: no quota.

    `root`: folder of the control groups. `own`: file that lists the groups of this process.
    """
    quotas = [quota for group in control_groups("cpu", root, own) if (quota := _quota(group)) is not None]
    return min(quotas, default=None)


def _count_cores(processors: frozenset[int], devices: Path) -> int:
    """Return the number of physical cores of these logical processors.

    A processor without information about its core counts as a core of its own.
    """
    cores = set()
    for processor in processors:
        siblings = kernel_text(devices / f"system/cpu/cpu{processor}/topology/thread_siblings_list")
        cores.add(siblings or str(processor))
    return max(1, len(cores))


def _power_saving(usable: frozenset[int], devices: Path) -> frozenset[int]:
    """Return the logical processors that are efficiency cores.

    On x86, Linux lists them as a separate PMU (`cpu_atom`); on ARM, each core has a capacity.
    """
    listed = parse_list(kernel_text(devices / "cpu_atom/cpus"))
    if listed:
        return listed
    capacities: dict[int, int] = {}
    for processor in usable:
        text = kernel_text(devices / f"system/cpu/cpu{processor}/cpu_capacity")
        if text.isdecimal():
            capacities[processor] = int(text)
    fastest = max(capacities.values(), default=0)
    return frozenset(each for each, capacity in capacities.items() if capacity < fastest * _FULL_SPEED_SHARE)


def parse_list(text: str) -> frozenset[int]:
    """Return the numbers in a list of the kernel such as `0-7,16`; empty if the text has another form or more numbers
    than Linux has processors.
    """
    found: set[int] = set()
    n_left = _MAX_NUMBERS
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if not all(number.isdecimal() and len(number) <= _MAX_DIGITS for number in (first, last or first)):
            return frozenset()
        numbers = range(int(first), int(last or first) + 1)
        # Counted with repetitions, since each costs time.
        n_left -= max(1, len(numbers))
        if n_left < 0:
            return frozenset()
        found.update(numbers)
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
    """Return the cores that macOS reports by sysctl; performance level 0 is the fastest."""
    logical = os.cpu_count() or 1
    cores = _sysctl_number("hw.physicalcpu") or logical
    return Processor(cores=cores, performance_cores=_sysctl_number("hw.perflevel0.physicalcpu") or cores)


def _sysctl_number(name: str) -> int | None:
    library = ctypes.CDLL(ctypes.util.find_library("c"))
    value = ctypes.c_int32()
    size = ctypes.c_size_t(ctypes.sizeof(value))
    failed = library.sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    return None if failed or value.value < 1 else value.value
