"""What each layer keeps between batches: keys and values of the context or a window of it, and recurrent states.

Mirrors the constructors of `llama_kv_cache`, `llama_kv_cache_iswa` and `llama_memory_recurrent`, and the sizes that
`llama_context` derives from its parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.model.architectures.record import COMPRESSED_RATIOS, Architecture
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.tensor_table import TYPES_BY_NAME
from engine.planning.memory.backends import HOST_RULE, ROW_PADDING, SizeRule
from engine.planning.memory.hyper_parameters import HyperParameters, MissingNumberError, read_state
from engine.planning.settings.context_settings import ContextSettings, KvType
from engine.planning.settings.table import CONTEXT_STEP

CELL_PADDING = CONTEXT_STEP
"""The engine rounds the cells of a sequence up to this (`GGML_PAD(n_ctx, 256)` in `llama_context`)."""


@dataclass(frozen=True, slots=True)
class ContextShape:
    """Sizes that the engine derives from the settings, in tokens: cells of one stream, streams, effective batches."""

    n_cells: int
    n_streams: int
    n_batch: int
    n_ubatch: int
    n_sequences: int


def pad(value: int, multiple: int) -> int:
    """Return `value` rounded up to a multiple of `multiple`."""
    return -(-value // multiple) * multiple


def context_shape(context: ContextSettings, n_ctx_train: int, *, causal: bool = True) -> ContextShape:
    """Return what `llama_context` makes of the settings; without `causal` attention a batch may exceed the context."""
    n_ctx = context.n_ctx if context.n_ctx > 0 else n_ctx_train
    n_sequences = max(1, context.n_seq_max)
    n_batch = max(1, min(n_ctx, context.n_batch) if causal else context.n_batch)
    n_ubatch = min(n_batch, context.n_ubatch if context.n_ubatch > 0 else n_batch)
    n_ctx = pad(n_ctx, CELL_PADDING)
    n_cells = n_ctx if context.kv_unified else pad(max(1, n_ctx // n_sequences), CELL_PADDING)
    return ContextShape(n_cells, 1 if context.kv_unified else n_sequences, n_batch, n_ubatch, n_sequences)


def is_quantised(kv_type: KvType) -> bool:
    """Return whether the cache type packs elements in blocks."""
    return TYPES_BY_NAME[kv_type].block_elements > 1


def row_bytes(kv_type: KvType, n_elements: int) -> int:
    """Return the bytes of `n_elements` in one row of the cache."""
    kind = TYPES_BY_NAME[kv_type]
    return n_elements // kind.block_elements * kind.block_bytes


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """One tensor of a layer's state: `n_rows` of `width` elements. `name`: k, v, an indexer's, or recurrent r and s."""

    name: Literal["k", "v", "indexer", "compressed", "r", "s", "hashed"]
    kind: KvType
    width: int
    n_rows: int

    def size_bytes(self, rule: SizeRule) -> int:
        """Return what it takes in a buffer with this rule."""
        size_bytes = self.n_rows * row_bytes(self.kind, self.width)
        if rule.pads_rows and is_quantised(self.kind) and self.width % ROW_PADDING:
            size_bytes += row_bytes(self.kind, ROW_PADDING - self.width % ROW_PADDING)
        return pad(size_bytes, rule.alignment_bytes)


@dataclass(frozen=True, slots=True)
class LayerState:
    """What one layer keeps between batches: `cache` of keys and values, `recurrent` states."""

    cache: tuple[CacheTensor, ...] = ()
    recurrent: tuple[CacheTensor, ...] = ()


def window_cells(hyper: HyperParameters, context: ContextSettings) -> int:
    """Return the cells of one stream in layers with a sliding window."""
    shape = context_shape(context, hyper.n_ctx_train, causal=hyper.causal)
    if context.swa_full:
        return shape.n_cells
    n_sequences = shape.n_sequences if context.kv_unified and not hyper.ratios else 1
    return pad(min(shape.n_cells, hyper.window * n_sequences + shape.n_ubatch), CELL_PADDING)


def layer_states(
    hyper: HyperParameters, architecture: Architecture, context: ContextSettings
) -> tuple[LayerState, ...]:
    """Return the state of each block of the file, nothing for those of multi-token prediction.

    The last has that of layers which the engine makes besides: repeats of all, or one with a single head.
    """
    if not architecture.has_cache:
        return (LayerState(),) * hyper.n_layers
    if architecture.compressed:
        return compressed_states(hyper, context)
    shape = context_shape(context, hyper.n_ctx_train, causal=hyper.causal)
    in_window = window_cells(hyper, context)
    # Without flash attention V is kept transposed, and then every layer's V is as wide as the widest.
    k_widths, v_widths = hyper.k_widths, hyper.v_widths
    if context.flash_attn == "off":
        v_widths = (max(v_widths, default=0),) * len(v_widths)
    indexer_v = hyper.head_v if architecture.indexer is not None and architecture.indexer.with_values else ()
    states = []
    for index in range(hyper.n_layers):
        cache: list[CacheTensor] = []
        n_rows = (in_window if hyper.sliding[index] else shape.n_cells) * shape.n_streams
        if hyper.caching[index]:
            cache.append(CacheTensor("k", context.type_k, k_widths[index], n_rows))
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
    found = (CacheTensor("r", "f32", rolling, shape.n_sequences), CacheTensor("s", "f32", state, shape.n_sequences))
    if hyper.hashed_widths and hyper.hashed_widths[index]:
        return (*found, CacheTensor("hashed", "f32", hyper.hashed_widths[index], shape.n_sequences))
    return found


def compressed_states(hyper: HyperParameters, context: ContextSettings) -> tuple[LayerState, ...]:
    """Return the state of layers that keep a window of keys and, compressed, all of them (DeepSeek 4).

    Every sequence has a stream of its own, even where the cache is unified otherwise. Compression needs rows of what it
    has not yet compressed: two vectors, overlapping, for the lower ratio.
    """
    shape = context_shape(context, hyper.n_ctx_train, causal=hyper.causal)
    low_ratio, high_ratio = COMPRESSED_RATIOS
    n_window_rows = window_cells(hyper, context) * shape.n_sequences
    states = []
    k_widths = hyper.k_widths
    for index, ratio in enumerate(hyper.ratios):
        width, head = k_widths[index], hyper.head_k[0]
        cache = [CacheTensor("k", context.type_k, width, n_window_rows)]
        pending: list[CacheTensor] = []
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
"""Longer than any window, and a multiple of what cells are padded to and of what keys are compressed by."""


def kv_bytes_per_token(model: ModelFile) -> int | None:
    """Return the bytes that one more token takes in an F16 cache, over all layers whose cache grows with the context.

    Sliding-window and recurrent layers do not grow. None where the header alone does not tell.
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
        for n_ctx in (_SPAN_TOKENS, 2 * _SPAN_TOKENS)
    )
    return (long - short) // _SPAN_TOKENS
