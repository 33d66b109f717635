"""The host's memory within cgroup limits."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from engine.devices.host_memory import read_host_memory

MIB = 1 << 20


def write_group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def read(root: Path, own_group: str) -> tuple[int, int]:
    own = root / "self"
    own.write_text(own_group)
    memory = read_host_memory(root / "cgroup", own)
    return memory.total_bytes, memory.free_bytes


def test_without_groups_it_is_the_machine(tmp_path: Path) -> None:
    memory = read_host_memory(tmp_path / "none", tmp_path / "none")

    assert memory.total_bytes == psutil.virtual_memory().total
    assert 0 < memory.free_bytes <= memory.total_bytes
    assert memory.used_bytes == memory.total_bytes - memory.free_bytes


def test_page_cache_that_can_go_is_free(tmp_path: Path) -> None:
    write_group(
        tmp_path / "cgroup" / "box",
        memory__max=str(64 * MIB),
        memory__current=str(40 * MIB),
        memory__stat=f"anon 1\ninactive_file {30 * MIB}\nactive_file 5",
    )

    assert read(tmp_path, "0::/box\n") == (64 * MIB, 54 * MIB)


def test_the_tightest_group_above_counts(tmp_path: Path) -> None:
    write_group(tmp_path / "cgroup" / "outer", memory__max=str(32 * MIB), memory__current=str(31 * MIB))
    write_group(tmp_path / "cgroup" / "outer" / "inner", memory__max=str(64 * MIB), memory__current=str(MIB))

    assert read(tmp_path, "0::/outer/inner\n") == (32 * MIB, MIB)


def test_more_used_than_allowed_is_nothing_free(tmp_path: Path) -> None:
    write_group(tmp_path / "cgroup", memory__max=str(8 * MIB), memory__current=str(9 * MIB))

    assert read(tmp_path, "0::/\n") == (8 * MIB, 0)


@pytest.mark.parametrize("limit", ["max", str(1 << 62), "garbage", ""])
def test_no_limit_is_the_machine(tmp_path: Path, limit: str) -> None:
    write_group(tmp_path / "cgroup", memory__max=limit, memory__current="1")

    assert read(tmp_path, "0::/\n")[0] == psutil.virtual_memory().total


def test_version_one(tmp_path: Path) -> None:
    write_group(
        tmp_path / "cgroup" / "memory" / "docker",
        memory__limit_in_bytes=str(128 * MIB),
        memory__usage_in_bytes=str(28 * MIB),
        memory__stat=f"total_inactive_file {8 * MIB}",
    )

    assert read(tmp_path, "9:cpu,cpuacct:/docker\n4:memory:/docker\n") == (128 * MIB, 108 * MIB)


def test_a_group_of_another_machine_is_looked_up_at_the_top(tmp_path: Path) -> None:
    write_group(tmp_path / "cgroup", memory__max=str(16 * MIB), memory__current=str(MIB))

    assert read(tmp_path, "0::/docker/0123\n") == (16 * MIB, 15 * MIB)


def test_both_versions_at_once(tmp_path: Path) -> None:
    write_group(tmp_path / "cgroup/unified/box", memory__max=str(16 * MIB), memory__current=str(MIB))

    assert read(tmp_path, "4:memory:/none\n0::/box\n") == (16 * MIB, 15 * MIB)


def test_a_group_seen_from_outside_is_looked_up_at_the_top(tmp_path: Path) -> None:
    write_group(tmp_path / "cgroup", memory__max=str(16 * MIB), memory__current=str(MIB))

    assert read(tmp_path, "0::/../../elsewhere\n") == (16 * MIB, 15 * MIB)
