"""A device, the host and a rig: what there is to place layers on, as plain values."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from engine.base.language import tr
from engine.base.units import MIB, format_bytes
from engine.model.gguf.model_file import FileIdentity

CPU_ID = "CPU"
"""The host's id: always there, always last in lists of devices."""

DeviceKind = Literal["gpu", "igpu", "accel", "cpu"]
DEVICE_KINDS: tuple[DeviceKind, ...] = get_args(DeviceKind)

_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the device's backend can do: split modes, and the device more than once in one layout."""

    row_split: bool = False
    tensor_split: bool = True
    repeatable: bool = False


Feature = Literal["extra_buffers", "flash_attention", "tensor_split", "repeated", "weights"]
FEATURES: tuple[Feature, ...] = get_args(Feature)
"""Parts of the engine that may be broken on a device while everything else works there."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What the engine's check of itself found broken on a device, and so is not used there.

    `of`: the type of cache (flash attention) or weights that it is about; empty for all. `reason` is a sentence.
    """

    feature: Feature
    reason: str
    of: str = ""


@dataclass(frozen=True, slots=True)
class Findings:
    """What the engine's check of itself found on a device: `faults`, and whether there was a check at all."""

    faults: tuple[Fault, ...] = ()
    is_checked: bool = False


@dataclass(frozen=True, slots=True)
class BufferFacts:
    """What ggml tells of a device's buffers and kernels.

    `alignment_bytes`: alignment of tensors in the device's buffers; None: not told, the backend's usual one counts.
    `host_alignment_bytes`: the same in host memory that the device reads directly.
    `largest_tensor_bytes`: largest tensor that the device computes with; None: any.
    `largest_buffer_bytes`: largest buffer that the device gives out; None: not told.
    `mixes_streams`: the device has a kernel for how residual streams mix with each other (DeepSeek 4, GLM 5), which on
    Vulkan needs subgroups of 16.
    """

    alignment_bytes: int | None = None
    host_alignment_bytes: int | None = None
    largest_tensor_bytes: int | None = None
    largest_buffer_bytes: int | None = None
    mixes_streams: bool = True


@dataclass(frozen=True, slots=True)
class Holding:
    """Memory that one of our loaded models holds on a device. `model` is its name, which other models may share."""

    model: str
    size_bytes: int
    key: FileIdentity


@dataclass(frozen=True, slots=True)
class Device:
    """One place for layers.

    `free_bytes` None: unknown, planning uses the total. `cap_bytes`: never plan more than this. `overhead_bytes`: what
    a load takes here besides what the engine tells, as measured by earlier ones; None: not known for this device.
    `holdings`: what other models of ours, which stay loaded, hold here; `free_bytes` is without it.
    `fingerprint`: of the certificate that the machine at `endpoint` was paired with; it is reached through a tunnel
    alone. `via`: where on this machine that tunnel begins (host:port), None as long as there is none.
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

    def fault(self, feature: Feature, of: str = "") -> Fault | None:
        """Return why a feature, for weights or a cache of type `of`, is not used here; None where it may be.

        Types are named in large and in small letters ("Q4_0" of a file, "q4_0" of a cache): that makes no difference.
        """
        types = ("", of.casefold())
        return next(
            (each for each in self.findings.faults if each.feature == feature and each.of.casefold() in types), None
        )

    @property
    def available_bytes(self) -> int:
        """What may be planned here: the free (or, if unknown, total) memory, at most the cap."""
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
    """Devices and the host. `devices` leaves the host out; `all_devices` has it last."""

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
    """Return where to dial for endpoints that are behind a tunnel; an empty text where there is none yet.

    An endpoint that is not in it is dialled itself.
    """
    return {
        device.endpoint: device.via or ""
        for device in devices
        if device.endpoint is not None and device.fingerprint is not None
    }


def make_host(name: str, total_bytes: int, free_bytes: int | None = None) -> Device:
    """Return the device that stands for the host's CPU and memory."""
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
    """Return a sentence on why this cannot be a device's id, None if it can."""
    if _ID.fullmatch(device_id):
        return None
    return tr(
        '"{device_id}" is no device id; ids have at most 64 letters, digits, "_", "." and "-", such as "CUDA0"',
        device_id=device_id[:60],
    )


def names_of(devices: Iterable[Device]) -> str:
    """Return the ids of devices for a sentence."""
    return ", ".join(device.id for device in devices)


REMOTE_MARGIN_BYTES = 256 * MIB
"""On another machine: what its system and other programs take between our look at it and a load."""
_REMOTE_PART = 20
"""Of small machines at most one part in this many."""
_LOOPBACK = re.compile(r"(127\.|localhost|\[::1\])")


def is_on_this_machine(device: Device) -> bool:
    """Return whether `device` is an RPC worker of this machine, such as those of a lab."""
    return device.endpoint is not None and _LOOPBACK.match(device.endpoint) is not None


def remote_margin_bytes(device: Device) -> int:
    """Return the usual margin of an RPC worker: none on this machine, where caps are what people set."""
    if device.endpoint is None or is_on_this_machine(device):
        return 0
    return min(REMOTE_MARGIN_BYTES, device.total_bytes // _REMOTE_PART)


def margin_words(device: Device) -> str:
    """Return how large the margin of an RPC worker is and where it is from, a line; empty where it has none."""
    if not device.is_rpc or not device.margin_bytes:
        return ""
    usual = device.margin_bytes == remote_margin_bytes(device)
    why = tr("as is usual for a worker on another machine") if usual else tr("as was set for this worker")
    return tr("{margin} stay free, {why}.", margin=format_bytes(device.margin_bytes), why=why)
