"""The host's memory under control groups of both versions."""

from __future__ import annotations

from pathlib import Path

import psutil

from engine.runner.host import cgroup_limits, host_device
from engine.units import GIB, MIB


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_host_is_this_machine() -> None:
    host = host_device()
    assert host.id == "CPU"
    assert host.name
    assert 0 < host.total_bytes <= psutil.virtual_memory().total
    assert host.free_bytes is not None
    assert 0 < host.free_bytes <= host.total_bytes


def test_version_2_counts_every_group_up_to_the_mount(tmp_path: Path) -> None:
    write(tmp_path / "own", "0::/user.slice/app.scope\n")
    root = tmp_path / "cgroup"
    write(root / "user.slice/app.scope/memory.max", f"{2 * GIB}\n")
    write(root / "user.slice/app.scope/memory.current", f"{GIB}\n")
    write(root / "user.slice/app.scope/memory.stat", f"anon 5\ninactive_file {256 * MIB}\n")
    write(root / "user.slice/memory.max", "max\n")
    write(root / "user.slice/memory.current", f"{3 * GIB}\n")
    write(root / "memory.max", f"{4 * GIB}\n")
    write(root / "memory.current", f"{3 * GIB}\n")
    assert list(cgroup_limits(tmp_path / "own", root)) == [(2 * GIB, GIB - 256 * MIB), (4 * GIB, 3 * GIB)]


def test_version_1(tmp_path: Path) -> None:
    write(tmp_path / "own", "9:cpu,cpuacct:/a\n4:memory:/box\n0::/\n")
    root = tmp_path / "cgroup"
    write(root / "memory/box/memory.limit_in_bytes", f"{GIB}\n")
    write(root / "memory/box/memory.usage_in_bytes", f"{600 * MIB}\n")
    write(root / "memory/box/memory.stat", f"cache 1\ntotal_inactive_file {100 * MIB}\n")
    assert list(cgroup_limits(tmp_path / "own", root)) == [(GIB, 500 * MIB)]


def test_in_a_container_the_path_may_be_another_machines(tmp_path: Path) -> None:
    write(tmp_path / "own", "0::/docker/0123\n")
    root = tmp_path / "cgroup"
    write(root / "memory.max", f"{GIB}\n")
    write(root / "memory.current", f"{MIB}\n")
    assert list(cgroup_limits(tmp_path / "own", root)) == [(GIB, MIB)]


def test_no_control_groups(tmp_path: Path) -> None:
    assert list(cgroup_limits(tmp_path / "none", tmp_path)) == []
    write(tmp_path / "odd", "nonsense\n::\n0::/../../x\n")
    assert list(cgroup_limits(tmp_path / "odd", tmp_path / "cgroup")) == []
