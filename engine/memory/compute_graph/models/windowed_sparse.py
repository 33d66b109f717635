"""Attention to a window and, beside it, to compressed keys of everything before (DeepSeek 4)."""

from __future__ import annotations

from engine.architectures.record import COMPRESSED_RATIOS
from engine.memory.compute_graph.building.attend import cache_of, mix_values, rotate, store_keys, stored_keys
from engine.memory.compute_graph.building.sketch import Sketch
from engine.memory.compute_graph.ggml.graph import Tensor
from engine.memory.compute_graph.models.compressed import Kind, compress, compression, n_cells, turn
from engine.memory.compute_graph.models.hyper_connections import open_streams
from engine.memory.compute_graph.models.latent import narrow_queries
from engine.memory.compute_graph.models.sparse import best_cells, by_stream, only_chosen


def open_masked_streams(sketch: Sketch, current: Tensor) -> Tensor:
    """Add the window's mask, then return the embeddings once for each stream."""
    assert sketch.inputs.sliding is not None
    sketch.graph.expand(sketch.inputs.sliding.mask)
    return open_streams(sketch, current)


def windowed_attention(sketch: Sketch, current: Tensor) -> Tensor:
    """Return the attention of a layer to its normalised input."""
    graph, numbers, n_tokens = sketch.graph, sketch.layer.numbers, current.ne[1]
    head, heads = numbers.head_k, numbers.n_head
    narrow = narrow_queries(sketch, current)
    q = graph.reshape(graph.mul_mat(sketch.weight("attn_q_b"), narrow), head, heads, n_tokens)
    q = sketch.rope(sketch.raw_norm(q), sketch.inputs.positions)
    k = sketch.norm(graph.mul_mat(sketch.weight("attn_kv"), current), "attn_kv_a_norm")
    k = sketch.rope(graph.reshape(k, head, 1, n_tokens), sketch.inputs.positions)
    found = _attended(sketch, q, k, narrow, current)
    found = sketch.rope(graph.reshape(found, head, heads, n_tokens), sketch.inputs.positions)
    width, _, groups, _ = (*sketch.layer.weights["attn_output_a"].ne, 1)
    found = graph.permute(graph.reshape(found, width, groups, n_tokens), 0, 2, 1, 3)
    found = graph.permute(graph.mul_mat(sketch.weight("attn_output_a"), found), 0, 2, 1, 3)
    found = graph.cont(found, found.ne[0] * found.ne[1], n_tokens)
    return graph.mul_mat(sketch.weight("attn_output_b"), found)


def _attended(sketch: Sketch, q: Tensor, k: Tensor, narrow: Tensor, current: Tensor) -> Tensor:
    """Return what queries find in the window and among compressed keys, if the layer has such."""
    graph, masks, low = sketch.graph, sketch.inputs.sliding, COMPRESSED_RATIOS[0]
    assert masks is not None
    kind: Kind | None = None
    mask = None
    if sketch.layer.numbers.ratio:
        kind = "near" if sketch.layer.numbers.ratio == low else "far"
        behind = stored_keys(sketch, k.ne[0], n_cells(sketch, kind))
        compress(sketch, kind, current, behind)
        mask = compression(sketch, kind).mask
    if kind == "near" and mask is not None:
        mask = only_chosen(sketch, mask, _chosen(sketch, narrow, current), mask.type)
    matrix = turn(sketch, "window")
    if matrix is not None:
        q, k = rotate(sketch, q, matrix), rotate(sketch, k, matrix)
    for part in (q, k):
        graph.expand(part)
    cache, _ = cache_of(sketch, k_only=True)
    graph.expand(store_keys(sketch, cache, k, masks.k_rows))
    keys, seen = _by_head(sketch, cache), masks.mask
    if mask is not None:
        keys = graph.concat(keys, _by_head(sketch, behind), 2)
        seen = graph.concat(seen, mask, 0)
    found = mix_values(sketch, q, keys, keys, seen, sinks=sketch.maybe("attn_sinks"))
    return found if matrix is None else rotate(sketch, found, matrix)


def _by_head(sketch: Sketch, cache: Tensor) -> Tensor:
    row = cache.nb[1]
    return sketch.graph.view(cache, (cache.ne[0], 1, *cache.ne[1:3]), (0, row, row, row * cache.ne[1]))


def _chosen(sketch: Sketch, narrow: Tensor, current: Tensor) -> Tensor:
    """Return the compressed keys with the best scores for each token."""
    graph, numbers, n_tokens = sketch.graph, sketch.numbers.indexer, current.ne[1]
    cache = stored_keys(sketch, numbers.head, n_cells(sketch, "indexer"))
    compress(sketch, "indexer", current, cache)
    q = graph.reshape(graph.mul_mat(sketch.weight("indexer.attn_q_b"), narrow), numbers.head, numbers.n_heads, n_tokens)
    q = sketch.rope(q, sketch.inputs.positions)
    matrix = turn(sketch, "indexer")
    assert matrix is not None
    q = rotate(sketch, q, matrix)
    weights = by_stream(sketch, graph.scale(graph.mul_mat(sketch.weight("indexer.proj"), current)))
    mask = compression(sketch, "indexer").mask
    return graph.cont(best_cells(sketch, q, cache, weights, mask, numbers.n_chosen))
