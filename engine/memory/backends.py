"""How each ggml backend takes memory: alignment, padding, pinned host buffers, fixed cost of a process on a device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from engine.devices.device import BufferFacts, Device
from engine.memory.kernels import ALL_KERNELS, Kernels
from engine.units import GIB, MIB

ROW_PADDING = 512
"""Elements that CUDA-like backends round quantised rows up to (`MATRIX_ROW_PADDING`)."""


@dataclass(frozen=True, slots=True)
class SizeRule:
    """How a buffer adds up: each tensor is padded to `alignment_bytes`, quantised rows perhaps to `ROW_PADDING`;
    weights that `kernels` cannot use are not in it."""

    alignment_bytes: int
    pads_rows: bool = False
    kernels: Kernels = ALL_KERNELS


@dataclass(frozen=True, slots=True)
class HostBuffer:
    """Memory of the host in a buffer: the alignment of what lies in it, what it is larger than was asked for, and how
    large it may be, None: as large as is asked for."""

    alignment_bytes: int = 32
    extra_bytes: int = 0
    most_bytes: int | None = None

    def of(self, size_bytes: int, n_parts: int = 1) -> int:
        """Return what buffers take together that `size_bytes` are asked of; for nothing there is none."""
        return size_bytes + n_parts * self.extra_bytes if size_bytes else 0


PLAIN_HOST = HostBuffer()


@dataclass(frozen=True, slots=True)
class BackendTraits:
    """What planning must know of a backend.

    `pinned_host`: offers a host buffer, like `pinned`, that large batches are copied from; `op_offload`: computes large
    batches with weights that lie on the host; `converts_kv`: flash attention keeps F16 copies of a KV cache of another
    type; `reorders`: computes in an order of its own, which decides how long results stay; `most_bytes`: the largest
    buffer that it gives out, beyond which there are several, None: any;
    `overhead_bytes`: what a process takes on the device before its first buffer [unverified, calibrated later].
    """

    size_rule: SizeRule
    pinned_host: bool = False
    pinned: HostBuffer = PLAIN_HOST
    op_offload: bool = False
    converts_kv: bool = False
    reorders: bool = False
    most_bytes: int | None = None
    overhead_bytes: int = 0


CUDA_FLASH_HEAD_SIZES = frozenset({40, 64, 72, 80, 96, 112, 128, 256, 512})
"""Heads that CUDA's flash attention takes with K and V alike (`ggml_cuda_get_best_fattn_kernel`)."""

HOST_RULE = SizeRule(alignment_bytes=32)
CPU_TRAITS = BackendTraits(HOST_RULE)

# A remote worker answers by its own device's rules. Its alignment is told; for a remote CUDA device the padding of
# quantised rows is not in the forecast.
RPC_TRAITS = BackendTraits(HOST_RULE)

_CUDA_LIKE = BackendTraits(
    SizeRule(alignment_bytes=128, pads_rows=True, kernels=Kernels("cuda")),
    pinned_host=True,
    op_offload=True,
    converts_kv=True,
    overhead_bytes=400 * MIB,
)

# Vulkan aligns to minStorageBufferOffsetAlignment, and on the host to minMemoryMapAlignment: 16 to 256 and 64 to 4096
# on known drivers. Buffers have at most 1 GiB (`suballocation_block_size`). Devices that were looked at tell it all.
_VULKAN = BackendTraits(
    SizeRule(256, kernels=Kernels("vulkan")),
    pinned_host=True,
    pinned=HostBuffer(64, extra_bytes=32, most_bytes=GIB),
    op_offload=True,
    reorders=True,
    most_bytes=GIB,
    overhead_bytes=128 * MIB,
)
_METAL = BackendTraits(HOST_RULE, op_offload=True, overhead_bytes=64 * MIB)
_OTHER = BackendTraits(SizeRule(128), overhead_bytes=128 * MIB)

TRAITS: dict[str, BackendTraits] = {
    "CPU": CPU_TRAITS,
    "RPC": RPC_TRAITS,
    "CUDA": _CUDA_LIKE,
    "HIP": _CUDA_LIKE,
    "ROCm": _CUDA_LIKE,
    "MUSA": _CUDA_LIKE,
    "SYCL": _CUDA_LIKE,
    "Vulkan": _VULKAN,
    "Metal": _METAL,
    "MTL": _METAL,
}


def backend_traits(device: Device) -> BackendTraits:
    """Return the traits of the device's backend; a backend we do not know gets cautious ones."""
    if device.is_host:
        return CPU_TRAITS
    traits = RPC_TRAITS if device.is_rpc else TRAITS.get(device.backend, _OTHER)
    return _told(traits, device.buffers)


@lru_cache(maxsize=64)
def _told(traits: BackendTraits, told: BufferFacts) -> BackendTraits:
    """Return `traits` with what a device told of itself; None: it told nothing."""
    rule, pinned = traits.size_rule, traits.pinned
    return replace(
        traits,
        size_rule=replace(
            rule,
            alignment_bytes=told.alignment_bytes or rule.alignment_bytes,
            kernels=replace(rule.kernels, largest_bytes=told.largest_tensor_bytes, mixes_streams=told.mixes_streams),
        ),
        pinned=replace(
            pinned,
            alignment_bytes=told.host_alignment_bytes or pinned.alignment_bytes,
            most_bytes=told.largest_buffer_bytes or pinned.most_bytes,
        ),
        most_bytes=told.largest_buffer_bytes or traits.most_bytes,
    )


def supports_mapping(device: Device) -> bool:
    """Return whether load mode auto still maps the file with this device listed (integrated GPUs refuse)."""
    return device.kind != "igpu" or device.backend not in ("CUDA", "HIP", "ROCm", "MUSA", "Vulkan")
