"""How each ggml backend takes memory, and which weights it has no kernel for.

Of memory these are alignment, padding, pinned host buffers, and the fixed cost of a process on a device. Weights
without a kernel stay on the host, whatever device their layer is on: the engine asks the device about the one operation
that each tensor is for (`weight_buft_supported` in llama-model-loader.cpp). `Kernels` are the answers of the backends,
as far as known models meet them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Literal

from engine.base.units import GIB, MIB
from engine.devices.device import BufferFacts, Device
from engine.model.architectures.record import Architecture
from engine.model.gguf.model_file import ModelFile, TensorInfo
from engine.planning.memory.hyper_parameters import MissingNumberError, number

Backend = Literal["all", "cuda", "vulkan"]


@dataclass(frozen=True, slots=True)
class Kernels:
    """Whose kernels a device has (RPC says yes to everything), and the largest tensor that they take, None: any.

    `mixes_streams`: see `Device`.
    """

    backend: Backend = "all"
    largest_bytes: int | None = None
    mixes_streams: bool = True


ALL_KERNELS = Kernels()

_CONVOLUTIONS = ("ssm_conv1d.weight", "shortconv.conv.weight")
_SCAN = "ssm_a"
_RWKV6_STEP = "time_mix_first.weight"
_RWKV6_BYTES = 4 * (123 * 123) * (123 + 123 * 123)
"""The engine asks for RWKV 6's step with 123 heads of 123, as many tokens and sequences: this is what it would make."""
_NOT_MULTIPLIED: dict[Backend, frozenset[str]] = {
    "all": frozenset(),
    "cuda": frozenset({"TQ1_0", "TQ2_0", "F64", "I8", "I16", "I64"}),
    "vulkan": frozenset({"F64", "I8", "I16", "I64"}),
}
_CUDA_THREADS = 128
_ASKED_TOKENS = 512
"""Tokens that a matrix is asked about with."""
_EXPERTS = "exps"


def find_unsupported(model: ModelFile, architecture: Architecture | None, kernels: Kernels) -> frozenset[str]:
    """Return the names of the tensors that such a device leaves to the host, in layers or behind them: a tied embedding
    is among them where its device does not multiply with it."""
    if kernels == ALL_KERNELS:
        return frozenset()
    scans = architecture is not None and _scans(architecture)
    tensors = chain(model.global_tensors, *(block.tensors for block in model.blocks))
    return frozenset(tensor.name for tensor in tensors if _is_unsupported(model, tensor, kernels, scans=scans))


def is_too_large(tensor: TensorInfo, kernels: Kernels) -> bool:
    """Return whether a device with these kernels cannot even look up rows of a tensor."""
    return kernels.largest_bytes is not None and tensor.size_bytes > kernels.largest_bytes


def _scans(architecture: Architecture) -> bool:
    """Return whether `ssm_a` is for the scan of Mamba; delta nets only multiply by it."""
    rule = architecture.recurrence
    return rule is not None and rule.layers != "interval" and rule.state in ("scan", "grouped_scan")


def _is_unsupported(model: ModelFile, tensor: TensorInfo, kernels: Kernels, *, scans: bool) -> bool:
    if tensor.type_name in _NOT_MULTIPLIED[kernels.backend] and len(tensor.shape) > 1:
        return True
    if kernels.largest_bytes is not None and _asked_bytes(model, tensor) > kernels.largest_bytes:
        return True
    stem = tensor.name.split(".", 2)[-1]
    if stem == _RWKV6_STEP:
        return kernels.largest_bytes is not None and kernels.largest_bytes < _RWKV6_BYTES
    if stem in _CONVOLUTIONS:
        rows = tensor.shape[1] if len(tensor.shape) > 1 else 1
        return kernels.backend == "cuda" and rows % _CUDA_THREADS != 0
    return kernels.backend != "all" and stem == _SCAN and scans and not _has_scan(model, tensor, kernels)


def _asked_bytes(model: ModelFile, tensor: TensorInfo) -> int:
    """Return the bytes of the largest tensor of the product that is asked about: the matrix, what it is multiplied
    with or what comes out, for each of the experts that a token gets."""
    if len(tensor.shape) < 2:
        return tensor.size_bytes
    counts = _experts_used(model) if _EXPERTS in tensor.name else math.prod(tensor.shape[2:])
    return max(tensor.size_bytes, 4 * _ASKED_TOKENS * counts * max(tensor.shape[:2]))


def _experts_used(model: ModelFile) -> int:
    value = model.hyper_parameter("expert_used_count")
    counts = value if isinstance(value, tuple) else (value,)
    return max((count for count in counts if isinstance(count, int)), default=1)


def _has_scan(model: ModelFile, tensor: TensorInfo, kernels: Kernels) -> bool:
    try:
        inner, state = number(model, "ssm.inner_size"), number(model, "ssm.state_size")
        n_groups = number(model, "ssm.group_count", 1, least=0) or 1
    except MissingNumberError:
        return True
    n_heads = tensor.shape[1] if len(tensor.shape) > 1 else 1
    head = inner // n_heads
    if tensor.shape[0] == 1:
        sizes = (96, 128, 256) if kernels.backend == "cuda" else (128, 256)
        return state in sizes and head % 16 == 0
    return (
        kernels.backend == "cuda" and (tensor.shape[0], head, n_groups) == (16, 1, 1) and n_heads % _CUDA_THREADS == 0
    )


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
