"""Drops the access rights of the child that its first request does not need.

`engine.base.confinement` has a table with the rights that each kind of child keeps.
"""

from __future__ import annotations

import ipaddress
import logging
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from engine.base.confinement import (
    DISCOVERY,
    LOAD,
    PROBE,
    QUANTISE,
    SERVE,
    SPEED,
    VOCABULARY,
    Rights,
    confine,
    early_threads,
    make_driver_caches,
)
from engine.runtime.child.native.bindings import Bindings
from engine.runtime.protocol.requests import (
    AnyRequest,
    CountVocabulary,
    DeviceRef,
    FileAccess,
    ListDevices,
    Load,
    MeasureSpeed,
    MeasureThreads,
    Probe,
    Quantise,
    Serve,
)


def data_bytes() -> int:
    """Return VmData of this process in bytes, which RLIMIT_DATA limits; 0 if the system does not report it."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    line = next((line for line in status.splitlines() if line.startswith("VmData:")), "VmData: 0 kB")
    return int(line.split()[1]) * 1024


def limit_data(limit_bytes: int) -> bool:
    """Limit the private memory of this process with RLIMIT_DATA, permanently; return False if the system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    import resource

    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    return True


_log = logging.getLogger("layerdeck.engine")
_NO_FILES = FileAccess()


def has_rights(request: AnyRequest) -> bool:
    """Return whether `request` determines the access rights of the child.

    All other requests need a loaded model. A child refuses them until a request has determined its rights.
    """
    return isinstance(
        request, ListDevices | Probe | CountVocabulary | Load | MeasureSpeed | MeasureThreads | Quantise | Serve
    )


def give_up_rights(engine: Bindings, request: AnyRequest) -> None:
    """Limit the rights of this process to those that `request` needs. This cannot be undone."""
    # Drivers first: they need files and programs that a confined process cannot use.
    if isinstance(request, ListDevices | Probe | Load | MeasureSpeed | Serve):
        _open_drivers(engine)
    match request:
        case ListDevices():
            _limit_memory(DISCOVERY.memory_bytes)
            _confine(DISCOVERY, _NO_FILES, [request.routes.get(each, each) for each in request.endpoints])
        case Probe():
            _limit_memory(request.memory_bytes)
            _confine(PROBE, request.access, _endpoints(request.devices))
        case CountVocabulary():
            _limit_memory(VOCABULARY.memory_bytes)
            # It renders chat templates as a loaded model does.
            _confine(VOCABULARY, request.access)
        case Load():
            # The chat template is rendered by a child of this one.
            _confine(LOAD, request.access, _endpoints(request.devices))
        case MeasureSpeed():
            _confine(SPEED, _NO_FILES, _endpoints((request.device,)))
        case MeasureThreads():
            _confine(SPEED, _NO_FILES)
        case Quantise():
            _confine(QUANTISE, FileAccess((request.path,), (str(Path(request.target).absolute().parent),)))
        case Serve():
            _confine(SERVE, FileAccess(writable=() if request.weight_cache is None else (request.weight_cache,)))


@cache
def _open_drivers(engine: Bindings) -> None:
    """Open the drivers of all devices, and make their cache folders.

    This must come before the confinement: on first use after a boot, NVIDIA's driver makes its device files with a
    set-uid program (`nvidia-modprobe`), which a confined process cannot start.
    """
    backends = {engine.registry_name(engine.device_registry(device)) for device in engine.devices()}
    make_driver_caches(backends)


def _endpoints(devices: Sequence[DeviceRef]) -> list[str]:
    """Return the addresses of the devices' RPC servers or of the tunnels to them. The child connects to no others."""
    addresses = (device.endpoint if device.address is None else device.address for device in devices)
    return [each for each in addresses if each]


def _confine(rights: Rights, access: FileAccess | None, endpoints: Sequence[str] = ()) -> None:
    """Drop all access rights except `rights`. Later calls can only drop more.

    `access`: files that stay accessible; None if files are not limited.
    `endpoints`: `host:port` of the RPC servers to which the process connects.
    """
    if access is not None:
        # `host:port`, checked before they were greeted.
        hosts, _, ports = zip(*(each.rpartition(":") for each in endpoints), strict=True) if endpoints else ((),) * 3
        _confine_once(rights, access, tuple(sorted({*map(int, ports)})), not all(map(_is_address, hosts)))


@cache
def _confine_once(rights: Rights, access: FileAccess, ports: Sequence[int], resolves_names: bool) -> None:
    readable, writable = map(Path, access.readable), map(Path, access.writable)
    confine(rights, readable, writable, ports, resolves_names=resolves_names)
    if names := early_threads():
        _log.info("These threads began before the confinement: %s", ", ".join(sorted(set(names))))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


@cache
def _limit_memory(further_bytes: int) -> None:
    """Limit private memory to the present use plus `further_bytes`; 0: no limit."""
    if further_bytes and (baseline_bytes := data_bytes()):
        limit_data(baseline_bytes + further_bytes)
