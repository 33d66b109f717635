"""The host as a device: the processor's name, and the memory that this process may really use."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

from engine.devices.device import Device, make_host
from engine.devices.host_memory import read_host_memory

_PROCESSORS = Path("/proc/cpuinfo")
_COMMAND_TIMEOUT_S = 2.0


def host_device() -> Device:
    """Return the host with its memory as of now, limits of control groups included. Quick; starts no child on Linux."""
    memory = read_host_memory()
    return make_host(processor_name(), memory.total_bytes, memory.free_bytes)


def processor_name() -> str:
    """Return the processor's name for people."""
    if sys.platform.startswith("linux"):
        for line in _processor_lines():
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


def _processor_lines() -> list[str]:
    try:
        return _PROCESSORS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
