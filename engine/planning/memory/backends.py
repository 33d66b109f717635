"""Rules of the ggml backends for memory, and the weights for which they have no kernel.

The memory rules are alignment, row padding, pinned host buffers, and the fixed cost of a process on a device. A weight
without a kernel stays in host memory, whatever device its layer is on: llama.cpp asks the device whether it supports
the operation that the tensor is used in (`weight_buft_supported` in llama-model-loader.cpp). `Kernels` describes which
operations a device supports, as far as known models need them.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import chain
from typing import Literal

from msgspec import Struct

from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import BufferFacts, Device
from engine.model.architectures.record import Architecture
from engine.model.gguf.model_file import ModelFile, TensorInfo
from engine.planning.memory.hyper_parameters import MissingNumberError, number

Backend = Literal["all", "cuda", "vulkan"]


class Kernels(Struct, frozen=True):
    """Kernels that a device has.

    `backend`: backend that has the kernels; "all" for RPC, which accepts every operation.
    `largest_bytes`: largest tensor that the kernels support; None for any size.
    `mixes_streams`: whether there is a kernel that mixes residual streams (`hc_comb`).
    """

    backend: Backend = "all"
    largest_bytes: int | None = None
    mixes_streams: bool = True


ALL_KERNELS = Kernels()

_CONVOLUTIONS = ("ssm_conv1d.weight", "shortconv.conv.weight")
_SCAN = "ssm_a"
_RWKV6_STEP = "time_mix_first.weight"
_RWKV6_BYTES = 4 * (123 * 123) * (123 + 123 * 123)
"""Bytes of the result of the RWKV 6 operation with which llama.cpp tests a device (`weight_buft_supported`).

The operation has 123 heads of 123 elements, 123 tokens and 123 sequences.
"""
_NOT_MULTIPLIED: dict[Backend, frozenset[str]] = {
    "all": frozenset(),
    "cuda": frozenset({"TQ1_0", "TQ2_0", "F64", "I8", "I16", "I64"}),
    "vulkan": frozenset({"F64", "I8", "I16", "I64"}),
}
_CUDA_THREADS = 128
"""Block size of CUDA's convolution and scan kernels; the number of channels must be a multiple of it."""
_ASKED_TOKENS = 512
"""Number of tokens in the matrix product with which llama.cpp tests a device (`weight_buft_supported`)."""
_EXPERTS = "exps"


def find_unsupported(model: ModelFile, architecture: Architecture | None, kernels: Kernels) -> frozenset[str]:
    """Return the names of the weights that llama.cpp puts in host memory because a device has no kernel for them.

    A tied embedding is included if the device cannot multiply with it.
    """
    if kernels == ALL_KERNELS:
        return frozenset()
    scans = architecture is not None and _scans(architecture)
    tensors = chain(model.global_tensors, *(block.tensors for block in model.blocks))
    return frozenset(tensor.name for tensor in tensors if _is_unsupported(model, tensor, kernels, scans=scans))


def is_too_large(tensor: TensorInfo, kernels: Kernels) -> bool:
    """Return whether a tensor is too large for every kernel of a device, `get_rows` included."""
    return kernels.largest_bytes is not None and tensor.size_bytes > kernels.largest_bytes


def _scans(architecture: Architecture) -> bool:
    """Return whether the architecture uses the weight `ssm_a` in Mamba's scan (`ggml_ssm_scan`).

    Gated delta nets have this weight too, but only multiply with it.
    """
    rule = architecture.recurrence
    return rule is not None and rule.layers != "interval" and rule.state in ("scan", "grouped_scan")


def _is_unsupported(model: ModelFile, tensor: TensorInfo, kernels: Kernels, *, scans: bool) -> bool:
    # Tensors of one dimension are norms and biases, which are in no matrix product.
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
    """Return the bytes of the largest tensor in the matrix product that llama.cpp uses to test a device.

    llama.cpp asks the device whether it supports the product of this weight with an input. The tensors are the weight,
    the input, and the result for each used expert.
    """
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
"""Multiple to which CUDA-like backends pad the elements of quantised rows: `MATRIX_ROW_PADDING` in common.cuh.

It is used for:
- weights (`row_padding_bytes` in `tensors.py`), their parts in split modes row (`row_slices`) and tensor
  (`padded_bytes`), and copies of them for op offload (`WeightFacts.padding_bytes` in
  `compute_graph/building/layer.py`);
- KV caches (`CacheTensor.size_bytes` in `kv_cache.py`);
- results (`_cuda_bytes` in `compute_graph/devices.py`) and CUDA's pools (`_mmq_bytes` in `cuda_pools.py`).

It is tested by `test_row_padding.py`, `test_kv_cache.py` and `test_row_split.py` in `tests/engine/planning/memory`, and
compared with llama.cpp's own numbers by `test_weights.py` and `test_estimate_truth.py` there.
`test_cuda_pools.py` checks bounds of the pools.
`tests/engine/cuda/test_remote_cards.py` loads such rows on cards (`--backend cuda`). `tests/zoo/simdev.c` and
`tests/data/row_split/record.py` have constants of their own.
"""


class SizeRule(Struct, frozen=True):
    """Rules for the size of a buffer with several tensors.

    `alignment_bytes`: the size of each tensor is rounded up to a multiple of this.
    `pads_rows`: whether quantised rows are padded to `ROW_PADDING` elements.
    `kernels`: kernels of the device; weights without a kernel are not in the buffer.
    """

    alignment_bytes: int
    pads_rows: bool = False
    kernels: Kernels = ALL_KERNELS


class HostBuffer(Struct, frozen=True):
    """A ggml buffer type in host memory.

    `alignment_bytes`: alignment of tensors in a buffer of the type.
    `extra_bytes`: bytes of a buffer in addition to the requested ones.
    `max_buffer_bytes`: largest buffer; None for any size.
    """

    alignment_bytes: int = 32
    extra_bytes: int = 0
    max_buffer_bytes: int | None = None

    def of(self, size_bytes: int, n_parts: int = 1) -> int:
        """Return the bytes of `n_parts` buffers that together have room for `size_bytes`.

        0 if `size_bytes` is 0, because then there is no buffer.
        """
        return size_bytes + n_parts * self.extra_bytes if size_bytes else 0


PLAIN_HOST = HostBuffer()


class BackendTraits(Struct, frozen=True):
    """Properties of a backend that memory forecasts need.

    `pinned_host`: whether the backend has a host buffer type for pinned memory, which `pinned` describes.
    `op_offload`: whether it computes large batches even if their weights are in host memory.
    `converts_kv`: whether flash attention makes F16 copies of a KV cache of another type.
    `reorders`: whether it computes nodes in another order (`graph_optimize`).
    `fuses`: whether it keeps the sources of fused expert nodes allocated (`graph_optimize` of CUDA).
    `max_buffer_bytes`: largest buffer; larger ones are divided. None for any size.
    `has_pools`: whether `cuda_pools.py` can compute the memory that the backend allocates during generation.
    `overhead_bytes`: bytes that a process uses on the device before its first buffer: a rough guess, which measurements
    of loads replace (`engine/planning/fit/calibration.py`).
    """

    size_rule: SizeRule
    pinned_host: bool = False
    pinned: HostBuffer = PLAIN_HOST
    op_offload: bool = False
    converts_kv: bool = False
    reorders: bool = False
    fuses: bool = False
    has_pools: bool = False
    max_buffer_bytes: int | None = None
    overhead_bytes: int = 0


HOST_RULE = SizeRule(alignment_bytes=32)
CPU_TRAITS = BackendTraits(HOST_RULE)

# A worker's buffers follow the rules of its device. It reports alignment and largest buffer. A paired machine tells its
# backend too, and so the row padding (`_remote_traits`).
RPC_TRAITS = BackendTraits(HOST_RULE)

_CUDA_LIKE = BackendTraits(
    SizeRule(alignment_bytes=128, pads_rows=True, kernels=Kernels("cuda")),
    pinned_host=True,
    op_offload=True,
    converts_kv=True,
    fuses=True,
    overhead_bytes=400 * MIB,
)

# Vulkan aligns to minStorageBufferOffsetAlignment, and on the host to minMemoryMapAlignment: 16 to 256 and 64 to 4096
# on known drivers. Buffers have at most 1 GiB (`suballocation_block_size`). Device discovery replaces these defaults.
_VULKAN = BackendTraits(
    SizeRule(256, kernels=Kernels("vulkan")),
    pinned_host=True,
    pinned=HostBuffer(64, extra_bytes=32, max_buffer_bytes=GIB),
    op_offload=True,
    reorders=True,
    max_buffer_bytes=GIB,
    overhead_bytes=128 * MIB,
)
_METAL = BackendTraits(HOST_RULE, op_offload=True, overhead_bytes=64 * MIB)
_OTHER = BackendTraits(SizeRule(128), overhead_bytes=128 * MIB)

TRAITS: dict[str, BackendTraits] = {
    "CPU": CPU_TRAITS,
    "RPC": RPC_TRAITS,
    "CUDA": replace(_CUDA_LIKE, has_pools=True),
    "HIP": _CUDA_LIKE,
    "ROCm": _CUDA_LIKE,
    "MUSA": _CUDA_LIKE,
    "SYCL": replace(_CUDA_LIKE, fuses=False),
    "Vulkan": _VULKAN,
    "Metal": _METAL,
    "MTL": _METAL,
}


def backend_traits(device: Device) -> BackendTraits:
    """Return the properties of the device's backend, with the values that the device reports.

    For an unknown backend the properties are cautious guesses.
    """
    if device.is_host:
        return CPU_TRAITS
    if device.is_rpc:
        remote = device.remote
        traits = RPC_TRAITS if remote is None else _remote_traits(remote.backend, remote.overhead_bytes or 0)
        # The RPC client asks the worker about no kernel and no host buffer (`ggml_backend_rpc_device_supports_op`).
        # What the worker's device cannot compute is refused by `lent_gap` and `lent_too_large`.
        reported = BufferFacts(
            alignment_bytes=device.buffers.alignment_bytes, largest_buffer_bytes=device.buffers.largest_buffer_bytes
        )
        return _with_reported(traits, reported)
    return _with_reported(TRAITS.get(device.backend, _OTHER), device.buffers)


@lru_cache(maxsize=64)
def _remote_traits(backend: str, overhead_bytes: int) -> BackendTraits:
    """Return the properties of an RPC worker whose device computes with `backend`.

    The scheduler of the client treats the device as RPC: it supports every operation, and there is no host buffer, no
    op offload and no reordering of nodes. The client asks the worker for the sizes of quantised tensors
    (`ggml_backend_rpc_buffer_type_get_alloc_size`), so rows are padded as on the worker's device.

    `overhead_bytes`: measured bytes that a load takes on the worker's device in addition to llama.cpp's buffers; 0 if
    not measured. The overhead of the worker's own process is not included: it is already missing from the free memory
    that the worker reports.
    """
    traits = TRAITS.get(backend)
    if traits is None:
        return replace(RPC_TRAITS, overhead_bytes=overhead_bytes)
    return replace(
        RPC_TRAITS,
        size_rule=SizeRule(traits.size_rule.alignment_bytes, pads_rows=traits.size_rule.pads_rows),
        max_buffer_bytes=traits.max_buffer_bytes,
        has_pools=traits.has_pools,
        overhead_bytes=overhead_bytes,
    )


@lru_cache(maxsize=64)
def _with_reported(traits: BackendTraits, reported: BufferFacts) -> BackendTraits:
    """Return `traits` with the values that the device reported; values that are None in `reported` do not change."""
    rule, pinned = traits.size_rule, traits.pinned
    return replace(
        traits,
        size_rule=replace(
            rule,
            alignment_bytes=reported.alignment_bytes or rule.alignment_bytes,
            kernels=replace(
                rule.kernels, largest_bytes=reported.largest_tensor_bytes, mixes_streams=reported.mixes_streams
            ),
        ),
        pinned=replace(
            pinned,
            alignment_bytes=reported.host_alignment_bytes or pinned.alignment_bytes,
            max_buffer_bytes=reported.largest_buffer_bytes or pinned.max_buffer_bytes,
        ),
        max_buffer_bytes=reported.largest_buffer_bytes or traits.max_buffer_bytes,
    )


def supports_mapping(device: Device) -> bool:
    """Return whether llama.cpp may map the model file in load mode "auto" if a model uses this device.

    False for integrated GPUs.
    """
    return device.kind != "igpu" or device.backend not in ("CUDA", "HIP", "ROCm", "MUSA", "Vulkan")
