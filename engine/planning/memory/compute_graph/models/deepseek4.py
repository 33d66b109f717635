"""Attention to a window and to compressed keys of everything before it (src/models/deepseek4.cpp).

Keys of several tokens are compressed into one, made from a state that holds tokens which do not fill a block yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.model.architectures.record import COMPRESSED_RATIOS
from engine.planning.memory.compute_graph.building.attention import (
    build_attn_mha,
    cache_of,
    cpy_k,
    hadamard_size,
    rotate,
    stored_keys,
)
from engine.planning.memory.compute_graph.building.context import GraphContext
from engine.planning.memory.compute_graph.ggml.graph import Tensor
from engine.planning.memory.compute_graph.models.mla import best_cells, by_stream, narrow_queries, only_chosen
from engine.planning.memory.compute_graph.models.residual_streams import open_streams
from engine.planning.memory.kv_cache import CELL_PADDING, pad

Kind = Literal["near", "far", "indexer"]
"""Keys by the lower ratio, by the higher one, and those that an indexer compares, by the lower one."""


@dataclass(frozen=True, slots=True)
class Compression:
    """Inputs that all layers of a kind share: places of tokens in what they are part of, tokens whose vectors are kept
    and rows of the state that they go to, rows that are read, cells that get keys and their positions; and the mask."""

    places: Tensor
    kept: Tensor
    rows: Tensor
    read: Tensor
    cells: Tensor
    positions: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class _Rotation:
    """The Hadamard matrix that keys of a kind are rotated by before they are stored."""

    matrix: Tensor


def compression(ctx: GraphContext, kind: Kind) -> Compression:
    """Return the inputs of a kind, made for the first layer that asks."""
    return ctx.shared.once(Compression, lambda: _new_compression(ctx, kind), of=kind)


def _new_compression(ctx: GraphContext, kind: Kind) -> Compression:
    batch, new, ratio = ctx.batch, ctx.graph.new_input, _ratio(kind)
    n_blocks = batch.n_tokens // ratio + batch.n_sequences
    n_kept = min(batch.n_tokens, _n_rows(ctx, kind))
    shape = n_cells(ctx, kind), batch.n_tokens // batch.n_streams, 1, batch.n_streams
    return Compression(
        places=new("i32", batch.n_tokens),
        kept=new("i32", n_kept),
        rows=new("i32", n_kept),
        read=new("i32", (1 if kind == "far" else 2) * ratio * n_blocks),
        cells=new("i64", n_blocks),
        positions=new("i32", n_blocks),
        mask=new("f16" if kind == "indexer" or batch.flash else "f32", *shape),
    )


def n_cells(ctx: GraphContext, kind: Kind) -> int:
    """Return the cells of compressed keys in one stream."""
    return pad(max(1, -(-ctx.batch.n_cells // _ratio(kind))), CELL_PADDING)


def rotation(ctx: GraphContext, kind: Kind | Literal["window"]) -> Tensor | None:
    """Return the matrix that turns keys of a kind or those of the window, if there is one."""
    head = ctx.numbers.indexer.head
    if kind != "indexer":
        head = ctx.layer.numbers.head_k
        quantised = ctx.batch.type_k not in ("f32", "f16", "bf16") and head % 64 == 0
        if not quantised and head != ctx.numbers.indexer.head:
            return None
    size = hadamard_size(head)
    return ctx.shared.once(_Rotation, lambda: _Rotation(ctx.graph.new_input("f32", size, size)), of=kind).matrix


def compress(ctx: GraphContext, kind: Kind, current: Tensor, cache: Tensor) -> None:
    """Put the vectors of complete blocks into the cache, and those of incomplete ones into the state."""
    graph, batch, stem = ctx.graph, ctx.batch, "indexer_compressor" if kind == "indexer" else "attn_compressor"
    given = compression(ctx, kind)
    keys = graph.mul_mat(ctx.weight(f"{stem}_kv"), current)
    scores = graph.mul_mat(ctx.weight(f"{stem}_gate"), current)
    scores = graph.add(scores, graph.get_rows(ctx.weight(f"{stem}_ape"), given.places))
    home = ctx.layer.memory if batch.offload_kqv else "host"
    n_rows, width = _n_rows(ctx, kind), keys.ne[0]
    states = [graph.stored(home, "f32", width, n_rows // batch.n_streams, batch.n_streams) for _ in range(2)]
    known, known_scores = (
        graph.concat(graph.view(graph.view(state, (width, n_rows)), (width, n_rows)), new, 1)
        for state, new in zip(states, (keys, scores), strict=True)
    )
    weigh = _far_blocks if kind == "far" else _overlapping_blocks
    found = ctx.build_norm(weigh(ctx, given, known, known_scores), f"{stem}_norm")
    found = ctx.rope(found, given.positions)
    matrix = rotation(ctx, kind)
    if matrix is not None:
        found = rotate(ctx, found, matrix)
    graph.expand(cpy_k(ctx, cache, found, given.cells))
    kept = [
        graph.write("set_rows", graph.view(state, (width, n_rows)), graph.get_rows(new, given.kept), given.rows)
        for state, new in zip(states, (keys, scores), strict=True)
    ]
    for part in kept:
        graph.expand(part)


def _ratio(kind: Kind) -> int:
    low, high = COMPRESSED_RATIOS
    return high if kind == "far" else low


def _n_rows(ctx: GraphContext, kind: Kind) -> int:
    """Return the rows of a layer's state, of all sequences: blocks overlap with the lower ratio."""
    return (1 if kind == "far" else 2) * _ratio(kind) * ctx.batch.n_streams


def _far_blocks(ctx: GraphContext, given: Compression, keys: Tensor, scores: Tensor) -> Tensor:
    """Return the keys of blocks that do not overlap."""
    graph, ratio = ctx.graph, _ratio("far")
    shape = keys.ne[0], ratio, given.positions.ne[0]
    keys = graph.reshape(graph.get_rows(keys, given.read), *shape)
    scores = graph.reshape(graph.get_rows(scores, given.read), *shape)
    return _weighted(ctx, keys, scores)


def _overlapping_blocks(ctx: GraphContext, given: Compression, keys: Tensor, scores: Tensor) -> Tensor:
    """Return the keys of blocks that are each part of their predecessor too."""
    graph, n_blocks, head = ctx.graph, given.positions.ne[0], keys.ne[0] // 2
    n_read = given.read.ne[0] // 2

    def both(source: Tensor) -> Tensor:
        row = graph.reshape(graph.scale(graph.view(source, (source.ne[0],))), source.ne[0], 1)
        rows = graph.get_rows(graph.concat(source, row, 1), given.read)
        before, own = (
            graph.reshape(graph.cont(graph.view(rows, (head, n_read), rows.nb)), head, n_read // n_blocks, n_blocks)
            for _ in range(2)
        )
        return graph.concat(before, own, 1)

    return _weighted(ctx, both(keys), both(scores))


def _weighted(ctx: GraphContext, keys: Tensor, scores: Tensor) -> Tensor:
    """Return the sum of the keys of each block, weighted with the softmax of their scores: (head, 1, blocks)."""
    graph = ctx.graph
    keys, scores = (graph.cont(graph.permute(part, 1, 0, 2, 3)) for part in (keys, scores))
    total = graph.sum_rows(graph.mul(keys, graph.like("soft_max", scores)))
    return graph.cont(graph.permute(total, 1, 0, 2, 3))


def open_masked_streams(ctx: GraphContext, current: Tensor) -> Tensor:
    """Add the window's mask, then return the embeddings once for each stream."""
    assert ctx.inputs.sliding is not None
    ctx.graph.expand(ctx.inputs.sliding.mask)
    return open_streams(ctx, current)


def windowed_attention(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the attention of a layer to its normalised input."""
    graph, numbers, n_tokens = ctx.graph, ctx.layer.numbers, current.ne[1]
    head, heads = numbers.head_k, numbers.n_head
    narrow = narrow_queries(ctx, current)
    q = graph.reshape(graph.mul_mat(ctx.weight("attn_q_b"), narrow), head, heads, n_tokens)
    q = ctx.rope(ctx.raw_norm(q), ctx.inputs.positions)
    k = ctx.build_norm(graph.mul_mat(ctx.weight("attn_kv"), current), "attn_kv_a_norm")
    k = ctx.rope(graph.reshape(k, head, 1, n_tokens), ctx.inputs.positions)
    found = _attended(ctx, q, k, narrow, current)
    found = ctx.rope(graph.reshape(found, head, heads, n_tokens), ctx.inputs.positions)
    width, _, groups, _ = (*ctx.layer.weights["attn_output_a"].ne, 1)
    found = graph.permute(graph.reshape(found, width, groups, n_tokens), 0, 2, 1, 3)
    found = graph.permute(graph.mul_mat(ctx.weight("attn_output_a"), found), 0, 2, 1, 3)
    found = graph.cont(found, found.ne[0] * found.ne[1], n_tokens)
    return graph.mul_mat(ctx.weight("attn_output_b"), found)


def _attended(ctx: GraphContext, q: Tensor, k: Tensor, narrow: Tensor, current: Tensor) -> Tensor:
    """Return what queries find in the window and among compressed keys, if the layer has such."""
    graph, masks, low = ctx.graph, ctx.inputs.sliding, COMPRESSED_RATIOS[0]
    assert masks is not None
    kind: Kind | None = None
    mask = None
    if ctx.layer.numbers.ratio:
        kind = "near" if ctx.layer.numbers.ratio == low else "far"
        behind = stored_keys(ctx, k.ne[0], n_cells(ctx, kind))
        compress(ctx, kind, current, behind)
        mask = compression(ctx, kind).mask
    if kind == "near" and mask is not None:
        mask = only_chosen(ctx, mask, _chosen(ctx, narrow, current), mask.type)
    matrix = rotation(ctx, "window")
    if matrix is not None:
        q, k = rotate(ctx, q, matrix), rotate(ctx, k, matrix)
    for part in (q, k):
        graph.expand(part)
    cache, _ = cache_of(ctx, k_only=True)
    graph.expand(cpy_k(ctx, cache, k, masks.k_idxs))
    keys, seen = _by_head(ctx, cache), masks.mask
    if mask is not None:
        keys = graph.concat(keys, _by_head(ctx, behind), 2)
        seen = graph.concat(seen, mask, 0)
    found = build_attn_mha(ctx, q, keys, keys, seen, sinks=ctx.maybe("attn_sinks"))
    return found if matrix is None else rotate(ctx, found, matrix)


def _by_head(ctx: GraphContext, cache: Tensor) -> Tensor:
    row = cache.nb[1]
    return ctx.graph.view(cache, (cache.ne[0], 1, *cache.ne[1:3]), (0, row, row, row * cache.ne[1]))


def _chosen(ctx: GraphContext, narrow: Tensor, current: Tensor) -> Tensor:
    """Return the compressed keys with the best scores for each token."""
    graph, numbers, n_tokens = ctx.graph, ctx.numbers.indexer, current.ne[1]
    cache = stored_keys(ctx, numbers.head, n_cells(ctx, "indexer"))
    compress(ctx, "indexer", current, cache)
    q = graph.reshape(graph.mul_mat(ctx.weight("indexer.attn_q_b"), narrow), numbers.head, numbers.n_heads, n_tokens)
    q = ctx.rope(q, ctx.inputs.positions)
    matrix = rotation(ctx, "indexer")
    assert matrix is not None
    q = rotate(ctx, q, matrix)
    weights = by_stream(ctx, graph.scale(graph.mul_mat(ctx.weight("indexer.proj"), current)))
    mask = compression(ctx, "indexer").mask
    return graph.cont(best_cells(ctx, q, cache, weights, mask, numbers.n_chosen))
