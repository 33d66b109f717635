"""Attention to a window and, beside it, to compressed keys of everything before (DeepSeek 4)."""

from __future__ import annotations

from engine.memory.architectures import COMPRESSED_RATIOS
from engine.memory.compute_graph.compressed import Kind, compress, compression, n_cells, turn
from engine.memory.compute_graph.graph import Tensor
from engine.memory.compute_graph.hyper_connections import open_streams
from engine.memory.compute_graph.latent import narrow_queries
from engine.memory.compute_graph.sketch import Sketch
from engine.memory.compute_graph.sparse import best_cells, by_stream, only_chosen
from engine.memory.compute_graph.transformer import Inputs, Style


def open_masked_streams(sketch: Sketch, inputs: Inputs, current: Tensor) -> Tensor:
    """Add the window's mask, then return the embeddings once for each stream."""
    assert inputs.sliding is not None
    sketch.graph.expand(inputs.sliding.mask)
    return open_streams(sketch, inputs, current)


def windowed_attention(sketch: Sketch, style: Style, inputs: Inputs, index: int, current: Tensor) -> Tensor:
    """Return the attention of the layer at the place `index` to its normalised input."""
    graph, numbers, n_tokens = sketch.graph, sketch.layer.numbers, current.ne[1]
    head, heads = numbers.head_k, numbers.n_head
    narrow = narrow_queries(sketch, current)
    q = graph.reshape(graph.mul_mat(sketch.weight("attn_q_b"), narrow), head, heads, n_tokens)
    q = sketch.rope(sketch.raw_norm(q), inputs.positions)
    k = sketch.norm(graph.mul_mat(sketch.weight("attn_kv"), current), "attn_kv_a_norm")
    k = sketch.rope(graph.reshape(k, head, 1, n_tokens), inputs.positions)
    found = _attended(sketch, inputs, index, q, k, narrow, current)
    found = sketch.rope(graph.reshape(found, head, heads, n_tokens), inputs.positions)
    width, _, groups, _ = (*sketch.layer.weights["attn_output_a"].ne, 1)
    found = graph.permute(graph.reshape(found, width, groups, n_tokens), 0, 2, 1, 3)
    found = graph.permute(graph.mul_mat(sketch.weight("attn_output_a"), found), 0, 2, 1, 3)
    found = graph.cont(found, found.ne[0] * found.ne[1], n_tokens)
    return graph.mul_mat(sketch.weight("attn_output_b"), found)


def _attended(
    sketch: Sketch, inputs: Inputs, index: int, q: Tensor, k: Tensor, narrow: Tensor, current: Tensor
) -> Tensor:
    """Return what queries find in the window and among compressed keys, if the layer has such."""
    graph, masks, low = sketch.graph, inputs.sliding, COMPRESSED_RATIOS[0]
    assert masks is not None
    kind: Kind | None = None
    mask = None
    if sketch.layer.numbers.ratio:
        kind = "near" if sketch.layer.numbers.ratio == low else "far"
        behind = sketch.stored_keys(k.ne[0], n_cells(sketch, kind))
        compress(sketch, inputs, kind, current, behind)
        mask = compression(sketch, kind).mask
    if kind == "near" and mask is not None:
        mask = only_chosen(sketch, mask, _chosen(sketch, inputs, narrow, current), mask.type)
    matrix = turn(sketch, "window")
    if matrix is not None:
        q, k = sketch.rotate(q, matrix), sketch.rotate(k, matrix)
    for part in (q, k):
        graph.expand(part)
    cache, _ = sketch.cache(index, sketch.layer.numbers, k_only=True)
    graph.expand(sketch.store_keys(cache, k, masks.k_rows))
    keys, seen = _by_head(sketch, cache), masks.mask
    if mask is not None:
        keys = graph.concat(keys, _by_head(sketch, behind), 2)
        seen = graph.concat(seen, mask, 0)
    found = sketch.mix(q, keys, keys, seen, sinks=sketch.maybe("attn_sinks"))
    return found if matrix is None else sketch.rotate(found, matrix)


def _by_head(sketch: Sketch, cache: Tensor) -> Tensor:
    row = cache.nb[1]
    return sketch.graph.view(cache, (cache.ne[0], 1, *cache.ne[1:3]), (0, row, row, row * cache.ne[1]))


def _chosen(sketch: Sketch, inputs: Inputs, narrow: Tensor, current: Tensor) -> Tensor:
    """Return the compressed keys with the best scores for each token."""
    graph, numbers, n_tokens = sketch.graph, sketch.numbers.indexer, current.ne[1]
    cache = sketch.stored_keys(numbers.head, n_cells(sketch, "indexer"))
    compress(sketch, inputs, "indexer", current, cache)
    q = graph.reshape(graph.mul_mat(sketch.weight("indexer.attn_q_b"), narrow), numbers.head, numbers.n_heads, n_tokens)
    q = sketch.rope(q, inputs.positions)
    matrix = turn(sketch, "indexer")
    assert matrix is not None
    q = sketch.rotate(q, matrix)
    weights = by_stream(sketch, graph.scale(graph.mul_mat(sketch.weight("indexer.proj"), current)))
    mask = compression(sketch, "indexer").mask
    return graph.cont(best_cells(sketch, q, cache, weights, mask, numbers.n_chosen))
