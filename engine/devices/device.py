"""Devices, the host and rigs (all devices of a computer or plan) as plain values.

A device is hardware to which layers of a model can be assigned.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import Literal, get_args

from msgspec import Struct

from engine.base.language import tr
from engine.base.numa import NumaNode, node_text
from engine.base.units import MIB, format_bytes
from engine.base.values import replace
from engine.model.gguf.model_file import FileIdentity

CPU_ID = "CPU"
"""Id of the host, which every rig has; it is always the last in lists of devices."""

DeviceKind = Literal["gpu", "igpu", "accel", "cpu"]
DEVICE_KINDS: tuple[DeviceKind, ...] = get_args(DeviceKind)

_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)


class Capabilities(Struct, frozen=True):
    """Abilities of a device's backend.

    `row_split`, `tensor_split`: whether the backend supports llama.cpp's split modes `row` and `tensor`.
    `repeatable`: whether one layout may have several separate groups of layers on the device.
    """

    row_split: bool = False
    tensor_split: bool = True
    repeatable: bool = False


Feature = Literal["extra_buffers", "flash_attention", "tensor_split", "repeated", "weights"]
FEATURES: tuple[Feature, ...] = get_args(Feature)
"""Features of the engine that the self-check tests on each device. A broken feature is not used on that device."""


class Fault(Struct, frozen=True):
    """A feature that is not used on a device, because the engine's self-check found that it is broken on this device.

    `reason`: a sentence for people.
    `of`: the type for which the feature is broken: of the KV cache for flash attention, of the weights for other
    features; empty: broken for all types.
    """

    feature: Feature
    reason: str
    of: str = ""


class Findings(Struct, frozen=True):
    """Results of the engine's self-check on a device.

    `faults`: broken features. `is_checked`: False if the device was never checked.
    """

    faults: tuple[Fault, ...] = ()
    is_checked: bool = False


class BufferFacts(Struct, frozen=True):
    """Limits that ggml reports for a device's buffers and kernels.

    `alignment_bytes`: alignment of tensors in the device's buffers; None: not reported, so the usual alignment of the
    backend is assumed.
    `host_alignment_bytes`: alignment of tensors in host memory that the device reads directly; None: not reported.
    `largest_tensor_bytes`: largest tensor that the device can compute with; None: any size.
    `largest_buffer_bytes`: largest buffer that the device allocates; None: not reported.
    `mixes_streams`: whether the backend has a kernel for mixing residual streams (DeepSeek 4, GLM 5). On Vulkan the
    kernel needs subgroups of 16.
    """

    alignment_bytes: int | None = None
    host_alignment_bytes: int | None = None
    largest_tensor_bytes: int | None = None
    largest_buffer_bytes: int | None = None
    mixes_streams: bool = True


class RemoteFacts(Struct, frozen=True):
    """Backend, overhead and speeds that a paired machine reports about a device that it lends.

    Values are checked for plausible ranges, but not verified.
    `backend`: ggml backend that the RPC server uses, such as "CUDA"; empty: unknown.
    `overhead_bytes`: memory that loads on that machine took beyond the engine's buffers; None: never measured.
    `read_bytes_per_second`: memory bandwidth at which the device reads F16 weights; None: not measured.
    `by_type`: this bandwidth for other tensor types, as (type name, bytes per second); empty: not measured.
    `op_s`: time in seconds of a graph node with almost nothing to compute; None: not measured.
    `products`: speed of matrix multiplications, as (type name, multiply-adds per second); empty: not measured.
    """

    backend: str = ""
    overhead_bytes: int | None = None
    read_bytes_per_second: float | None = None
    by_type: tuple[tuple[str, float], ...] = ()
    op_s: float | None = None
    products: tuple[tuple[str, float], ...] = ()


class Holding(Struct, frozen=True):
    """Memory that one loaded model of this program holds on a device.

    `model`: the model's display name, which need not be unique. `key`: identity of the model file.
    """

    model: str
    size_bytes: int
    key: FileIdentity


def device_key(device: Device) -> str:
    """Return the key of a device in stored files: its backend with PCI address, endpoint or id.

    The key is the same in each run of the program.
    """
    location = device.pci_bus_id or (f"{device.endpoint}/{device.endpoint_device}" if device.endpoint else device.id)
    return f"{device.backend} {location.lower()}"


class ComputingNeed(Struct, frozen=True):
    """Memory that a model needs on a device, in addition to llama.cpp's buffers, while it computes.

    The backend takes this memory for its pools and workspaces. The amount depends on the computation, not on the number
    of layers on the device. It is recorded after a model ran out of memory while it computed.

    `device`, `model`: keys of the device and the model.
    `n_ctx`, `n_ubatch`: settings of the load. The need also applies to larger values, but not to smaller ones.
    `flash_attention`: whether flash attention was on or automatic.
    `types`: types of the K and V cache.
    `overhead_bytes`: lower bound of this memory.
    """

    device: str
    model: str
    n_ctx: int
    n_ubatch: int
    flash_attention: bool
    types: tuple[str, str]
    overhead_bytes: int

    def is_like(self, other: ComputingNeed) -> bool:
        """Return whether both objects have the same device, model, flash attention and cache types."""
        return self._subject == other._subject

    def covers(self, asked: ComputingNeed) -> bool:
        """Return whether the memory that was measured for this load also applies to the load that `asked` describes.

        It applies if device, model, flash attention and cache types are the same (`is_like`), and `asked` has at least
        this `n_ctx` and `n_ubatch`.
        """
        return self.is_like(asked) and asked.n_ctx >= self.n_ctx and asked.n_ubatch >= self.n_ubatch

    @property
    def _subject(self) -> tuple[object, ...]:
        return self.device, self.model, self.flash_attention, self.types


class MeasuredChoice(Struct, frozen=True):
    """The value of a setting that was fastest in a measurement on this computer.

    `setting`: key of the setting in the `context` of a layout file, or `BOUND_THREADS` (binding threads to cores).
    `value`: the preferred value; equal to `base` if no other value was faster.
    `base`: value that is used without a measurement.
    `ratio`: how many times as fast `value` is as `base`.
    `low`, `high`: 95 % confidence interval of `ratio`.
    `machine`: key of the computer and its engine (`machine_key`).
    `load`: key of the model and the devices (`load_key`); empty if the choice holds for all loads.
    """

    setting: str
    value: int
    base: int
    ratio: float
    low: float
    high: float
    machine: str
    load: str = ""


class Device(Struct, frozen=True):
    """Hardware to which layers can be assigned: a card, an RPC device, or the host.

    `free_bytes`: free memory at the last reading; None: unknown, so planning uses the total.
    `pci_bus_id`: PCI address of a card; None: unknown or not a card.
    `endpoint`, `endpoint_device`: host:port of an RPC server, and the device's index on it; None: a local device.
    `cap_bytes`: largest memory that planning uses on the device; None: no limit.
    `margin_bytes`: memory that planning leaves free.
    `overhead_bytes`: measured memory of a load beyond the engine's buffers; None: never measured.
    `holdings`: memory of other models of this program that stay loaded; not part of `free_bytes`.
    `fingerprint`: SHA-256 of the paired machine's certificate. With it, the endpoint is reached only through a tunnel.
    None: not paired.
    `via`: local address (host:port) of that tunnel; None: there is no tunnel.
    `is_stopped`: whether the process of a lab worker (an RPC server that Layerdeck runs on this machine) has ended by
    itself; it must be started again before use.
    `away`: why a device of a paired machine cannot be used now, in a few words; empty: the device can be used.
    `remote`: what a paired machine reports about its device behind the RPC server; None: nothing.
    `computing`: memory that models needed on this device while they computed, beyond the forecast.
    `nodes`: NUMA nodes of the host's processor; empty: only one, or unknown.
    `unified`: whether the device uses the host's memory, as on Apple silicon.
    `swap_bytes`: free swap space of the host; None: unknown, or not the host.
    `choices`: settings that were measured on this computer; empty for all devices but the host.
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
    nodes: tuple[NumaNode, ...] = ()
    unified: bool = False
    swap_bytes: int | None = None
    choices: tuple[MeasuredChoice, ...] = ()

    def fault(self, feature: Feature, of: str = "") -> Fault | None:
        """Return the fault that forbids a feature on this device; None: the feature may be used.

        `of`: type of the KV cache or of the weights. Case is ignored: files write "Q4_0", caches "q4_0".
        """
        # A fault without a type concerns all types.
        types = ("", of.casefold())
        return next(
            (each for each in self.findings.faults if each.feature == feature and each.of.casefold() in types), None
        )

    @property
    def available_bytes(self) -> int:
        """Memory in bytes that planning may use: the free memory, or the total if that is unknown, limited by the cap.

        It is 0 if the device's worker has ended (`is_stopped`) or a paired machine's device cannot be used now
        (`away`).
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


class MemoryPool(Struct, frozen=True):
    """Memory that the host shares with other devices (unified memory): each can use what the others do not use.

    `ids`: ids of the host and of the devices with unified memory.
    `available_bytes`: memory that is available to all of them together.
    `limit_bytes`: `available_bytes` less the largest margin of these devices; negative if the margin is larger.
    """

    ids: frozenset[str]
    available_bytes: int
    limit_bytes: int


class Rig(Struct, frozen=True):
    """All devices of a computer or a plan. `devices` excludes the host; in `all_devices` the host is last."""

    devices: tuple[Device, ...]
    host: Device

    @property
    def all_devices(self) -> tuple[Device, ...]:
        return (*self.devices, self.host)

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(device.id for device in self.all_devices)

    @property
    def pool(self) -> MemoryPool | None:
        """The memory that the host shares with devices; None if each device has its own."""
        members = [device for device in self.all_devices if device.unified or device.is_host]
        if len(members) == 1:
            return None
        available_bytes = self.host.available_bytes
        margin_bytes = max(device.margin_bytes for device in members)
        return MemoryPool(frozenset(each.id for each in members), available_bytes, available_bytes - margin_bytes)

    def device(self, device_id: str) -> Device | None:
        """Return the device with this id, None if the rig has none."""
        return next((device for device in self.all_devices if device.id == device_id), None)


def routes_of(devices: Iterable[Device]) -> dict[str, str]:
    """Return the tunnels to paired machines: the local address of each tunnel, by the endpoint that it leads to.

    The address is empty if the tunnel does not exist now. Endpoints of machines that are not paired are left out,
    because they need no tunnel.
    """
    # An empty address says that there is no tunnel: such a machine is never asked in the clear.
    return {
        device.endpoint: device.via or ""
        for device in devices
        if device.endpoint is not None and device.fingerprint is not None
    }


def make_host(
    name: str,
    total_bytes: int,
    free_bytes: int | None = None,
    *,
    nodes: tuple[NumaNode, ...] = (),
    swap_bytes: int | None = None,
) -> Device:
    """Return the device for the host's CPU and memory.

    `free_bytes`, `swap_bytes`: free memory and free swap space; None: unknown.
    `nodes`: NUMA nodes; a single node is left out.
    """
    return Device(
        id=CPU_ID,
        name=name,
        backend="CPU",
        kind="cpu",
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        capabilities=Capabilities(row_split=False, tensor_split=False),
        nodes=nodes if len(nodes) > 1 else (),
        swap_bytes=swap_bytes,
    )


def node_lines(device: Device) -> tuple[str, ...]:
    """Return a line of text for each NUMA node of the host, with its distances to the other nodes.

    Empty if the host has fewer than two nodes.
    """
    nodes = device.nodes
    lines = []
    for node in nodes:
        pairs = zip(nodes, node.distances, strict=False)
        others = [(each.number, distance) for each, distance in pairs if each is not node]
        distances = ", ".join(tr("{distance} to node {number}", distance=far, number=number) for number, far in others)
        line = node_text(node)
        if node.free_bytes is not None:
            line = tr("{node}, {free} free", node=line, free=format_bytes(node.free_bytes))
        lines.append(tr("{node}; distances: {distances}", node=line, distances=distances) if others else line)
    return tuple(lines)


def find_id_error(device_id: str) -> str | None:
    """Return a sentence on why a text cannot be a device id; None if it can."""
    if _ID.fullmatch(device_id):
        return None
    return tr(
        '"{device_id}" is not a device id; ids have at most 64 letters, digits, "_", "." and "-", such as "CUDA0"',
        device_id=device_id[:60],
    )


def with_free_ids(devices: Iterable[Device], taken: Iterable[str]) -> tuple[Device, ...]:
    """Return `devices`, with a new id for each device whose id is in `taken`.

    Layouts refer to devices by id, so ids must be unique.
    """
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
"""Default margin of a device on another machine, because programs there may take memory before the load."""
_REMOTE_PART = 20
"""Divisor that limits `REMOTE_MARGIN_BYTES` on small devices: the default margin is at most 1/20 of the device's
memory.
"""
_LOOPBACK = re.compile(r"(127\.|localhost|\[::1\])")


def is_on_this_machine(device: Device) -> bool:
    """Return whether `device` is an RPC worker that runs on this machine; false for the machine's own devices."""
    return device.endpoint is not None and _LOOPBACK.match(device.endpoint) is not None


LENT_NAME_SEPARATOR = " \N{MIDDLE DOT} "
"""Separator in the name of a lent device: it stands between the machine's name and the device's own name."""


def machine_name(device: Device) -> str:
    """Return the name of the machine that lends `device`."""
    return device.name.partition(LENT_NAME_SEPARATOR)[0]


def remote_margin_bytes(device: Device) -> int:
    """Return the default margin (memory that planning leaves free) of an RPC device, in bytes.

    It is 0 for a worker on this machine, because the user limits its memory by a cap, and 0 for a local device.
    """
    if device.endpoint is None or is_on_this_machine(device):
        return 0
    return min(REMOTE_MARGIN_BYTES, device.total_bytes // _REMOTE_PART)


def margin_text(device: Device) -> str:
    """Return a sentence on the margin of an RPC device (memory left free): its size, and whether the user has set it.

    Empty if the device has no margin, or is no RPC device.
    """
    if not device.is_rpc or not device.margin_bytes:
        return ""
    usual = device.margin_bytes == remote_margin_bytes(device)
    why = tr("the default for an RPC worker on another computer") if usual else tr("as set for this RPC worker")
    return tr("Layerdeck keeps {margin} of memory free ({why}).", margin=format_bytes(device.margin_bytes), why=why)
