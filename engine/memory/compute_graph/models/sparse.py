"""Latent attention to the cells that an indexer picks (DeepSeek 3.2, GLM DSA, dots 3 note, Hunyuan 4)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.memory.compute_graph.building.attend import attend_latent, store_keys, stored_keys
from engine.memory.compute_graph.building.sketch import Sketch
from engine.memory.compute_graph.ggml.graph import Tensor
from engine.memory.compute_graph.models.latent import absorbed, gated, narrow_queries


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What the last layer with an indexer picked."""

    cells: Tensor


def sparse_attention(sketch: Sketch, current: Tensor) -> Tensor:
    """Return the attention of a layer, behind a gate if it has one.

    Layers with a window attend to all of it; others without an indexer use the last one's choice.
    """
    return _sparse_attention(sketch, current, turns=True)


def plain_sparse_attention(sketch: Sketch, current: Tensor) -> Tensor:
    """Return the same, where what the indexer compares is not turned by a Hadamard matrix."""
    return _sparse_attention(sketch, current, turns=False)


def _sparse_attention(sketch: Sketch, current: Tensor, *, turns: bool) -> Tensor:
    narrow, masks = narrow_queries(sketch, current), sketch.masks
    if sketch.layer.numbers.indexer_width:
        sketch.shared.put(_Chosen(_choose(sketch, narrow, current, turns=turns)))
    if sketch.numbers.indexer.n_heads and not sketch.layer.numbers.is_swa:
        masks = replace(masks, mask=only_chosen(sketch, masks.mask, sketch.shared.get(_Chosen).cells))
    found = attend_latent(sketch, masks, *absorbed(sketch, narrow, current), out=None)
    return sketch.linear("attn_output", gated(sketch, found, current))


def _choose(sketch: Sketch, narrow: Tensor, current: Tensor, *, turns: bool) -> Tensor:
    """Return the cells with the best scores for each token."""
    graph, numbers, masks = sketch.graph, sketch.numbers.indexer, sketch.inputs.indexer
    assert masks is not None
    assert masks.k_rotation is not None
    n_tokens = current.ne[1]
    q = graph.mul_mat(sketch.weight("indexer.attn_q_b"), narrow)
    q = sketch.rope(graph.reshape(q, numbers.head, numbers.n_heads, n_tokens), sketch.inputs.positions)
    k = graph.mul_mat(sketch.weight("indexer.attn_k"), current)
    k = sketch.norm(k, "indexer.k_norm", layer_norm=True)
    k = sketch.rope(graph.reshape(k, numbers.head, 1, n_tokens), sketch.inputs.positions)
    if turns:
        q, k = graph.mul_mat(masks.k_rotation, q), graph.mul_mat(masks.k_rotation, k)
    cache = stored_keys(sketch, numbers.head, sketch.batch.n_cells)
    graph.expand(store_keys(sketch, cache, k, masks.k_rows))
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
