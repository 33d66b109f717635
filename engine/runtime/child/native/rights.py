"""What a child gives up before it opens what strangers wrote, by its first request, and the cap on its memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from engine.base.confinement import code_folders, confine, device_folders, make_driver_caches, system_folders
from engine.runtime.child.native.bindings import Bindings
from engine.runtime.protocol.messages import AnyRequest, ListDevices, Load, Probe, Reach, Serve


def data_bytes() -> int:
    """Return VmData, what RLIMIT_DATA counts; 0 where the system does not tell."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    line = next((line for line in status.splitlines() if line.startswith("VmData:")), "VmData: 0 kB")
    return int(line.split()[1]) * 1024


def limit_data(limit_bytes: int) -> bool:
    """Have the system refuse private memory beyond `limit_bytes`, for good; False where it cannot."""
    if not sys.platform.startswith("linux"):
        return False
    import resource

    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    return True


DISCOVERY_BYTES = 4 << 30
"""For what drivers of many cards take of the host; a list of devices itself has some kilobytes."""
PROBE_BYTES = 16 << 30
"""For what a dry run really allocates: the vocabulary, recurrent state, the output buffer, and contexts of drivers."""


def give_up_rights(engine: Bindings, request: AnyRequest) -> None:
    """Limit this process to what `request` needs, the first time that one needs little. Nothing takes it back."""
    if isinstance(request, (ListDevices, Probe, Load, Serve)):
        _open_drivers(engine)
    match request:
        case ListDevices():
            _limit_memory(DISCOVERY_BYTES)
            _confine((), ())
        case Probe():
            _limit_memory(PROBE_BYTES)
            _reach(request.reach)
        case Load():
            _reach(request.reach)
        case Serve():
            _confine((), () if request.kept_weights is None else (request.kept_weights,))


@cache
def _open_drivers(engine: Bindings) -> None:
    """Open the drivers, and make what they keep.

    NVIDIA's may have to make its device files first, by a program with other rights (`nvidia-modprobe`, on a machine
    that has just been started): a confined process cannot start it.
    """
    backends = {engine.registry_name(engine.device_registry(device)) for device in engine.devices()}
    make_driver_caches(backends)


def _reach(reach: Reach | None) -> None:
    if reach is not None:
        _confine(reach.readable, reach.writable)


@cache
def _confine(readable: Sequence[str], writable: Sequence[str]) -> None:
    """Give up what is outside of these; what was given up for an earlier request stays so."""
    confine(
        readable=(*code_folders(), *system_folders(), *map(Path, readable)),
        writable=(*device_folders(), *map(Path, writable)),
    )


@cache
def _limit_memory(further_bytes: int) -> None:
    """Refuse private memory beyond `further_bytes`, or half of what the machine has where that is less."""
    if hasattr(os, "sysconf") and (baseline_bytes := data_bytes()):
        physical_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limit_data(baseline_bytes + min(further_bytes, physical_bytes // 2))
