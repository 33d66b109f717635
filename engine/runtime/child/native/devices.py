"""Lists ggml's devices, and finds the ggml device of each of our device ids.

ggml has no property for the largest tensor of a device, or for the kernels that it has. Both are found with
`ggml_backend_dev_supports_op`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

from msgspec import Struct

from engine.base.pci import parse_pci_name
from engine.runtime.child.native.bindings import DEVICE_KINDS, Bindings, InitParams
from engine.runtime.child.native.cuda_driver import DriverCard, list_driver_cards
from engine.runtime.child.native.failures import StepLimit, failure
from engine.runtime.protocol.messages import DeviceList, DeviceMemoryReading, GgmlDevice, PackLoad
from engine.runtime.protocol.requests import DeviceRef, ListDevices

_I8 = 24
"""`GGML_TYPE_I8`: a tensor type with one byte for each element."""
_MOST_BYTES = 1 << 46
_LEAST_BYTES = 1 << 20
_ROOM_BYTES = 1 << 16


def largest_tensor_bytes(engine: Bindings, device: int) -> int:
    """Return the size in bytes of the largest tensor that a device supports; 0: no limit.

    A device supports a tensor without data and operation unless the tensor is too large. So bisection over the size
    finds the limit.
    """
    pointer = ctypes.c_void_p
    new_tensor = engine.bind("ggml_new_tensor_1d", pointer, pointer, ctypes.c_int, ctypes.c_int64)
    supports = engine.bind("ggml_backend_dev_supports_op", ctypes.c_bool, pointer, pointer)
    tensors = engine.bind("ggml_init", pointer, InitParams)(InitParams(_ROOM_BYTES, None, True))
    try:
        taken, refused = _LEAST_BYTES, _MOST_BYTES
        # No limit below 64 TiB, or none that this finds (the device refuses even 1 MiB).
        if supports(device, new_tensor(tensors, _I8, refused)) or not supports(device, new_tensor(tensors, _I8, taken)):
            return 0
        while refused - taken > 1:
            middle = (taken + refused) // 2
            if supports(device, new_tensor(tensors, _I8, middle)):
                taken = middle
            else:
                refused = middle
        return taken
    finally:
        engine.bind("ggml_free", None, pointer)(tensors)


_F32 = 0
"""`GGML_TYPE_F32`."""
_MIXES = 24
"""Number of values that mix four residual streams of a token: 4 for the input, 4 for the output, 4 x 4 between them."""
_SCALES = 3
_LEAST = 1e-6
_STEPS = 1


def mixes_streams(engine: Bindings, device: int) -> bool:
    """Return whether a device has a kernel for `ggml_dsv4_hc_comb`, which mixes residual streams."""
    pointer = ctypes.c_void_p
    new_tensor = engine.bind("ggml_new_tensor_1d", pointer, pointer, ctypes.c_int, ctypes.c_int64)
    supports = engine.bind("ggml_backend_dev_supports_op", ctypes.c_bool, pointer, pointer)
    mix = engine.bind("ggml_dsv4_hc_comb", pointer, pointer, pointer, pointer, pointer, ctypes.c_float, ctypes.c_int32)
    tensors = engine.bind("ggml_init", pointer, InitParams)(InitParams(_ROOM_BYTES, None, True))
    try:
        mixes, scale, base = (new_tensor(tensors, _F32, size) for size in (_MIXES, _SCALES, _MIXES))
        return bool(supports(device, mix(tensors, mixes, scale, base, _LEAST, _STEPS)))
    finally:
        engine.bind("ggml_free", None, pointer)(tensors)


CPU_ID = "CPU"
_LARGEST_BYTES = 1 << 62
"""A backend that reports a buffer limit above this size in bytes has no limit: such backends return SIZE_MAX."""
BACKEND_NAMES = {"ROCm": "HIP", "MTL": "Metal"}
"""Usual names of backends by ggml's own names, if these differ."""

UNIFIED_VARIABLE = "GGML_CUDA_ENABLE_UNIFIED_MEMORY"
"""Environment variable with which CUDA allocates buffers in memory that host and card share."""

DIES_IN_TENSOR_SPLIT = frozenset({"Vulkan"})
"""Backends that crash at the first token of a tensor split.

Seen with llama-cpp-python 0.3.36: Vulkan on llvmpipe loads a split over several devices and ends with SIGSEGV.
"""


class ResolvedDevices(Struct, frozen=True):
    """The ggml devices of a request, by our device id.

    `by_id`: addresses of the devices; "CPU" is always among the ids.
    `remote`: ids of RPC devices.
    """

    engine: Bindings
    by_id: Mapping[str, int]
    remote: frozenset[str]

    def id_of_device(self, device: int | None) -> str:
        """Return our id of a ggml device.

        It is "CPU" for a CPU or accelerator device and for None, and ggml's name for a GPU that is not in the request.

        `device`: address of the `ggml_backend_device`; None: a null pointer.
        """
        for device_id, address in self.by_id.items():
            if address == device:
                return device_id
        if device and DEVICE_KINDS.get(self.engine.device_props(device).type) not in ("cpu", "accel"):
            return self.engine.device_name(device)
        return CPU_ID

    def id_of_buffer_type(self, buffer_type: int) -> str:
        """Return our id of the device whose memory a buffer type uses. Pinned and repacked buffers are host memory."""
        if self.engine.buffer_type_is_host(buffer_type):
            return CPU_ID
        return self.id_of_device(self.engine.buffer_type_device(buffer_type))

    def id_of_name(self, name: str) -> str:
        """Return our id of the device with this name in a log line; an unknown name is returned unchanged."""
        for device_id, address in self.by_id.items():
            if self.engine.device_name(address) == name:
                return device_id
        return name

    def id_of_buffer_name(self, name: str) -> str:
        """Return our id of the device whose buffer type has this name, such as `RPC0[127.0.0.1:50052]`.

        Return "CPU" if no device has a buffer type with this name.
        """
        for device_id, address in self.by_id.items():
            buffer_type = self.engine.device_buffer_type(address)
            if buffer_type and self.engine.buffer_type_name(buffer_type) == name:
                return device_id
        return CPU_ID

    def free_bytes(self, device_id: str) -> int | None:
        """Return the free memory that a local GPU reports; None if it reports none.

        Also None for the CPU and for RPC devices, because these report the memory of a whole machine.
        """
        device = self.by_id.get(device_id)
        if device is None or device_id == CPU_ID or device_id in self.remote:
            return None
        free, total = self.engine.device_memory(device)
        return free if total else None

    def memory(self) -> tuple[DeviceMemoryReading, ...]:
        """Return free and total memory of all devices except the CPU, as they report it now."""
        readings = []
        for device_id, device in self.by_id.items():
            if device_id != CPU_ID:
                free, total = self.engine.device_memory(device)
                readings.append(DeviceMemoryReading(device_id, free, total))
        return tuple(readings)


def list_devices(engine: Bindings, request: ListDevices, packs: tuple[PackLoad, ...] = ()) -> DeviceList:
    """Return the local devices and the devices of all endpoints. If an endpoint is silent, ggml aborts the process.

    `packs`: results of loading engine packs, which become part of the list.
    """
    local = engine.devices()
    cards = _known_cards(engine, local, request.known_cards)
    found = [_describe(engine, device, card=cards.get(device)) for device in local]
    for endpoint in request.endpoints:
        for index, device in enumerate(_endpoint_devices(engine, request.routes.get(endpoint, endpoint))):
            found.append(_describe(engine, device, endpoint=endpoint, endpoint_device=index))
    return DeviceList(devices=tuple(found), packs=packs)


def resolve_devices(engine: Bindings, refs: Iterable[DeviceRef], wanted: Iterable[str]) -> ResolvedDevices:
    """Return the ggml device of every wanted id.

    Raises:
        RequestError: a device is gone, or is not in `refs`.
    """
    described = {ref.id: ref for ref in refs}
    by_id: dict[str, int] = {}
    remote: set[str] = set()
    for device_id in dict.fromkeys(wanted):
        if device_id == CPU_ID:
            continue
        ref = described.get(device_id)
        if ref is None:
            raise failure("layout", f"The layout names the device {device_id}, which the rig does not have.")
        by_id[device_id] = _find(engine, ref)
        if ref.endpoint is not None:
            remote.add(device_id)
    # The CPU is always there, because host buffers of any layout are booked on it.
    by_id[CPU_ID] = engine.cpu_device()
    return ResolvedDevices(engine, by_id, frozenset(remote))


def _find(engine: Bindings, ref: DeviceRef) -> int:
    if ref.endpoint is not None:
        address = ref.endpoint if ref.address is None else ref.address
        if not address:
            raise failure("unreachable", f"{ref.id}: there is no tunnel to {ref.endpoint}; pair with that computer.")
        devices = _endpoint_devices(engine, address)
        if ref.endpoint_device >= len(devices):
            raise failure(
                "unreachable",
                f"{ref.id}: the server at {ref.endpoint} has {len(devices)} devices, but none with the number "
                f"{ref.endpoint_device}. List the devices again.",
            )
        return devices[ref.endpoint_device]
    # By PCI id, not by name: ggml numbers the cards that a process sees, so that CUDA0 may be another card here.
    local = engine.devices()
    if ref.pci_bus_id is not None and (pci := parse_pci_name(ref.pci_bus_id)):
        matches = [device for device in local if parse_pci_name(_device_pci(engine, device) or "") == pci]
        # One card may be listed by two backends, such as CUDA and Vulkan: the right backend first.
        matches.sort(key=lambda device: _backend(engine, device).lower() != ref.backend.lower())
        if matches:
            return matches[0]
    else:
        for device in local:
            if engine.device_name(device) in (ref.name, ref.id):
                return device
    raise failure(
        "unreachable",
        f"{ref.id} ({ref.backend}) no longer exists: this computer has "
        f"{', '.join(engine.device_name(device) for device in local)}. List the devices again.",
    )


def _endpoint_devices(engine: Bindings, endpoint: str) -> list[int]:
    # ggml makes a device for each one that the server reports, and a broken or malicious server may report billions.
    limit = StepLimit(
        engine.send_abort_text,
        f"the RPC server {endpoint}",
        "It reports an impossible number of devices; check what runs there.",
    )
    with limit:
        registry = engine.rpc_add_server(endpoint.encode())
        count = engine.registry_device_count(registry) if registry else 0
        return [engine.registry_device_get(registry, index) for index in range(count)]


def _known_cards(engine: Bindings, devices: Iterable[int], uuids: Collection[str]) -> dict[int, DriverCard]:
    """Return the GPUs with these UUIDs as the CUDA driver reports them, by the address of their ggml device.

    Empty if it is not certain which GPU of the driver is which ggml device.
    """
    # With unified memory ggml tells the memory of the host, which the card's driver knows nothing of.
    if not uuids or UNIFIED_VARIABLE in os.environ:
        return {}
    cuda = [device for device in devices if _backend(engine, device) == "CUDA"]
    cards = list_driver_cards()
    # GGML_CUDA_DEVICES makes several devices of a card, or leaves cards out.
    if len(cuda) != len(cards):
        return {}
    return {
        device: card
        for device, card in zip(cuda, cards, strict=True)
        if card.uuid in uuids and DEVICE_KINDS.get(engine.device_type(device)) == "gpu"
    }


def _describe(
    engine: Bindings,
    device: int,
    *,
    endpoint: str | None = None,
    endpoint_device: int = 0,
    card: DriverCard | None = None,
) -> GgmlDevice:
    """Return what ggml reports about a device.

    `endpoint`, `endpoint_device`: RPC server of the device, and its index there; None and 0 for a local device.
    `card`: the device as the CUDA driver describes it; None if unknown. With it no CUDA context is made, and the
    returned free memory is 0.
    """
    if card is None:
        props = engine.device_props(device)
        free_bytes, total_bytes = props.memory_free, props.memory_total
        pci_bus_id = None if endpoint else _device_pci(engine, device)
    else:
        free_bytes, total_bytes, pci_bus_id = 0, card.total_bytes, card.pci_bus_id
    registry = engine.device_registry(device)
    found = DEVICE_KINDS.get(engine.device_type(device), "accel")
    kind: Literal["gpu", "igpu", "accel", "cpu"] = found  # type: ignore[assignment]
    return GgmlDevice(
        name=engine.device_name(device),
        description=engine.device_description(device),
        backend=_backend(engine, device),
        kind=kind,
        free_bytes=free_bytes,
        total_bytes=total_bytes,
        pci_bus_id=pci_bus_id,
        endpoint=endpoint,
        endpoint_device=endpoint_device,
        row_split=endpoint is None and bool(engine.registry_function(registry, b"ggml_backend_split_buffer_type")),
        tensor_split=kind in ("gpu", "igpu") and _backend(engine, device) not in DIES_IN_TENSOR_SPLIT,
        alignment_bytes=_alignment(engine, engine.device_buffer_type(device)),
        host_alignment_bytes=_alignment(engine, engine.device_host_buffer_type(device)),
        largest_tensor_bytes=largest_tensor_bytes(engine, device) if endpoint is None and kind != "cpu" else 0,
        largest_buffer_bytes=_largest_buffer(engine, engine.device_buffer_type(device)),
        mixes_streams=endpoint is not None or kind == "cpu" or mixes_streams(engine, device),
        uuid=None if card is None else card.uuid,
    )


def _alignment(engine: Bindings, buffer_type: int | None) -> int:
    return engine.buffer_type_alignment(buffer_type) if buffer_type else 0


def _largest_buffer(engine: Bindings, buffer_type: int | None) -> int:
    found = engine.buffer_type_max_size(buffer_type) if buffer_type else 0
    return found if found <= _LARGEST_BYTES else 0


def _backend(engine: Bindings, device: int) -> str:
    name = engine.registry_name(engine.device_registry(device))
    return BACKEND_NAMES.get(name, name)


def _device_pci(engine: Bindings, device: int) -> str | None:
    device_id = engine.device_props(device).device_id
    return device_id.decode("utf-8", "replace") if device_id else None
