"""Discovery of the devices of this machine and of RPC endpoints.

A short-lived child process lists the devices, because the engine may abort or allocate device memory in doing so. The
host's memory is read in this process. `find_devices` adds margins, drivers and the results of earlier self-tests.
"""

from __future__ import annotations

import itertools
import logging
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct

from engine.base.cancellation import CancelToken
from engine.base.errors import ArgumentError, BusyError, EngineError, UnreachableError
from engine.base.language import tr
from engine.base.numa import read_nodes
from engine.base.pci import parse_pci_name
from engine.base.texts import clean
from engine.base.units import MIB
from engine.base.values import replace
from engine.devices.device import BufferFacts, Capabilities, Device, Rig, make_host, remote_margin_bytes
from engine.devices.endpoint import Greeting, GreetingStatus, greet_all, parse_endpoint
from engine.devices.hiding_variables import find_hiding
from engine.devices.host_memory import read_free_swap, read_host_memory
from engine.devices.telemetry.cards import read_card_facts, read_drivers, with_display_margins
from engine.machines.rigs.check_results import read_check_results
from engine.machines.rigs.cuda_cards import list_all_devices
from engine.machines.rigs.self_test import read_verdicts, with_verdicts
from engine.runtime.process.blocking_child import (
    DEFAULT_TIMEOUT_S,
    error_with_endpoints,
    raise_if_cancelled,
    request_child,
)
from engine.runtime.protocol.messages import DeviceList, GgmlDevice
from engine.runtime.protocol.requests import ListDevices

_PROCESSORS = Path("/proc/cpuinfo")
_COMMAND_TIMEOUT_S = 2.0

_log = logging.getLogger("layerdeck.devices")


def host_device() -> Device:
    """Return the host (CPU) as a device with its current memory, limited by control groups.

    Fast; starts no child process on Linux.
    """
    memory = read_host_memory()
    return make_host(
        processor_name(), memory.total_bytes, memory.free_bytes, nodes=read_nodes(), swap_bytes=read_free_swap()
    )


def processor_name() -> str:
    """Return the model name of the processor, such as "AMD Ryzen 9 7950X"; "CPU" if it is unknown."""
    # Kernels for ARM write no "model name"; then `platform` answers below.
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


class Peer(Struct, frozen=True):
    """A paired machine whose devices can be reached through a tunnel.

    `endpoint`: address (host:port) of its listener.
    `fingerprint`: fingerprint of its certificate.
    `name`: name of the machine in this computer's pairings.
    `via`: local address (host:port) of the tunnel to it.
    """

    endpoint: str
    fingerprint: str
    name: str
    via: str


def find_devices(verdicts: Path, rpc_endpoints: Sequence[str] = (), *, checks: Path | None = None) -> Rig:
    """Return this machine's devices and those of RPC endpoints, with default margins and stored test results.

    Blocks for seconds.

    `verdicts`: file with the results of testing whether a device may be used several times in one layout.
    `checks`: file with the results of the engine's self-check, None to ignore them.

    Raises:
        ArgumentError: if one of `rpc_endpoints` is not an address host:port, or is listed twice.
        EngineError: if an endpoint does not answer or is busy, or if the child failed.
    """
    rig = discover(rpc_endpoints)
    rig = with_display_margins(rig, read_card_facts(rig.devices))
    rig = with_verdicts(rig, read_verdicts(verdicts))
    return rig if checks is None else read_check_results(checks).apply(rig, read_drivers(rig.devices))


def find_workers(endpoint: str, checks: Path) -> tuple[Device, ...]:
    """Return the devices of the RPC worker at `endpoint` (host:port), with the self-check results in the file `checks`.

    Blocks for seconds.

    Raises:
        ArgumentError: if `endpoint` is not an address host:port.
        EngineError: if the worker does not answer or is busy, or if the child failed.
    """
    return _workers(discover((endpoint,)), checks)


def find_peer(peer: Peer, checks: Path) -> tuple[Device, ...]:
    """Return the devices that a paired machine lends, with their self-check results from the file `checks`.

    The machine is reached through the tunnel of `peer`. Blocks for seconds.

    Raises:
        EngineError: if the machine does not answer or is busy, or if the child failed.
    """
    rig = discover((peer.endpoint,), routes={peer.endpoint: peer.via})
    return tuple(_secured(device, peer) for device in _workers(rig, checks))


def _workers(rig: Rig, checks: Path) -> tuple[Device, ...]:
    book = read_check_results(checks)
    return tuple(book.judged(device) for device in rig.devices if device.is_rpc)


def _secured(device: Device, peer: Peer) -> Device:
    name = peer.name if device.endpoint_device == 0 else f"{peer.name} device {device.endpoint_device}"
    return replace(device, name=name, fingerprint=peer.fingerprint, via=peer.via)


DEFAULT_GPU_MARGIN_BYTES = 512 * MIB
"""Default margin of a GPU: memory kept free for other programs and the desktop, which forecasts do not include."""

LESSER_BACKENDS = frozenset({"Vulkan", "OpenCL"})
"""Backends for GPUs of several vendors. The vendor's own backend computes faster on the same card."""

MAX_NAMED = 5
"""Largest number of further endpoints that an error names. The first endpoint that failed has a sentence of its own."""

ENDPOINTS_TIMEOUT_S = 8.0
"""Time-out of a discovery with RPC endpoints. Together with the 2 s for the greeting it takes at most 10 s."""


def discover(
    rpc_endpoints: Sequence[str] = (),
    *,
    routes: Mapping[str, str] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    argv: Sequence[str] | None = None,
    cancel: CancelToken | None = None,
) -> Rig:
    """Return the rig: the GPUs of this machine, the devices of RPC workers, and the host (CPU and its memory).

    The GPUs have ggml's names. The devices of RPC workers are called RPC0, RPC1 and so on. A child process lists the
    devices.

    Without RPC workers, the call takes at most `timeout_s` seconds. With RPC workers, it takes at most 10 s: 2 s in
    which all workers must answer a first message, then `ENDPOINTS_TIMEOUT_S` for the list. If CUDA fails on a card, the
    call takes longer, because more child processes are started.

    `rpc_endpoints`: addresses (host:port) of RPC workers, called endpoints.
    `routes`: local address of the tunnel to an endpoint, by endpoint.
    `argv`: command of the child process; None: the default command.

    Raises:
        ArgumentError: if one of `rpc_endpoints` is not an address host:port, or is listed twice.
        UnreachableError: if an endpoint does not answer as expected; `BusyError` if it serves another client.
        EngineError: if the child failed.
    """
    routes = routes or {}
    endpoints = _endpoints(rpc_endpoints, routes)
    for hiding in find_hiding():
        _log.info("%s", hiding.sentence)
    # Before the engine connects: its client aborts the child if a server does not answer as expected.
    greetings = greet_all(endpoints, routes=routes, cancel=cancel)
    raise_if_cancelled(cancel)
    _check([greeting for greeting in greetings.values() if not greeting.ok])
    request = ListDevices(endpoints=endpoints, routes=dict(routes))
    # Endpoints have answered a moment ago; one that falls silent now must not take the whole time-out.
    if endpoints:
        timeout_s = min(timeout_s, ENDPOINTS_TIMEOUT_S)
    ask = partial(_ask_devices, timeout_s=timeout_s, argv=argv, cancel=cancel)
    try:
        found = list_all_devices(ask, request)
    except EngineError as error:
        raise error_with_endpoints(error, endpoints, routes) from None
    return Rig(devices_of(found), host_device())


def list_local_devices(*, cancel: CancelToken | None = None) -> tuple[GgmlDevice, ...]:
    """Return this machine's devices as ggml lists them, with their current free memory.

    Raises:
        EngineError: the child process failed, or was cancelled by `cancel`.
    """
    ask = partial(_ask_devices, timeout_s=DEFAULT_TIMEOUT_S, argv=None, cancel=cancel)
    return list_all_devices(ask, ListDevices())


def _ask_devices(
    request: ListDevices,
    environment: Mapping[str, str],
    *,
    timeout_s: float,
    argv: Sequence[str] | None,
    cancel: CancelToken | None,
) -> tuple[GgmlDevice, ...]:
    answer = request_child(
        request,
        DeviceList,
        timeout_s=timeout_s,
        argv=argv,
        cancel=cancel,
        name="discovery",
        environment=environment,
    )
    return answer.devices


def _endpoints(texts: Iterable[str], routes: Mapping[str, str]) -> tuple[str, ...]:
    """Return the endpoints in `texts` as host:port. Spaces are removed, because the engine aborts if there is one.

    `routes`: local addresses of tunnels, by endpoint. An endpoint that has a tunnel is returned unchanged.

    Raises:
        ArgumentError: if a text is not an address host:port, or an endpoint is listed twice.
    """
    endpoints: list[str] = []
    for text in texts:
        if text in routes:
            endpoints.append(text)
            continue
        try:
            host, port = parse_endpoint(text)
        except ValueError as error:
            raise ArgumentError(f"{error}.") from None
        if f"{host}:{port}" in endpoints:
            raise ArgumentError(
                tr("The RPC endpoint {host}:{port} was given twice; give each endpoint once.", host=host, port=port)
            )
        endpoints.append(f"{host}:{port}")
    return tuple(endpoints)


def _check(failed: Sequence[Greeting]) -> None:
    if not failed:
        return
    first, *others = failed
    sentence = first.sentence
    if others:
        names = ", ".join(each.endpoint for each in others[:MAX_NAMED]) + (", …" if len(others) > MAX_NAMED else "")
        sentence = tr(
            "{sentence} The same applies to {count} more workers: {names}.",
            sentence=sentence,
            count=len(others),
            names=names,
        )
    if first.status is GreetingStatus.BUSY:
        raise BusyError(sentence, endpoint=first.endpoint)
    raise UnreachableError(sentence, endpoint=first.endpoint)


def devices_of(found: Iterable[GgmlDevice]) -> tuple[Device, ...]:
    """Return the devices that ggml lists (`found`) as devices of a rig; local ones come first.

    The CPU is left out, because it becomes the host. Accelerators such as BLAS are left out, because they hold no
    layers.
    """
    # Accelerators such as BLAS report no memory of their own and compute for the CPU.
    local = [_local_device(each) for each in found if each.endpoint is None and each.kind in ("gpu", "igpu")]
    local = _by_one_backend(local)
    taken = {device.id for device in local}
    ids = (name for number in itertools.count() if (name := f"RPC{number}") not in taken)
    remote = [_remote_device(next(ids), each) for each in found if each.endpoint is not None]
    return (*local, *remote)


def _by_one_backend(devices: list[Device]) -> list[Device]:
    """Return the devices without duplicates: if several backends list a card, only its vendor's backend is kept.

    A card's memory exists once, so only one backend may use it. To use Vulkan or OpenCL, the user switches off the
    engine pack of the other backend.
    """
    placed = [(device, parse_pci_name(device.pci_bus_id or "")) for device in devices]
    better = {slot for device, slot in placed if slot is not None and device.backend not in LESSER_BACKENDS}
    return [device for device, slot in placed if slot not in better or device.backend not in LESSER_BACKENDS]


def _local_device(found: GgmlDevice) -> Device:
    known = found.total_bytes > 0
    return Device(
        id=found.name,
        name=clean(found.description or found.name),
        backend=found.backend,
        kind=found.kind,
        total_bytes=found.total_bytes,
        # More free memory than there is in all would make the use of other programs negative.
        free_bytes=min(found.free_bytes, found.total_bytes) if known else None,
        pci_bus_id=found.pci_bus_id,
        margin_bytes=DEFAULT_GPU_MARGIN_BYTES,
        buffers=BufferFacts(
            alignment_bytes=found.alignment_bytes or None,
            host_alignment_bytes=found.host_alignment_bytes or None,
            largest_tensor_bytes=found.largest_tensor_bytes or None,
            largest_buffer_bytes=found.largest_buffer_bytes or None,
            mixes_streams=found.mixes_streams,
        ),
        capabilities=Capabilities(row_split=found.row_split, tensor_split=found.tensor_split),
        # ggml says "igpu" of APUs and of CUDA devices with `cudaDevAttrIntegrated`. Metal says "gpu" of all devices.
        unified=found.kind == "igpu" or found.backend in ("Metal", "MTL"),
    )


def _remote_device(device_id: str, found: GgmlDevice) -> Device:
    device = Device(
        id=device_id,
        name=f"{found.endpoint}"
        if found.endpoint_device == 0
        else tr("{endpoint} device {endpoint_device}", endpoint=found.endpoint, endpoint_device=found.endpoint_device),
        backend="RPC",
        kind="gpu",
        total_bytes=found.total_bytes,
        free_bytes=min(found.free_bytes, found.total_bytes) if found.total_bytes else None,
        endpoint=found.endpoint,
        endpoint_device=found.endpoint_device,
        buffers=BufferFacts(alignment_bytes=found.alignment_bytes or None),
        capabilities=Capabilities(row_split=found.row_split, tensor_split=found.tensor_split),
    )
    return replace(device, margin_bytes=remote_margin_bytes(device))
