"""State of each layer between batches: KV cache of the whole context or of a sliding window, and recurrent states.

Mirrors the constructors of `llama_kv_cache`, `llama_kv_cache_iswa` and `llama_memory_recurrent`, and the sizes that
`llama_context` computes from its parameters.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from engine.model.architectures.record import COMPRESSED_RATIOS, Architecture
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.tensor_table import TYPES_BY_NAME
from engine.planning.memory.backends import HOST_RULE, ROW_PADDING, SizeRule
from engine.planning.memory.hyper_parameters import HyperParameters, MissingNumberError, read_state
from engine.planning.settings.context_settings import ContextSettings, KvType
from engine.planning.settings.table import CONTEXT_STEP

CELL_PADDING = CONTEXT_STEP
"""Multiple to which llama.cpp rounds up the cells of a sequence (`GGML_PAD(n_ctx, 256)` in `llama_context`)."""


class ContextShape(Struct, frozen=True):
    """Sizes that llama.cpp computes from the context settings.

    `n_streams`: number of streams, the parts of the cache with cells of their own: one for each sequence, or 1 for a
    unified cache.
    `n_cells`: number of cells of one stream.
    `n_batch`, `n_ubatch`: batch sizes that are really used, in tokens.
    `n_sequences`: number of parallel sequences.
    """

    n_cells: int
    n_streams: int
    n_batch: int
    n_ubatch: int
    n_sequences: int


def pad(value: int, multiple: int) -> int:
    """Return `value` rounded up to a multiple of `multiple`."""
    return -(-value // multiple) * multiple


def context_shape(context: ContextSettings, n_ctx_train: int, *, causal: bool = True) -> ContextShape:
    """Return the sizes that `llama_context` computes from the settings.

    `causal`: False for a model whose batch may be longer than the context.
    """
    n_ctx = context.n_ctx if context.n_ctx > 0 else n_ctx_train
    n_sequences = max(1, context.n_seq_max)
    # As the constructor of `llama_context`: a causal batch is cut to the context before that is padded.
    n_batch = max(1, min(n_ctx, context.n_batch) if causal else context.n_batch)
    # For llama.cpp a micro batch of 0 means the size of the batch.
    n_ubatch = min(n_batch, context.n_ubatch if context.n_ubatch > 0 else n_batch)
    n_ctx = pad(n_ctx, CELL_PADDING)
    # Sequences with cells of their own get an equal part each, which is padded once more.
    n_cells = n_ctx if context.kv_unified else pad(max(1, n_ctx // n_sequences), CELL_PADDING)
    return ContextShape(n_cells, 1 if context.kv_unified else n_sequences, n_batch, n_ubatch, n_sequences)


def is_quantised(kv_type: KvType) -> bool:
    """Return whether a KV cache type stores elements in quantised blocks."""
    return TYPES_BY_NAME[kv_type].block_elements > 1


def row_bytes(kv_type: KvType, n_elements: int) -> int:
    """Return the bytes of `n_elements` elements in one row of the cache."""
    kind = TYPES_BY_NAME[kv_type]
    return n_elements // kind.block_elements * kind.block_bytes


class CacheTensor(Struct, frozen=True):
    """One tensor of a layer's KV cache or recurrent state: `n_rows` rows of `width` elements of the type `kind`.

    `name`: "k", "v", "indexer" (keys of the indexer), "compressed" (compressed keys), "r" and "s" (rolling and
    recurrent state), or "hashed" (state for hashed token sequences).
    """

    name: Literal["k", "v", "indexer", "compressed", "r", "s", "hashed"]
    kind: KvType
    width: int
    n_rows: int

    def size_bytes(self, rule: SizeRule) -> int:
        """Return the bytes of the tensor in a buffer. `rule`: how the buffer type pads tensors."""
        size_bytes = self.n_rows * row_bytes(self.kind, self.width)
        # Only quantised tensors are padded, as in `ggml_backend_cuda_buffer_type_get_alloc_size`.
        if rule.pads_rows and is_quantised(self.kind) and self.width % ROW_PADDING:
            size_bytes += row_bytes(self.kind, ROW_PADDING - self.width % ROW_PADDING)
        return pad(size_bytes, rule.alignment_bytes)


class LayerState(Struct, frozen=True):
    """State of one layer between batches: tensors of its KV cache, and recurrent tensors."""

    cache: tuple[CacheTensor, ...] = ()
    recurrent: tuple[CacheTensor, ...] = ()


def window_cells(hyper: HyperParameters, context: ContextSettings) -> int:
    """Return the number of cells of one stream in layers with a sliding window (`llama_kv_cache_iswa`)."""
    shape = context_shape(context, hyper.n_ctx_train, causal=hyper.causal)
    if context.swa_full:
        return shape.n_cells
    n_sequences = shape.n_sequences if context.kv_unified and not hyper.ratios else 1
    # `llama_kv_cache_iswa`: the window, and the micro batch that is written while the window is still read.
    return pad(min(shape.n_cells, hyper.window * n_sequences + shape.n_ubatch), CELL_PADDING)


def layer_states(
    hyper: HyperParameters, architecture: Architecture, context: ContextSettings
) -> tuple[LayerState, ...]:
    """Return the KV cache and the recurrent tensors of each block of the file.

    Blocks for multi-token prediction have none. Some models have KV caches for layers that are not in the file: for the
    repetitions of all layers, or for a layer that selects a LoRA adapter for each token. These caches are added to the
    last block.
    """
    if not architecture.has_cache:
        return (LayerState(),) * hyper.n_layers
    if architecture.compressed:
        return compressed_states(hyper, context)
    shape = context_shape(context, hyper.n_ctx_train, causal=hyper.causal)
    in_window = window_cells(hyper, context)
    k_widths, v_widths = hyper.k_widths, hyper.v_widths
    # `v_trans`: a transposed V cache has one row per element, so llama.cpp allocates the widest layer's width
    # everywhere.
    if context.flash_attn == "off":
        v_widths = (max(v_widths, default=0),) * len(v_widths)
    indexer_v = hyper.head_v if architecture.indexer is not None and architecture.indexer.with_values else ()
    states = []
    for index in range(hyper.n_layers):
        cache: list[CacheTensor] = []
        n_rows = (in_window if hyper.sliding[index] else shape.n_cells) * shape.n_streams
        if hyper.caching[index]:
            cache.append(CacheTensor("k", context.type_k, k_widths[index], n_rows))
            # With latent attention (MLA) values are a view of the keys, so there is no V cache.
            if not hyper.latent:
                cache.append(CacheTensor("v", context.type_v, v_widths[index], n_rows))
        if hyper.indexer_widths[index]:
            cache.append(CacheTensor("indexer", context.type_k, hyper.indexer_widths[index], n_rows))
            if indexer_v:
                cache.append(CacheTensor("indexer", context.type_v, indexer_v[index], n_rows))
        states.append(LayerState(tuple(cache), _recurrent_state(hyper, shape, index)))
    unlisted: tuple[CacheTensor, ...] = ()
    if architecture.looped:
        unlisted = tuple(tensor for state in states for tensor in state.cache) * (hyper.n_loops - 1)
    elif architecture.routed:
        v_width = max(v_widths) if context.flash_attn == "off" else hyper.head_v[0]
        unlisted = (
            CacheTensor("k", context.type_k, hyper.head_k[0], shape.n_cells * shape.n_streams),
            CacheTensor("v", context.type_v, v_width, shape.n_cells * shape.n_streams),
        )
    states[-1] = LayerState((*states[-1].cache, *unlisted), states[-1].recurrent)
    return tuple(states)


def _recurrent_state(hyper: HyperParameters, shape: ContextShape, index: int) -> tuple[CacheTensor, ...]:
    if not hyper.recurrent[index] or index >= hyper.n_trunk_layers:
        return ()
    rolling, state = hyper.recurrent_widths
    # Always F32 (`recurrent_type_r`, `recurrent_type_s` in `create_memory`), whatever the types of the KV cache are.
    found = (CacheTensor("r", "f32", rolling, shape.n_sequences), CacheTensor("s", "f32", state, shape.n_sequences))
    if hyper.hashed_widths and hyper.hashed_widths[index]:
        return (*found, CacheTensor("hashed", "f32", hyper.hashed_widths[index], shape.n_sequences))
    return found


def compressed_states(hyper: HyperParameters, context: ContextSettings) -> tuple[LayerState, ...]:
    """Return the state of each block of a model with compressed keys (DeepSeek 4, `llama_kv_cache_dsv4`).

    A layer has the keys of a sliding window, and one compressed key for each block of earlier tokens. Its recurrent
    tensors contain the tokens that do not fill a block yet. At the lower compression ratio, blocks overlap, and these
    tensors have two vectors for each token. Each sequence has its own stream, even with a unified cache.
    """
    shape = context_shape(context, hyper.n_ctx_train, causal=hyper.causal)
    low_ratio, high_ratio = COMPRESSED_RATIOS
    n_window_rows = window_cells(hyper, context) * shape.n_sequences
    states = []
    k_widths = hyper.k_widths
    for index, ratio in enumerate(hyper.ratios):
        width, head = k_widths[index], hyper.head_k[0]
        cache = [CacheTensor("k", context.type_k, width, n_window_rows)]
        # Tokens that do not fill a block yet: two tensors, for their keys and for their scores.
        pending: list[CacheTensor] = []
        # One compressed key for each `ratio` cells, padded like other cells.
        if ratio in COMPRESSED_RATIOS:
            n_rows = pad(max(1, -(-shape.n_cells // ratio)), CELL_PADDING) * shape.n_sequences
            cache.append(CacheTensor("compressed", context.type_k, width, n_rows))
        if ratio == low_ratio:
            indexer = hyper.indexer_widths[index]
            cache.append(CacheTensor("indexer", context.type_k, indexer, n_rows))
            for each in (head, indexer):
                pending += [CacheTensor("compressed", "f32", 2 * each, 2 * ratio * shape.n_sequences)] * 2
        elif ratio == high_ratio:
            pending += [CacheTensor("compressed", "f32", head, ratio * shape.n_sequences)] * 2
        states.append(LayerState(tuple(cache), tuple(pending) if index < hyper.n_trunk_layers else ()))
    return tuple(states)


_SPAN_TOKENS = 1 << 22
"""Context length in tokens for which KV caches are computed, to find the bytes per token.

Bytes per token are the difference between the caches for twice this length and for this length. The length exceeds any
sliding window, and is a multiple of the cell padding and of the compression ratios.
"""


def kv_bytes_per_token(model: ModelFile) -> int | None:
    """Return the bytes that each further token of the context needs in an F16 KV cache.

    Caches of sliding windows are not counted, because they do not grow with the context. None if the header does not
    have enough information.
    """
    try:
        hyper, architecture = read_state(model)
    except MissingNumberError:
        return None
    short, long = (
        sum(
            tensor.size_bytes(HOST_RULE)
            for state in layer_states(hyper, architecture, ContextSettings(n_ctx=n_ctx, flash_attn="on"))
            for tensor in state.cache
        )
        # The difference between two long contexts leaves out what does not grow, such as the cells of windows.
        for n_ctx in (_SPAN_TOKENS, 2 * _SPAN_TOKENS)
    )
    return (long - short) // _SPAN_TOKENS
