"""Latent attention to the cells that an indexer picks (DeepSeek 3.2, GLM DSA, dots 3 note, Hunyuan 4)."""

from __future__ import annotations

from dataclasses import replace

from engine.memory.compute_graph.graph import Tensor
from engine.memory.compute_graph.latent import absorbed, gated, narrow_queries
from engine.memory.compute_graph.sketch import Sketch
from engine.memory.compute_graph.transformer import Inputs, Style

_CHOSEN = "chosen cells"


def sparse_attention(sketch: Sketch, style: Style, inputs: Inputs, index: int, current: Tensor) -> Tensor:
    """Return the attention of the layer at the place `index`, behind a gate if it has one.

    Layers with a window attend to all of it; others without an indexer use the last one's choice.
    """
    narrow, masks = narrow_queries(sketch, current), inputs.masks_of(sketch.layer)
    if sketch.layer.numbers.indexer_width:
        sketch.shared[_CHOSEN] = _choose(sketch, style, inputs, narrow, current)
    if sketch.numbers.indexer.n_heads and not sketch.layer.numbers.is_swa:
        masks = replace(masks, mask=only_chosen(sketch, masks.mask, sketch.shared[_CHOSEN]))
    found = sketch.attend_latent(masks, *absorbed(sketch, inputs, narrow, current), index=index, out=None)
    return sketch.linear("attn_output", gated(sketch, found, current))


def _choose(sketch: Sketch, style: Style, inputs: Inputs, narrow: Tensor, current: Tensor) -> Tensor:
    """Return the cells with the best scores for each token."""
    graph, numbers, masks = sketch.graph, sketch.numbers.indexer, inputs.indexer
    assert masks is not None
    assert masks.k_rotation is not None
    n_tokens = current.ne[1]
    q = graph.mul_mat(sketch.weight("indexer.attn_q_b"), narrow)
    q = sketch.rope(graph.reshape(q, numbers.head, numbers.n_heads, n_tokens), inputs.positions)
    k = graph.mul_mat(sketch.weight("indexer.attn_k"), current)
    k = sketch.norm(k, "indexer.k_norm", layer_norm=True)
    k = sketch.rope(graph.reshape(k, numbers.head, 1, n_tokens), inputs.positions)
    if not style.plain_indexer:
        q, k = graph.mul_mat(masks.k_rotation, q), graph.mul_mat(masks.k_rotation, k)
    cache = sketch.stored_keys(numbers.head, sketch.batch.n_cells)
    graph.expand(sketch.store_keys(cache, k, masks.k_rows))
    weights = graph.scale(by_stream(sketch, graph.mul_mat(sketch.weight("indexer.proj"), current)))
    return graph.cont(best_cells(sketch, q, cache, weights, masks.mask, numbers.n_chosen))


def by_stream(sketch: Sketch, weights: Tensor) -> Tensor:
    """Return the weights of an indexer's heads as (heads, tokens, 1, sequences)."""
    streams, (heads, n_tokens) = sketch.batch.n_streams, weights.ne[:2]
    each = n_tokens // streams
    return sketch.graph.view(weights, (heads, each, 1, streams), (0, weights.nb[1], weights.nb[1] * each))


def best_cells(sketch: Sketch, q: Tensor, cache: Tensor, weights: Tensor, mask: Tensor, n_chosen: int) -> Tensor:
    """Return the `n_chosen` cells of a cache of indexer keys that score best: the heads' scores, weighted and added."""
    graph, (head, cells, streams, _) = sketch.graph, cache.ne
    row = cache.nb[1]
    keys = graph.view(cache, (head, 1, cells, streams), (0, row, row, row * cells))
    each = q.ne[2] // streams
    q = graph.view(q, (*q.ne[:2], each, streams), (0, q.nb[1], q.nb[2], q.nb[2] * each))
    scores = graph.new("lightning_indexer", (cells, each, 1, streams), q, keys, weights, mask)
    return graph.new("top_k", (min(cells, n_chosen), each, 1, streams), scores, type_name="i32")


def only_chosen(sketch: Sketch, mask: Tensor, chosen: Tensor, zeros_type: str = "f32") -> Tensor:
    """Return `mask` without the cells that were not chosen; `zeros_type`: of what marks the others."""
    graph, (cells, each, _, streams) = sketch.graph, mask.ne
    hidden = graph.like("fill", mask)
    hidden = graph.view(hidden, (1, cells, each, streams), (0, *hidden.nb[:2], hidden.nb[2]))
    zeros = graph.like("fill", graph.scratch(zeros_type, 1, chosen.ne[0], each, streams))
    rows = graph.view(chosen, (chosen.ne[0], each, streams), chosen.nb)
    shown = graph.write("set_rows", hidden, zeros, rows)
    return graph.add(graph.view(shown, mask.ne, (0, *hidden.nb[2:], hidden.nb[3])), mask)
