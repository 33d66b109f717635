"""Bytes of the KV cache of each layer, for attention that keeps every token of the context."""

from __future__ import annotations

from dataclasses import dataclass

from engine.layout.context_settings import ContextSettings, KvType
from engine.memory.backends import HOST_RULE, ROW_PADDING, SizeRule
from engine.memory.hyper_parameters import HyperParameters

CELL_PADDING = 256
"""The engine rounds the cells of a sequence up to this (`GGML_PAD(n_ctx, 256)` in `llama_context`)."""

_BLOCKS: dict[KvType, tuple[int, int]] = {
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "q8_0": (32, 34),
    "q5_1": (32, 24),
    "q5_0": (32, 22),
    "q4_1": (32, 20),
    "q4_0": (32, 18),
    "iq4_nl": (32, 18),
}
"""Cache type -> elements and bytes of a block."""


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


def context_shape(context: ContextSettings, n_ctx_train: int) -> ContextShape:
    """Return what `llama_context` makes of the settings."""
    n_ctx = context.n_ctx if context.n_ctx > 0 else n_ctx_train
    n_sequences = max(1, context.n_seq_max)
    n_batch = max(1, min(n_ctx, context.n_batch))
    n_ubatch = min(n_batch, context.n_ubatch if context.n_ubatch > 0 else n_batch)
    n_ctx = pad(n_ctx, CELL_PADDING)
    n_cells = n_ctx if context.kv_unified else pad(max(1, n_ctx // n_sequences), CELL_PADDING)
    return ContextShape(n_cells, 1 if context.kv_unified else n_sequences, n_batch, n_ubatch, n_sequences)


def is_quantised(kv_type: KvType) -> bool:
    """Return whether the cache type packs elements in blocks."""
    return _BLOCKS[kv_type][0] > 1


def row_bytes(kv_type: KvType, n_elements: int) -> int:
    """Return the bytes of `n_elements` in one row of the cache."""
    per_block, block_bytes = _BLOCKS[kv_type]
    return n_elements // per_block * block_bytes


def kv_layer_bytes(hyper: HyperParameters, context: ContextSettings, rule: SizeRule = HOST_RULE) -> tuple[int, ...]:
    """Return the cache bytes of each layer in a buffer with this rule."""
    shape = context_shape(context, hyper.n_ctx_train)
    n_rows = shape.n_cells * shape.n_streams
    v_widths = hyper.v_widths
    if context.flash_attn == "off":
        # Without flash attention V is kept transposed, and then every layer's V is as wide as the widest.
        v_widths = (max(v_widths, default=0),) * len(v_widths)
    return tuple(
        _cache_bytes(context.type_k, k_width, n_rows, rule) + _cache_bytes(context.type_v, v_width, n_rows, rule)
        for k_width, v_width in zip(hyper.k_widths, v_widths, strict=True)
    )


def _cache_bytes(kv_type: KvType, width: int, n_rows: int, rule: SizeRule) -> int:
    size_bytes = n_rows * row_bytes(kv_type, width)
    if rule.pads_rows and is_quantised(kv_type) and width % ROW_PADDING:
        size_bytes += row_bytes(kv_type, ROW_PADDING - width % ROW_PADDING)
    return pad(size_bytes, rule.alignment_bytes)
