"""The default number of threads: one for each fast core, within the affinity and the cgroup quotas of this process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from engine.base.processor import (
    Processor,
    core_cpus,
    default_threads,
    quota_cores,
    read_processor,
    usable_processors,
)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def quota(folder: Path, own: str) -> int | None:
    write(folder / "own", own)
    return quota_cores(folder / "cgroup", folder / "own")


def machine(folder: Path, siblings: dict[int, str], **files: str) -> Processor:
    """A machine with these thread siblings and further files under /sys/devices (with __ for a slash)."""
    for number, text in siblings.items():
        write(folder / f"system/cpu/cpu{number}/topology/thread_siblings_list", f"{text}\n")
    for name, text in files.items():
        write(folder / name.replace("__", "/"), f"{text}\n")
    return read_processor(frozenset(siblings), folder, folder / "no cgroup", folder / "none")


def test_threads_are_at_least_one_and_at_most_the_processors() -> None:
    assert 1 <= default_threads() <= (os.cpu_count() or 1)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="affinity can be set on Linux only")
def test_threads_follow_the_affinity() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert read_processor(usable_processors()).threads == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_two_threads_of_one_core_count_once(tmp_path: Path) -> None:
    assert machine(tmp_path, {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}) == Processor(2, 2)


def test_cores_that_save_power_are_left_out_on_x86(tmp_path: Path) -> None:
    siblings = {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3", 4: "4", 5: "5", 6: "6", 7: "7"}
    found = machine(tmp_path, siblings, cpu_core__cpus="0-3", cpu_atom__cpus="4-7")
    assert found == Processor(cores=6, performance_cores=2)
    assert found.threads == 2


def test_cores_that_save_power_are_left_out_on_arm(tmp_path: Path) -> None:
    capacities = {f"system__cpu__cpu{n}__cpu_capacity": str(c) for n, c in enumerate((1024, 900, 900, 350, 350))}
    assert machine(tmp_path, {n: str(n) for n in range(5)}, **capacities) == Processor(cores=5, performance_cores=3)


def test_a_process_kept_to_slow_cores_uses_them(tmp_path: Path) -> None:
    assert machine(tmp_path, {4: "4", 5: "5"}, cpu_atom__cpus="4-7").threads == 2


def test_a_machine_that_tells_nothing_counts_processors(tmp_path: Path) -> None:
    assert read_processor(frozenset(range(6)), tmp_path, tmp_path, tmp_path / "none") == Processor(6, 6)


@pytest.mark.parametrize(("quota_cores", "threads"), [(None, 8), (3, 3), (12, 8)])
def test_a_quota_limits_threads(quota_cores: int | None, threads: int) -> None:
    assert Processor(12, 8, quota_cores).threads == threads


def test_the_tightest_quota_above_counts_and_is_rounded_up(tmp_path: Path) -> None:
    write(tmp_path / "cgroup/user.slice/cpu.max", "150000 100000\n")
    write(tmp_path / "cgroup/user.slice/app.scope/cpu.max", "800000 100000\n")
    assert quota(tmp_path, "0::/user.slice/app.scope\n") == 2


def test_a_container_sees_its_quota_at_the_root(tmp_path: Path) -> None:
    write(tmp_path / "cgroup/cpu.max", "50000 100000\n")
    assert quota(tmp_path, "0::/\n") == 1


def test_version_one(tmp_path: Path) -> None:
    write(tmp_path / "cgroup/cpu/docker/cpu.cfs_quota_us", "300000\n")
    write(tmp_path / "cgroup/cpu/docker/cpu.cfs_period_us", "100000\n")
    write(tmp_path / "cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    write(tmp_path / "cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert quota(tmp_path, "9:cpu,cpuacct:/docker\n4:memory:/docker\n") == 3


@pytest.mark.parametrize("text", ["max 100000\n", "", "nonsense", "100000 0\n"])
def test_no_quota(tmp_path: Path, text: str) -> None:
    write(tmp_path / "cgroup/cpu.max", text)
    assert quota(tmp_path, "0::/\n") is None


def test_places_are_the_fast_cores_with_their_threads(tmp_path: Path) -> None:
    siblings = {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3", 4: "4", 5: "5"}
    machine(tmp_path, siblings, cpu_atom__cpus="4-5")
    assert core_cpus(frozenset(siblings), tmp_path) == ((0, 1), (2, 3))
    assert core_cpus(frozenset({1, 2, 3}), tmp_path) == ((1,), (2, 3)), "only processors of this process"
    assert core_cpus(frozenset({4, 5}), tmp_path) == ((4,), (5,)), "efficiency cores if there are no others"
    assert core_cpus(frozenset({0, 9}), tmp_path) == (), "the cores of one are unknown"
