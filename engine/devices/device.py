"""Devices, the host and rigs as plain values: the places for layers."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import msgspec

from engine.base.language import tr
from engine.base.units import MIB, format_bytes
from engine.model.gguf.model_file import FileIdentity

CPU_ID = "CPU"
"""Id of the host, which every rig has; it is always the last in lists of devices."""

DeviceKind = Literal["gpu", "igpu", "accel", "cpu"]
DEVICE_KINDS: tuple[DeviceKind, ...] = get_args(DeviceKind)

_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Abilities of the device's backend: split modes, and the same device several times in one layout."""

    row_split: bool = False
    tensor_split: bool = True
    repeatable: bool = False


Feature = Literal["extra_buffers", "flash_attention", "tensor_split", "repeated", "weights"]
FEATURES: tuple[Feature, ...] = get_args(Feature)
"""Parts of the engine that can be broken on one device while the others work there."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A feature that the engine's self-check found broken on a device, so that it is not used there.

    `of`: type of KV cache (flash attention) or of weights that is affected; empty for all.
    `reason`: a sentence.
    """

    feature: Feature
    reason: str
    of: str = ""


@dataclass(frozen=True, slots=True)
class Findings:
    """Results of the engine's self-check on a device.

    `faults`: broken features. `is_checked`: False if the device was never checked.
    """

    faults: tuple[Fault, ...] = ()
    is_checked: bool = False


@dataclass(frozen=True, slots=True)
class BufferFacts:
    """Limits that ggml reports for a device's buffers and kernels.

    `alignment_bytes`: alignment of tensors in the device's buffers; None if not reported, then the backend's usual one
    counts.
    `host_alignment_bytes`: the same for host memory that the device reads directly.
    `largest_tensor_bytes`: largest tensor that the device can compute with; None for any size.
    `largest_buffer_bytes`: largest buffer that the device allocates; None if not reported.
    `mixes_streams`: whether there is a kernel for mixing residual streams (DeepSeek 4, GLM 5); on Vulkan it needs
    subgroups of 16.
    """

    alignment_bytes: int | None = None
    host_alignment_bytes: int | None = None
    largest_tensor_bytes: int | None = None
    largest_buffer_bytes: int | None = None
    mixes_streams: bool = True


@dataclass(frozen=True, slots=True)
class RemoteFacts:
    """What a paired machine tells of a device that it lends; within bounds, but not verified.

    `backend`: backend that computes behind the RPC server; empty if unknown.
    `overhead_bytes`: what loads of that machine took beyond the engine's buffers; None if never measured.
    `read_bytes_per_second`, `by_type`, `op_s`, `products`: speeds that it measured, as of `KeptDevice`; None or empty
    if it did not. The mappings are pairs of type and speed.
    """

    backend: str = ""
    overhead_bytes: int | None = None
    read_bytes_per_second: float | None = None
    by_type: tuple[tuple[str, float], ...] = ()
    op_s: float | None = None
    products: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Holding:
    """Memory that a loaded model of ours holds on a device. `model`: its display name, which need not be unique."""

    model: str
    size_bytes: int
    key: FileIdentity


def device_key(device: Device) -> str:
    """Return the key of a device, which stays the same from run to run."""
    place = device.pci_bus_id or (f"{device.endpoint}/{device.endpoint_device}" if device.endpoint else device.id)
    return f"{device.backend} {place.lower()}"


class ComputingNeed(msgspec.Struct, frozen=True):
    """What a model was found to need on a device beyond its buffers, when it ran out of memory while it computed.

    The engine's pools and workspaces do not depend on how many layers the device has, but on what is computed.

    `device`, `model`: keys of the device and the model.
    `n_ctx`, `n_ubatch`: settings of the load; with less of either the need is not known.
    `flash_attention`: whether it was on or left open. `types`: types of the K and V cache.
    `overhead_bytes`: least bytes beyond weights, state and buffers.
    """

    device: str
    model: str
    n_ctx: int
    n_ubatch: int
    flash_attention: bool
    types: tuple[str, str]
    overhead_bytes: int

    def is_like(self, other: ComputingNeed) -> bool:
        """Whether both are about the same device, model, flash attention and cache types."""
        return self._subject == other._subject

    def covers(self, asked: ComputingNeed) -> bool:
        """Whether what is asked about needs at least as much."""
        return self.is_like(asked) and asked.n_ctx >= self.n_ctx and asked.n_ubatch >= self.n_ubatch

    @property
    def _subject(self) -> tuple[object, ...]:
        return self.device, self.model, self.flash_attention, self.types


@dataclass(frozen=True, slots=True)
class Device:
    """One place for layers: a card, an RPC device, or the host.

    `free_bytes`: free memory as last read; None if unknown, then planning uses the total.
    `cap_bytes`: upper limit for planning; None for none. `margin_bytes`: memory that stays free.
    `overhead_bytes`: measured memory that a load takes in addition to the engine's buffers; None if never measured.
    `holdings`: memory of our other models that stay loaded; it is not part of `free_bytes`.
    `fingerprint`: of the certificate of the paired machine at `endpoint`, which is reached only through a tunnel.
    `via`: local address (host:port) of that tunnel; None while there is none.
    `computing`: what models were found to need here beyond their forecast, while they computed.
    `is_stopped`: the process of a lab worker ended by itself; nothing can be placed there until it runs again.
    `away`: why a device of a paired machine cannot be used now, in a few words; empty if it can.
    `remote`: what a paired machine told of its device behind the RPC worker; None if it told nothing.
    """

    id: str
    name: str
    backend: str
    kind: DeviceKind
    total_bytes: int
    free_bytes: int | None = None
    pci_bus_id: str | None = None
    endpoint: str | None = None
    endpoint_device: int = 0
    cap_bytes: int | None = None
    margin_bytes: int = 0
    capabilities: Capabilities = Capabilities()
    overhead_bytes: int | None = None
    buffers: BufferFacts = BufferFacts()
    findings: Findings = Findings()
    holdings: tuple[Holding, ...] = ()
    fingerprint: str | None = None
    via: str | None = None
    is_stopped: bool = False
    away: str = ""
    remote: RemoteFacts | None = None
    computing: tuple[ComputingNeed, ...] = ()

    def fault(self, feature: Feature, of: str = "") -> Fault | None:
        """Return the fault because of which a feature is not used here for type `of`; None if it is used.

        Upper and lower case are the same: files write "Q4_0", caches "q4_0".
        """
        # A fault without a type concerns all types.
        types = ("", of.casefold())
        return next(
            (each for each in self.findings.faults if each.feature == feature and each.of.casefold() in types), None
        )

    @property
    def available_bytes(self) -> int:
        """Memory for planning: free memory, or the total if that is unknown, at most the cap.

        0 if it has stopped or is away.
        """
        if self.is_stopped or self.away:
            return 0
        free_bytes = self.total_bytes if self.free_bytes is None else self.free_bytes
        return free_bytes if self.cap_bytes is None else min(free_bytes, self.cap_bytes)

    @property
    def is_host(self) -> bool:
        return self.id == CPU_ID

    @property
    def is_rpc(self) -> bool:
        return self.endpoint is not None


@dataclass(frozen=True, slots=True)
class Rig:
    """All devices with the host. `devices` excludes the host; `all_devices` has it at the end."""

    devices: tuple[Device, ...]
    host: Device

    @property
    def all_devices(self) -> tuple[Device, ...]:
        return (*self.devices, self.host)

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(device.id for device in self.all_devices)

    def device(self, device_id: str) -> Device | None:
        """Return the device with this id, None if the rig has none."""
        return next((device for device in self.all_devices if device.id == device_id), None)


def routes_of(devices: Iterable[Device]) -> dict[str, str]:
    """Return the address to connect to for each endpoint behind a tunnel; empty while there is no tunnel.

    An endpoint that is missing in the result is connected to directly.
    """
    # An empty address says that there is no tunnel: such a machine is never asked in the clear.
    return {
        device.endpoint: device.via or ""
        for device in devices
        if device.endpoint is not None and device.fingerprint is not None
    }


def make_host(name: str, total_bytes: int, free_bytes: int | None = None) -> Device:
    """Return the device for the host's CPU and memory."""
    return Device(
        id=CPU_ID,
        name=name,
        backend="CPU",
        kind="cpu",
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        capabilities=Capabilities(row_split=False, tensor_split=False),
    )


def find_id_fault(device_id: str) -> str | None:
    """Return a sentence that says why this cannot be a device id, None if it can."""
    if _ID.fullmatch(device_id):
        return None
    return tr(
        '"{device_id}" is not a device id; ids have at most 64 letters, digits, "_", "." and "-", such as "CUDA0"',
        device_id=device_id[:60],
    )


def with_free_ids(devices: Iterable[Device], taken: Iterable[str]) -> tuple[Device, ...]:
    """Return `devices` with another id for each whose id is taken: ids are the lanes' names in layouts."""
    known = set(taken)
    added = []
    for device in devices:
        free = _free_id(device, known)
        known.add(free)
        added.append(device if free == device.id else replace(device, id=free))
    return tuple(added)


def _free_id(device: Device, taken: set[str]) -> str:
    if device.id not in taken:
        return device.id
    if device.fingerprint is not None:
        # Two machines may have one name, and a device keeps that of its machine.
        names = (f"{device.id[:60]}-{number}" for number in itertools.count(2))
    else:
        names = (f"RPC{number}" if device.is_rpc else f"{device.id}-{number}" for number in itertools.count())
    return next(name for name in names if name not in taken)


def names_of(devices: Iterable[Device]) -> str:
    """Return the ids of the devices, separated by commas."""
    return ", ".join(device.id for device in devices)


REMOTE_MARGIN_BYTES = 256 * MIB
"""Margin for changes in other programs on that machine between discovery and load."""
_REMOTE_PART = 20
"""The margin is at most 1/20 of the device's memory."""
_LOOPBACK = re.compile(r"(127\.|localhost|\[::1\])")


def is_on_this_machine(device: Device) -> bool:
    """Return whether `device` is an RPC worker on this machine, such as a lab worker."""
    return device.endpoint is not None and _LOOPBACK.match(device.endpoint) is not None


def remote_margin_bytes(device: Device) -> int:
    """Return the default margin of an RPC worker: none on this machine, where the user sets caps."""
    if device.endpoint is None or is_on_this_machine(device):
        return 0
    return min(REMOTE_MARGIN_BYTES, device.total_bytes // _REMOTE_PART)


def margin_words(device: Device) -> str:
    """Return one line with the margin of an RPC worker and its origin; empty if there is none."""
    if not device.is_rpc or not device.margin_bytes:
        return ""
    usual = device.margin_bytes == remote_margin_bytes(device)
    why = tr("the default for a worker on another machine") if usual else tr("as set for this worker")
    return tr("{margin} stay free, {why}.", margin=format_bytes(device.margin_bytes), why=why)
