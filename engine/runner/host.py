"""The host as a device: processor name, and the memory that this process may really use."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from engine.devices.device import Device, make_host

CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_PROCESSORS = Path("/proc/cpuinfo")
_COMMAND_TIMEOUT_S = 2.0
_V2_FILES = ("memory.max", "memory.current", "inactive_file")
_V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def host_device() -> Device:
    """Return the host with its memory as of now, limits of control groups included. Quick; starts no child on Linux."""
    memory = psutil.virtual_memory()
    total_bytes, free_bytes = int(memory.total), int(memory.available)
    for limit_bytes, used_bytes in cgroup_limits():
        total_bytes = min(total_bytes, limit_bytes)
        free_bytes = min(free_bytes, max(0, limit_bytes - used_bytes))
    return make_host(processor_name(), total_bytes, min(free_bytes, total_bytes))


def cgroup_limits(own_cgroups: Path = _OWN_CGROUPS, root: Path = CGROUP_ROOT) -> Iterator[tuple[int, int]]:
    """Yield (limit, usage less reclaimable file cache) in bytes for every limited control group around this process."""
    for line in _read(own_cgroups).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield from _limits_up(root, path, _V2_FILES)
            yield from _limits_up(root / "unified", path, _V2_FILES)
        elif "memory" in controllers.split(","):
            yield from _limits_up(root / "memory", path, _V1_FILES)


def processor_name() -> str:
    """Return the processor's name for people."""
    if sys.platform.startswith("linux"):
        for line in _read(_PROCESSORS).splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    if sys.platform == "darwin":
        try:
            command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
            found = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=True)
            return found.stdout.strip() or "CPU"
        except (OSError, subprocess.SubprocessError):
            return "CPU"
    return platform.processor() or platform.machine() or "CPU"


def _limits_up(mount: Path, path: str, files: tuple[str, str, str]) -> Iterator[tuple[int, int]]:
    """Yield the limits from the group at `path` up to the mount; in a container the path may not be visible."""
    limit_name, usage_name, reclaimable_key = files
    directory = mount / path.strip("/")
    while True:
        limit_bytes, usage_bytes = _number(directory / limit_name), _number(directory / usage_name)
        if limit_bytes is not None and usage_bytes is not None:
            reclaimable_bytes = _statistic(directory / "memory.stat", reclaimable_key)
            yield limit_bytes, max(0, usage_bytes - reclaimable_bytes)
        if directory == mount or mount not in directory.parents:
            return
        directory = directory.parent


def _number(path: Path) -> int | None:
    """Return the number in a control file; None where there is none (`max`)."""
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _statistic(path: Path, key: str) -> int:
    for line in _read(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.isdigit():
            return int(value)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
