"""Rights that a child gives up before it opens untrusted files, by its first request, and the cap on its memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from engine.base.confinement import (
    NO_NETWORK,
    Ports,
    code_folders,
    confine,
    device_folders,
    make_driver_caches,
    system_folders,
)
from engine.runtime.child.native.bindings import Bindings
from engine.runtime.protocol.messages import (
    AnyRequest,
    CountVocabulary,
    DeviceRef,
    FileAccess,
    ListDevices,
    Load,
    Probe,
    Serve,
)


def data_bytes() -> int:
    """Return VmData, which RLIMIT_DATA limits; 0 if the system does not report it."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    line = next((line for line in status.splitlines() if line.startswith("VmData:")), "VmData: 0 kB")
    return int(line.split()[1]) * 1024


def limit_data(limit_bytes: int) -> bool:
    """Limit private memory with RLIMIT_DATA for the rest of the process; return False if the system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    import resource

    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    return True


DISCOVERY_BYTES = 4 << 30
"""Memory limit of device discovery, for the drivers of many cards. The list itself takes some kilobytes."""
VOCABULARY_BYTES = 4 << 30
"""Memory limit of a child that reads a vocabulary. One of 260,000 tokens takes some hundred MiB."""
PROBE_BYTES = 16 << 30
"""Memory limit of a probe. It allocates the vocabulary, recurrent state, the output buffer, and contexts of drivers."""


def give_up_rights(engine: Bindings, request: AnyRequest) -> None:
    """Limit this process to what `request` needs. This cannot be undone."""
    # Drivers first: they need files and programs that a confined process cannot use.
    if isinstance(request, (ListDevices, Probe, Load, Serve)):
        _open_drivers(engine)
    match request:
        case ListDevices():
            _limit_memory(DISCOVERY_BYTES)
            _confine((), (), _ports([request.routes.get(each, each) for each in request.endpoints]))
        case Probe():
            _limit_memory(PROBE_BYTES)
            _limit_files(request.access, request.devices)
        case CountVocabulary():
            _limit_memory(VOCABULARY_BYTES)
            # It renders chat templates as a loaded model does.
            _limit_files(request.access, (), starts_programs=True)
        case Load():
            # The chat template is rendered by a child of this one.
            _limit_files(request.access, request.devices, starts_programs=True)
        case Serve():
            kept = () if request.kept_weights is None else (request.kept_weights,)
            # Any port: if one cannot be used, a further request names another.
            _confine((), kept, Ports(listen=None))


@cache
def _open_drivers(engine: Bindings) -> None:
    """Open the drivers of all devices, and make their cache folders.

    After the start of the machine NVIDIA's driver makes its device files with a set-uid program (`nvidia-modprobe`),
    which a confined process cannot start.
    """
    backends = {engine.registry_name(engine.device_registry(device)) for device in engine.devices()}
    make_driver_caches(backends)


def _limit_files(access: FileAccess | None, devices: Sequence[DeviceRef], *, starts_programs: bool = False) -> None:
    if access is not None:
        addresses = [device.endpoint if device.address is None else device.address for device in devices]
        ports = _ports([each for each in addresses if each])
        _confine(access.readable, access.writable, ports, starts_programs=starts_programs)


def _ports(endpoints: Sequence[str]) -> Ports:
    """Return the ports of RPC servers, which are all that the child connects to."""
    # `host:port`, checked before they were greeted.
    return Ports(connect=tuple(sorted({int(each.rpartition(":")[2]) for each in endpoints if each})))


@cache
def _confine(
    readable: Sequence[str], writable: Sequence[str], ports: Ports = NO_NETWORK, *, starts_programs: bool = False
) -> None:
    """Give up access to all other files and ports. Further calls can only give up more."""
    confine(
        readable=(*code_folders(), *system_folders(), *map(Path, readable)),
        writable=(*device_folders(), *map(Path, writable)),
        ports=ports,
        starts_programs=starts_programs,
    )


@cache
def _limit_memory(further_bytes: int) -> None:
    """Limit private memory to the present use plus `further_bytes`, or plus half of the machine's memory if less."""
    if hasattr(os, "sysconf") and (baseline_bytes := data_bytes()):
        physical_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limit_data(baseline_bytes + min(further_bytes, physical_bytes // 2))
