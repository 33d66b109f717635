"""Memory that CUDA allocates on a card during generation, in addition to llama.cpp's buffers.

ggml's CUDA backend has a pool for temporary tensors of one operation. The pool grows to the size that the largest
operation needs, and never shrinks (`ggml_cuda_pool_vmm`). A card that computes with cuBLAS also has a workspace. Most
of this memory is allocated in the warm-up, which computes a full micro batch. If flash attention is off, the pool also
grows while the context fills.

Sizes follow the sources of llama.cpp; each function names the one that it mirrors. They are valid for cards from Turing
on with virtual memory, as in NVIDIA's drivers. The number of multiprocessors and cuBLAS's workspace depend on the card.
Here they are those of the largest card, so the result is an upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

from engine.base.units import MIB
from engine.devices.device import CPU_ID
from engine.model.gguf.model_file import ModelFile, TensorInfo
from engine.planning.memory.backends import ROW_PADDING
from engine.planning.memory.hyper_parameters import HyperParameters
from engine.planning.memory.kv_cache import ContextShape, pad, window_cells
from engine.planning.memory.placement import Placement
from engine.planning.memory.tensor_split import MemberTables
from engine.planning.settings.context_settings import ContextSettings

_POOL_STEP = 2 * MIB
"""Bytes by which a pool grows: granularity of virtual memory on NVIDIA's cards."""
_BLOCKS_BYTES = 4 * _POOL_STEP
"""Bytes added for the partly used last block of each buffer: weights, KV cache, recurrent state, compute buffer."""
_ALIGNMENT = 128
_CUBLAS_BYTES = 32 * MIB
"""cuBLAS workspace from Hopper on; earlier cards have 4 MiB (`ggml_backend_cuda_context::cublas_handle`)."""
_MULTIPROCESSORS = 192
"""Assumed number of multiprocessors of a card; no card has more."""
_TILE_ELEMENTS = 128 * 128
"""Elements of the largest tile of partial sums in a matrix product (`launch_mul_mat_q`, stream-k)."""
_FLASH_COLUMNS, _FLASH_BLOCKS, _LARGE_HEAD = 64, 4, 256
"""Launch sizes of flash attention (`launch_fattn`).

(Columns of a tile, CUDA blocks on a multiprocessor, elements of a head above which there are half as many blocks).
"""
_FLOATS = {"F32": 4, "F16": 2, "BF16": 2}
_FLOAT_CACHES = ("f32", "f16", "bf16")
_WITHOUT_MMQ = frozenset({"IQ1_M", "Q8_K"})
"""Quantised types that CUDA multiplies as F16 (`ggml_cuda_should_use_mmq`)."""
_MOST_TOKENS_OF_MMF = 16
_SORTED_BYTES = 64 * MIB
"""Largest size, in bytes, of the rows that one call sorts (`argsort_f32_i32_cuda_cub_chunk_nrows`)."""
_SORT_BUFFERS = 6
"""Number of buffers for sorting: unsorted and sorted keys, unsorted and sorted indices, the result, and one for CUB."""
_SCAN_CHUNK = 256
_NO_PRODUCT = ("conv1d.weight", "ssm_a", "ssm_d", "conv.weight", "rope_freqs.weight", "rope_factors_long.weight",
               "rope_factors_short.weight", "tid2eid.weight")  # fmt: skip
_REDUCED_BYTES = 32 * MIB
"""Bytes of the buffer in which two cards add partial results (`GGML_CUDA_AR_COPY_MAX_BYTES`)."""


class PoolBytes(Struct, frozen=True):
    """Bytes that CUDA's pool and workspace take on one device, in addition to llama.cpp's buffers.

    `late_bytes`: part of `total_bytes` that is allocated only while the context fills.
    """

    total_bytes: int = 0
    late_bytes: int = 0


class CudaPools:
    """Computes the sizes of CUDA's pools and workspaces for one model with one set of context settings."""

    def __init__(self, model: ModelFile, hyper: HyperParameters, shape: ContextShape, context: ContextSettings) -> None:
        self._hyper, self._shape, self._context = hyper, shape, context
        n_used = model.hyper_parameter("expert_used_count")
        counts = n_used if isinstance(n_used, tuple) else (n_used,)
        self._n_used = max((count for count in counts if isinstance(count, int)), default=0)
        self._matrices = [[tensor for tensor in block.tensors if _is_matrix(tensor)] for block in model.blocks]
        self._uses_cublas = [any(not _has_mmq(tensor) for tensor in block) for block in self._matrices]
        self._matrix_bytes = [
            max((self._product_bytes(tensor, shape.n_ubatch) for tensor in block), default=0)
            for block in self._matrices
        ]
        names = {tensor.name: tensor for tensor in model.global_tensors}
        self._output = names.get("output.weight") or names.get("token_embd.weight")
        self._state_bytes = self._scan_bytes(model)
        # Elements of a row that an indexer sorts: cells, or blocks of them for each of its heads.
        self._sorted = shape.n_cells
        block, heads = (model.hyper_parameter(f"attention.indexer.{key}") for key in ("block_size", "head_count"))
        if isinstance(block, int) and isinstance(heads, int) and block > 0:
            self._sorted = -(-shape.n_cells // block) * heads
        self._attention: dict[bool, list[tuple[int, int]]] = {}
        self._sliced: tuple[MemberTables, list[list[int]]] | None = None

    def of(
        self, placement: Placement, members: MemberTables | None = None, *, flash: bool, n_outputs: int = 0
    ) -> dict[str, PoolBytes]:
        """Return the bytes of CUDA's pools and workspaces on each device during generation, by device id.

        Devices whose pools cannot be computed are left out.

        `members`: slices of weights in split mode tensor; None in other modes.
        `flash`: whether flash attention is used.
        `n_outputs`: largest number of output rows of a batch; raised to the number of sequences if it is smaller.
        """
        n_outputs = max(n_outputs, self._shape.n_sequences)
        found: dict[str, PoolBytes] = {}
        for device in dict.fromkeys(placement.entries):
            traits = placement.traits.get(device)
            if device == CPU_ID or traits is None or not traits.has_pools:
                continue
            layers = self._layers_of(device, placement)
            is_last = bool(placement.shares) or device == placement.output_device
            matrix_bytes = (
                self._matrix_bytes if members is None else self._slices(members)[placement.entries.index(device)]
            )
            fixed_bytes = max((matrix_bytes[layer] for layer in layers), default=0)
            if any(self._hyper.recurrent[layer] for layer in layers):
                fixed_bytes = max(fixed_bytes, self._state_bytes)
            if is_last and self._output is not None:
                # The last token of each sequence has an output, and each drafted token.
                fixed_bytes = max(fixed_bytes, self._product_bytes(self._output, n_outputs))
            soon_bytes, full_bytes = self._soon_and_full(layers, flash=flash)
            # Each entry of the device list has a backend of its own, and so its own pool and cuBLAS workspace.
            n_pools = placement.entries.count(device)
            pool_bytes = n_pools * pad(max(fixed_bytes, full_bytes), _POOL_STEP)
            late_bytes = pool_bytes - n_pools * pad(max(fixed_bytes, soon_bytes), _POOL_STEP)
            besides_bytes = _BLOCKS_BYTES + self._reduction_bytes(len(placement.shares))
            multiplies = any(self._uses_cublas[layer] for layer in layers) or (full_bytes > 0 and not flash)
            if multiplies or (is_last and self._output is not None and not _has_mmq(self._output)):
                besides_bytes += n_pools * _CUBLAS_BYTES
            found[device] = PoolBytes(pool_bytes + besides_bytes, late_bytes)
        return found

    def _layers_of(self, device: str, placement: Placement) -> list[int]:
        """Return the indices of the layers that a device may compute, fully or in part."""
        n_layers = min(len(self._matrices), self._hyper.n_layers)
        # Moved weights are computed where they are, and those in host memory on a device if batches are large.
        if placement.shares or placement.row_shares or placement.overrides:
            return list(range(n_layers))
        found = [each for run in placement.runs if run.device == device for each in range(run.first, run.last + 1)]
        if placement.op_offload:
            found += range(placement.leading)
            found += [each for run in placement.runs if run.device == CPU_ID for each in range(run.first, run.last + 1)]
        return [layer for layer in found if layer < n_layers]

    def _slices(self, members: MemberTables) -> list[list[int]]:
        """Return the temporary bytes of matrix products in split mode tensor: for each device, the bytes of each layer.

        `members`: slices of the weights on the devices.
        """
        if self._sliced is None or self._sliced[0] is not members:
            n_tokens = self._shape.n_ubatch
            found: list[list[int]] = []
            for block in self._matrices:
                most: list[int] = []
                for tensor in block:
                    slices = members.slices(tensor)
                    most = most or [0] * len(slices)
                    for at, size_bytes in enumerate(slices):
                        part = min(1.0, size_bytes / max(1, tensor.size_bytes))
                        most[at] = max(most[at], self._product_bytes(tensor, n_tokens, part))
                found.append(most)
            n_members = max(map(len, found), default=0)
            by_member = [[most[at] if most else 0 for most in found] for at in range(n_members)]
            self._sliced = (members, by_member)
        return self._sliced[1]

    # ------------------------------------------------------------------ products with weights

    def _product_bytes(self, tensor: TensorInfo, n_tokens: int, part: float = 1.0) -> int:
        """Return the temporary bytes of the product of a weight with `n_tokens` tokens.

        `part`: share of the weight on the device.
        """
        n_in, n_out = tensor.shape[0], tensor.shape[1]
        if len(tensor.shape) > 2 and tensor.shape[2] > 1:
            if "_exps." in tensor.name and self._n_used:
                return self._experts_bytes(tensor, n_tokens, part)
            # Matrices of the heads of compressed attention: a product for each.
            n_tokens *= tensor.shape[2]
        if _has_mmq(tensor):
            return _mmq_bytes(n_in, n_tokens)
        if n_tokens <= _MOST_TOKENS_OF_MMF and tensor.type_name in _FLOATS:
            return 0
        return _cublas_bytes(tensor.type_name, math.ceil(tensor.n_elements * part), n_in, n_out, n_tokens)

    def _experts_bytes(self, tensor: TensorInfo, n_tokens: int, part: float) -> int:
        """Return the temporary bytes of the product of experts' weights with tokens (`ggml_cuda_mul_mat_id`).

        `part`: share of the weights on the device.
        """
        n_in, n_out = tensor.shape[0], tensor.shape[1]
        n_rows = n_tokens * self._n_used
        # `ids_src1`, `ids_dst` and `expert_bounds`, three int32 arrays of `ggml_cuda_mul_mat_q`.
        if _has_mmq(tensor):
            return _mmq_bytes(n_in, n_rows) + 3 * pad(4 * n_rows, _ALIGNMENT)
        # `ggml_cuda_should_use_mmf`: small batches of floats have a kernel.
        if tensor.type_name in _FLOATS and n_tokens <= (512 if n_out <= 1024 else 128):
            return 3 * pad(4 * n_rows, _ALIGNMENT)
        of_value = _FLOATS.get(tensor.type_name, 4)
        sorted_bytes = 8 * n_rows + n_rows * n_in * of_value + 4 * n_rows * n_out
        # Rows are sorted by expert, then each expert's are multiplied: all tokens at most.
        each_bytes = _cublas_bytes(tensor.type_name, math.ceil(n_in * n_out * part), n_in, n_out, n_tokens)
        return sorted_bytes + each_bytes + 4 * _ALIGNMENT

    # ------------------------------------------------------------------ attention and states

    def _soon_and_full(self, layers: Sequence[int], *, flash: bool) -> tuple[int, int]:
        """Return (temporary bytes of attention in the warm-up, temporary bytes with a full context).

        Each number is that of the layer that needs most.
        """
        if not self._context.offload_kqv:
            return 0, 0
        found = self._attention.get(flash)
        if found is None:
            cells, hyper = self._shape.n_cells, self._hyper
            few = min(cells, pad(self._shape.n_ubatch, 256))
            found = self._attention[flash] = [
                (
                    self._attention_bytes(index, few, flash=flash),
                    max(self._attention_bytes(index, cells, flash=flash), self._indexer_bytes(index)),
                )
                for index in range(hyper.n_layers)
            ]
        soon_bytes, full_bytes = (max((found[layer][at] for layer in layers), default=0) for at in (0, 1))
        return soon_bytes, full_bytes

    def _attention_bytes(self, index: int, n_cells: int, *, flash: bool) -> int:
        """Return the temporary bytes of a layer's attention over `n_cells` cells of the KV cache."""
        hyper = self._hyper
        if not hyper.n_head[index] or not hyper.n_head_kv[index]:
            return 0
        if flash:
            widest = max(hyper.head_v[index], hyper.head_k[index])
            n_blocks = _MULTIPROCESSORS * (_FLASH_BLOCKS if widest <= _LARGE_HEAD else _FLASH_BLOCKS // 2)
            # `dst_tmp_meta` of `launch_fattn`: 2 + DV / 2 values of 8 bytes (`float2`) for each column of a block.
            return n_blocks * _FLASH_COLUMNS * 8 * (2 + widest // 2) if widest else 0
        if hyper.sliding[index]:
            n_cells = min(n_cells, window_cells(hyper, self._context))
        return self._kqv_bytes(index, n_cells)

    def _kqv_bytes(self, index: int, n_cells: int) -> int:
        """Return the temporary bytes of KQ and KQV in layer `index` without flash attention.

        Mirrors `ggml_cuda_mul_mat_cublas_impl`. `n_cells`: number of cells that the layer attends to.
        """
        hyper, n_tokens, n_streams = self._hyper, self._shape.n_ubatch, self._shape.n_streams
        n_head, head_k, head_v = hyper.n_head[index], hyper.head_k[index], hyper.head_v[index]
        # KQ is computed in F32, for which K is converted; for a quantised K, Q is. KQ is converted to the type of V,
        # and the result back.
        if self._context.type_k in _FLOAT_CACHES:
            k_bytes = 0 if self._context.type_k == "f32" else 4 * n_cells * n_streams * head_k * hyper.n_head_kv[index]
        else:
            k_bytes = _mmq_bytes(head_k, n_tokens * n_head)
        if self._context.type_v == "f32":
            return k_bytes
        out_bytes = 2 * (head_k if hyper.latent else head_v) * n_tokens * n_head
        # 24: three pointers of 8 bytes for each product of a batch (`ptrs_src`, `ptrs_dst`).
        v_bytes = 2 * n_cells * n_tokens * n_head + out_bytes + 24 * n_head * n_streams
        return max(k_bytes, v_bytes) + 4 * _ALIGNMENT

    def _indexer_bytes(self, index: int) -> int:
        """Return the temporary bytes that a layer's indexer needs to select cells (`ggml_cuda_op_top_k`)."""
        if not self._hyper.indexer_widths[index]:
            return 0
        return _SORT_BUFFERS * min(_SORTED_BYTES, 4 * self._sorted * self._shape.n_ubatch)

    def _scan_bytes(self, model: ModelFile) -> int:
        """Return the temporary bytes of Mamba 2's scan in chunks (`ssm_scan_ssd_f32_cuda`)."""
        values = [model.hyper_parameter(f"ssm.{key}") for key in ("inner_size", "state_size", "time_step_rank")]
        inner, state, n_head = (value if isinstance(value, int) else 0 for value in values)
        groups = model.hyper_parameter("ssm.group_count")
        if not any(self._hyper.recurrent) or not (inner and state and n_head) or not isinstance(groups, int):
            return 0
        n_sequences, n_tokens = self._shape.n_sequences, self._shape.n_ubatch
        in_chunk = 4 * _SCAN_CHUNK * groups + 2 * inner + 6 * state * n_head + 2 * _SCAN_CHUNK * n_head
        return 8 * n_tokens * n_head + _SCAN_CHUNK * in_chunk * n_sequences

    def _reduction_bytes(self, n_members: int) -> int:
        """Return the bytes of the buffers in which devices of split mode tensor add partial results
        (ggml-backend-meta.cpp).
        """
        if n_members < 2:
            return 0
        partial_bytes = 4 * self._hyper.n_embd * self._shape.n_ubatch * max(1, self._n_used)
        # They grow with the batches, and a larger one is there before the smaller one is freed.
        n_buffers = math.ceil(math.log2(n_members)) + 1
        return (_REDUCED_BYTES if n_members == 2 else 0) + n_buffers * partial_bytes


def _is_matrix(tensor: TensorInfo) -> bool:
    """Return whether a weight is used in a matrix product with tokens."""
    return len(tensor.shape) > 1 and min(tensor.shape[:2]) > 1 and not tensor.name.endswith(_NO_PRODUCT)


def _has_mmq(tensor: TensorInfo) -> bool:
    return tensor.type_name not in _FLOATS and tensor.type_name not in _WITHOUT_MMQ


def _mmq_bytes(n_in: int, n_rows: int) -> int:
    """Return the temporary bytes of `ggml_cuda_mul_mat_q`: the input in Q8_1, and tiles of partial sums.

    `n_rows`, `n_in`: number of rows of the input, and elements of a row.
    """
    # A `block_q8_1_mmq` has 144 bytes for 128 elements; up to 128 further ones pad the last tile
    # (`get_mmq_x_max_host`). Stream-k adds an F32 tile of partial sums for each multiprocessor.
    return n_rows * pad(n_in, ROW_PADDING) * 144 // 128 + 128 * 144 + _MULTIPROCESSORS * _TILE_ELEMENTS * 4


def _cublas_bytes(type_name: str, n_weights: int, n_in: int, n_out: int, n_tokens: int) -> int:
    """Return the temporary bytes of `ggml_cuda_mul_mat_cublas`: weight, input and result in F16.

    `type_name`, `n_weights`: tensor type and number of elements of the weight.
    `n_in`, `n_out`: elements of a token's input and result.
    """
    if type_name == "F32":
        return 0
    weight_bytes = 0 if type_name in _FLOATS else 2 * n_weights
    # BF16 has its result in F32.
    result_bytes = 0 if type_name == "BF16" else 2 * n_out * n_tokens
    return weight_bytes + 2 * n_in * n_tokens + result_bytes + 3 * _ALIGNMENT
