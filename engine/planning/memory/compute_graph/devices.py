"""The scheduler's backends for the devices of a layout: supported operations, and sizes of tensors in their memory.

Mirrors `ggml_backend_dev_supports_op` and `ggml_backend_buft_get_alloc_size` of the backends. In split mode tensor the
scheduler has one backend for all devices with a share (ggml-backend-meta.cpp), and each of these devices has a buffer
for the whole graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from engine.base.values import replace
from engine.devices.device import CPU_ID
from engine.model.gguf.tensor_table import TYPES_BY_NAME
from engine.planning.layout.cache_rules import CUDA_FLASH_HEAD_SIZES
from engine.planning.layout.layout import Run
from engine.planning.memory.backends import ROW_PADDING, BackendTraits, Kernels, SizeRule
from engine.planning.memory.compute_graph.ggml.graph import Tensor, is_contiguous, row_size
from engine.planning.memory.compute_graph.ggml.scheduler import HOST, Backend
from engine.planning.memory.kv_cache import pad
from engine.planning.memory.placement import Placement

_VULKAN_STREAMS = 4
"""Number of residual streams that Vulkan's kernels for hyper-connections support."""

_CUDA_FLASH_TYPES = frozenset({"f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0"})
"""KV cache types that CUDA's flash attention and indexer support.

Source: `ggml_cuda_fattn_kv_type_supported`, `ggml_cuda_lightning_indexer_supported`.
"""

_CUDA_VECTOR_TYPES = frozenset({"f16", "bf16", "q4_0", "q8_0"})
"""KV cache types for which CUDA has vector kernels of flash attention if K and V have one type (`GGML_CUDA_FA_QUANTS`).
"""


def backend_devices(placement: Placement) -> tuple[str, ...]:
    """Return the device id of each backend of the scheduler: one for each entry of the device list, the CPU last."""
    return (*(entry for entry in placement.entries if entry == CPU_ID or entry in placement.traits), CPU_ID)


def backends_of(entries: Sequence[tuple[str, BackendTraits]]) -> list[Backend]:
    """Return the scheduler's backends.

    `entries`: (name of the buffer type, properties of the backend) for each entry of the device list, the CPU last.
    """
    traits = {name: found for name, found in entries if name != HOST}
    return [_backend(name, found, traits) for name, found in entries]


def _backend(entry: str, found: BackendTraits, traits: dict[str, BackendTraits]) -> Backend:
    if entry == HOST:
        rule, max_buffer_bytes = found.size_rule, found.max_buffer_bytes
        return Backend(
            HOST, True, rule.alignment_bytes, None, frozenset(), False, _n_bytes, max_buffer_bytes=max_buffer_bytes
        )
    rule = found.size_rule
    unreadable: frozenset[str] = frozenset()
    if found.converts_kv:
        # CUDA's supports_buft accepts only the device's own buffer type, so tensors of another device are copied.
        unreadable = frozenset(name for name, each in traits.items() if each.converts_kv and name != entry)
    supports_op: Callable[[Tensor], bool] | None = _cuda_supports_op if found.converts_kv else None
    if rule.kernels.backend == "vulkan":
        supports_op = _vulkan_supports_op(rule.kernels)
    alloc_size = _cuda_bytes if rule.pads_rows else _n_bytes
    return Backend(
        entry,
        False,
        rule.alignment_bytes,
        supports_op,
        unreadable,
        found.op_offload,
        alloc_size,
        reorders=found.reorders,
        fuses=found.fuses,
        max_buffer_bytes=found.max_buffer_bytes,
    )


def _n_bytes(tensor: Tensor) -> int:
    return tensor.n_bytes


def _cuda_supports_op(node: Tensor) -> bool:
    """Return whether CUDA has a kernel for `node` (`ggml_backend_cuda_device_supports_op`)."""
    if node.op == "flash_attn":
        q, k, v = node.src[:3]
        head, out, group = k.ne[0], v.ne[0], q.ne[2] // k.ne[2]
        if not {k.type, v.type} <= _CUDA_FLASH_TYPES:
            return False
        # The kernels take K and V heads of one size, or one of the three pairs below.
        if head in CUDA_FLASH_HEAD_SIZES:
            return head == out and (head != 512 or group >= 2)
        return (
            ((head, out) == (192, 128) and group % 8 == 0)
            or ((head, out) == (320, 256) and group % 32 == 0)
            or ((head, out) == (576, 512) and group >= 2)
        )
    # CUDA's kernel assumes that the channels (`d_inner`) are a multiple of its 128 threads.
    if node.op == "ssm_conv":
        return node.src[0].ne[1] % 128 == 0
    if node.op == "mul_mat_id":
        return not node.is_precise
    if node.op == "lightning_indexer":
        q, k = node.src[:2]
        return q.ne[0] == 128 and q.ne[1] in (32, 64) and k.type in _CUDA_FLASH_TYPES
    # IQ4_NL of a KV cache: rows are read in blocks of 256, and there is no copy to another type.
    if node.op == "get_rows":
        return node.src[0].type != "iq4_nl" or node.src[0].ne[0] % 256 == 0
    if node.op == "cpy" and len(node.src) == 1:
        return node.src[0].type != "iq4_nl" or node.type == "iq4_nl"
    if node.op == "ssm_scan":
        state, decay, matrix = node.src[0], node.src[3], node.src[4]
        # Mamba 2 has one decay for each head, Mamba 1 one for each element of the state.
        if decay.ne[0] == 1:
            return state.ne[0] in (96, 128, 256) and state.ne[1] % 16 == 0
        return state.ne[0] == 16 and state.ne[1] == 1 and state.ne[2] % 128 == 0 and matrix.ne[1] == 1
    return True


@lru_cache(maxsize=64)
def _vulkan_supports_op(kernels: Kernels) -> Callable[[Tensor], bool]:
    """Return a function that returns whether a Vulkan device with these kernels can compute a node (`supports_op`)."""
    largest_bytes = kernels.largest_bytes

    def supports_op(node: Tensor) -> bool:
        # Sources count too: `ggml_backend_vk_device_supports_op` checks each of them.
        too_large = largest_bytes is not None and any(each.n_bytes > largest_bytes for each in (node, *node.src))
        if too_large or (node.op == "hc_comb" and not kernels.mixes_streams):
            return False
        return _has_vulkan_kernel(node)

    return supports_op


def _has_vulkan_kernel(node: Tensor) -> bool:
    """Return whether every Vulkan device has a kernel for `node` (`ggml_backend_vk_device_supports_op`)."""
    if node.op == "flash_attn":
        k, v = node.src[1:3]
        return k.ne[0] % 8 == 0 and v.ne[0] % 8 == 0 and (k.type == "bf16") == (v.type == "bf16")
    if node.op == "mul_mat":
        matrix, source = node.src[:2]
        if matrix.ne[3] != source.ne[3]:
            return False
        return matrix.is_weight or TYPES_BY_NAME[matrix.type].block_elements == 1 or _has_whole_rows(matrix)
    if node.op == "mul_mat_id":
        return not node.is_precise
    if node.op in ("cont", "cpy") and len(node.src) == 1 and TYPES_BY_NAME[node.type].block_elements > 1:
        # A copy within a quantised type, as of a transposed V cache without flash attention, must be contiguous.
        return node.src[0].type != node.type or is_contiguous(node.src[0])
    if node.op in ("weighted_sum", "hc_pre", "hc_post"):
        return node.src[int(node.op == "hc_post")].ne[1] == _VULKAN_STREAMS
    if node.op == "delta_net":
        return node.src[2].ne[0] in (16, 32, 64, 128)
    if node.op == "ssm_scan":
        state, decay = node.src[0], node.src[3]
        return decay.ne[0] == 1 and state.ne[0] in (128, 256) and state.ne[1] % 16 == 0
    return True


def _has_whole_rows(tensor: Tensor) -> bool:
    """Return whether the tensor's rows are adjacent in memory (`ggml_vk_dim01_contiguous`)."""
    return tensor.nb[1] == row_size(tensor.type, tensor.ne[0]) and (
        tensor.ne[3] == 1 or tensor.nb[3] == tensor.nb[2] * tensor.ne[2]
    )


def _cuda_bytes(tensor: Tensor) -> int:
    """Return the bytes of `tensor` on CUDA (`ggml_backend_cuda_buffer_type_get_alloc_size`).

    Rows of quantised tensors are padded. If the KV cache is not F16, the result tensor of flash attention has room for
    F16 copies of K and V.
    """
    size = tensor.n_bytes + tensor.padding_bytes
    if tensor.op == "flash_attn":
        # Without a kernel there is no copy. A local card then leaves the node to the CPU, but the RPC client places
        # every node on a worker, and asks it for the size.
        return _flash_bytes(tensor) if _cuda_supports_op(tensor) else size
    if tensor.type in TYPES_BY_NAME and TYPES_BY_NAME[tensor.type].block_elements > 1 and tensor.ne[0] % ROW_PADDING:
        size += row_size(tensor.type, ROW_PADDING - tensor.ne[0] % ROW_PADDING)
    return size


def _flash_bytes(node: Tensor) -> int:
    q, k, v = node.src[:3]
    size = node.n_bytes
    # With one or two tokens the vector kernels read the cache directly, without an F16 copy.
    if q.ne[1] <= 2 and k.type in _CUDA_VECTOR_TYPES and v.type == k.type:
        return size
    for cache, skip in ((k, False), (v, v.view_src is not None and v.view_src is k.view_src)):
        if cache.type != "f16" and not skip:
            ne = cache.ne
            # Each copy begins at a multiple of 128 bytes, after the result.
            size = pad(size, 128) + 2 * ne[0] * ne[1] * ne[2] * ne[3]
    return size


def as_one_device(placement: Placement) -> Placement:
    """Return a copy of `placement` (of split mode tensor) in which one device replaces all devices with a share.

    The new device follows the CPU layers at the front. Its id is made of the ids of all these devices.
    """
    name = "+".join(placement.entries)
    return replace(
        placement,
        runs=(Run(name, placement.leading, placement.n_layers - 1),),
        output_device=name,
        entries=(name,),
        traits={name: _shared_traits([placement.traits[entry] for entry in placement.entries])},
        shares=(),
    )


def _shared_traits(members: list[BackendTraits]) -> BackendTraits:
    """Return the backend properties of the device that replaces several devices in split mode tensor.

    Its alignment is the largest of theirs. It pads rows, or converts KV caches, if one of them does.

    `members`: backend properties of the replaced devices.
    """
    return BackendTraits(
        SizeRule(
            alignment_bytes=max(traits.size_rule.alignment_bytes for traits in members),
            pads_rows=any(traits.size_rule.pads_rows for traits in members),
        ),
        converts_kv=any(traits.converts_kv for traits in members),
    )
