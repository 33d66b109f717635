"""Threads by default: no more than this process may use."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from engine.worker.processor import default_threads, quota_cores


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def quota(folder: Path, own: str) -> int | None:
    write(folder / "own", own)
    return quota_cores(folder / "cgroup", folder / "own")


def test_threads_are_at_least_one_and_at_most_the_processors() -> None:
    assert 1 <= default_threads() <= (os.cpu_count() or 1)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="affinity can be set on Linux only")
def test_threads_follow_the_affinity() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert default_threads() == 1
    finally:
        os.sched_setaffinity(0, allowed)


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
