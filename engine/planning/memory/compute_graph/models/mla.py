"""Attention to compressed keys and values (MLA), to all of them or to those that an indexer picks.

Mirrors src/models/deepseek2.cpp (absorbed into queries, or unpacked for every head), deepseek32.cpp with its lightning
indexer (also of GLM DSA, dots 3 note and Hunyuan 4), and glm5-next.cpp, whose indexer scores pools of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.planning.memory.compute_graph.building.attention import (
    build_attn,
    build_attn_mla,
    cache_of,
    cpy_k,
    stored_keys,
)
from engine.planning.memory.compute_graph.building.context import GraphContext, Masks
from engine.planning.memory.compute_graph.ggml.graph import Tensor
from engine.planning.memory.compute_graph.models.residual_streams import open_streams
from engine.planning.memory.kv_cache import pad


def latent_attention(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the attention of a layer to its normalised input."""
    return ctx.linear("attn_output", gated(ctx, latent_heads(ctx, current), current))


def latent_attention_by_head(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the same behind a gate for each head, whose product is copied before the projection."""
    graph, (heads, n_tokens) = ctx.graph, (ctx.layer.numbers.n_head, current.ne[1])
    found = latent_heads(ctx, current)
    width = found.ne[0]
    gate = graph.mul_mat(ctx.weight("attn_gate", current.ne[0], heads), current)
    gate = graph.unary(graph.reshape(gate, 1, heads, n_tokens))
    found = graph.mul(graph.reshape(found, width // heads, heads, n_tokens), gate)
    return graph.mul_mat(ctx.weight("attn_output"), graph.cont(found, width, n_tokens))


def gated(ctx: GraphContext, found: Tensor, current: Tensor) -> Tensor:
    """Return what heads found behind a gate for each element or each head, if the layer has one."""
    if not ctx.has("attn_gate"):
        return found
    graph, (width, n_tokens) = ctx.graph, found.ne[:2]
    gate = graph.unary(graph.mul_mat(ctx.weight("attn_gate"), current))
    if gate.ne[0] == width:
        return graph.mul(found, gate)
    each = graph.reshape(found, width // gate.ne[0], gate.ne[0], n_tokens)
    return graph.reshape(graph.mul(each, graph.reshape(gate, 1, gate.ne[0], n_tokens)), width, n_tokens)


def latent_heads(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return what the heads of a layer find, side by side."""
    graph, numbers = ctx.graph, ctx.numbers
    n_tokens, heads = current.ne[1], ctx.layer.numbers.n_head
    narrow = narrow_queries(ctx, current)
    if numbers.latent:
        return build_attn_mla(ctx, ctx.inputs.full, *absorbed(ctx, narrow, current), out=None)
    q = _queries(ctx, narrow)
    q = graph.reshape(q, q.ne[0] // heads, heads, n_tokens)
    kv_cmpr, k_pe = _packed(ctx, current)
    unpacked = graph.mul_mat(ctx.weight("attn_kv_b"), kv_cmpr)
    bare = q.ne[0] - numbers.rope_part
    width = unpacked.ne[0] // heads
    nb = (0, 4 * width, 4 * width * heads)
    k_bare = graph.view(unpacked, (bare, heads, n_tokens), nb)
    values = graph.cont(graph.view(unpacked, (width - bare, heads, n_tokens), nb))
    k_repeated = graph.repeat(k_pe, numbers.rope_part, heads, n_tokens)
    first, second = (k_bare, k_repeated) if ctx.layer.numbers.has_rope else (k_repeated, k_bare)
    keys = graph.concat(first, second, 0)
    return build_attn(ctx, ctx.inputs.full, _roped(ctx, q), keys, values, sliding=False, out=None)


def narrow_queries(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return what queries are made of: a narrow vector where the layer has weights for it, else its input."""
    if not ctx.has("attn_q_a"):
        return current
    return ctx.build_norm(ctx.graph.mul_mat(ctx.weight("attn_q_a"), current), "attn_q_a_norm")


def absorbed(ctx: GraphContext, narrow: Tensor, current: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of one compressed head."""
    graph, numbers = ctx.graph, ctx.numbers
    n_tokens, heads, rope = current.ne[1], ctx.layer.numbers.n_head, numbers.rope_part
    q = _queries(ctx, narrow)
    width = q.ne[0] // heads
    nb = (0, q.nb[0] * width, q.nb[1])
    if ctx.style.shapes_queries:
        q = graph.reshape(q, width, heads, n_tokens)
    kv_cmpr, k_pe = _packed(ctx, current)
    q_nope = graph.view(q, (width - rope, heads, n_tokens), nb)
    q_pe = _roped(ctx, graph.view(q, (rope, heads, n_tokens), nb))
    q_nope = graph.mul_mat(ctx.weight("attn_k_b"), graph.permute(q_nope, 0, 2, 1, 3))
    queries = graph.concat(graph.permute(q_nope, 0, 2, 1, 3), q_pe, 0)
    values = graph.reshape(kv_cmpr, kv_cmpr.ne[0], 1, n_tokens)
    return queries, graph.concat(values, k_pe, 0), values


def _queries(ctx: GraphContext, narrow: Tensor) -> Tensor:
    return ctx.graph.mul_mat(ctx.weight("attn_q_b" if ctx.has("attn_q_a") else "attn_q"), narrow)


def _packed(ctx: GraphContext, current: Tensor) -> tuple[Tensor, Tensor]:
    """Return the compressed vector of each token, and the part of its key that is turned by position."""
    graph, numbers, n_tokens = ctx.graph, ctx.numbers, current.ne[1]
    joined = graph.mul_mat(ctx.weight("attn_kv_a_mqa"), current)
    kv_cmpr = graph.view(joined, (joined.ne[0] - numbers.rope_part, n_tokens), joined.nb)
    k_pe = graph.view(joined, (numbers.rope_part, 1, n_tokens), (0, joined.nb[1], joined.nb[1]))
    if ctx.has("attn_k_norm"):
        k_pe = ctx.build_norm(k_pe, "attn_k_norm")
    return ctx.build_norm(kv_cmpr, "attn_kv_a_norm"), _roped(ctx, k_pe)


def _roped(ctx: GraphContext, source: Tensor) -> Tensor:
    return ctx.rope(source, ctx.inputs.positions) if ctx.layer.numbers.has_rope else source


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What the last layer with an indexer picked."""

    cells: Tensor


def sparse_attention(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the attention of a layer, behind a gate if it has one.

    Layers with a window attend to all of it; others without an indexer use the last one's choice.
    """
    return _sparse_attention(ctx, current, ropes=True)


def plain_sparse_attention(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the same, where what the indexer compares is not turned by a Hadamard matrix."""
    return _sparse_attention(ctx, current, ropes=False)


def _sparse_attention(ctx: GraphContext, current: Tensor, *, ropes: bool) -> Tensor:
    narrow, masks = narrow_queries(ctx, current), ctx.masks
    if ctx.layer.numbers.indexer_width:
        ctx.shared.put(_Chosen(_choose(ctx, narrow, current, ropes=ropes)))
    if ctx.numbers.indexer.n_heads and not ctx.layer.numbers.is_swa:
        masks = replace(masks, mask=only_chosen(ctx, masks.mask, ctx.shared.get(_Chosen).cells))
    found = build_attn_mla(ctx, masks, *absorbed(ctx, narrow, current), out=None)
    return ctx.linear("attn_output", gated(ctx, found, current))


def _choose(ctx: GraphContext, narrow: Tensor, current: Tensor, *, ropes: bool) -> Tensor:
    """Return the cells with the best scores for each token."""
    graph, numbers, masks = ctx.graph, ctx.numbers.indexer, ctx.inputs.indexer
    assert masks is not None
    assert masks.k_rot is not None
    n_tokens = current.ne[1]
    q = graph.mul_mat(ctx.weight("indexer.attn_q_b"), narrow)
    q = ctx.rope(graph.reshape(q, numbers.head, numbers.n_heads, n_tokens), ctx.inputs.positions)
    k = graph.mul_mat(ctx.weight("indexer.attn_k"), current)
    k = ctx.build_norm(k, "indexer.k_norm", layer_norm=True)
    k = ctx.rope(graph.reshape(k, numbers.head, 1, n_tokens), ctx.inputs.positions)
    if ropes:
        q, k = graph.mul_mat(masks.k_rot, q), graph.mul_mat(masks.k_rot, k)
    cache = stored_keys(ctx, numbers.head, ctx.batch.n_cells)
    graph.expand(cpy_k(ctx, cache, k, masks.k_idxs))
    weights = graph.scale(by_stream(ctx, graph.mul_mat(ctx.weight("indexer.proj"), current)))
    return graph.cont(best_cells(ctx, q, cache, weights, masks.mask, numbers.n_chosen))


def by_stream(ctx: GraphContext, weights: Tensor) -> Tensor:
    """Return the weights of an indexer's heads as (heads, tokens, 1, sequences)."""
    streams, (heads, n_tokens) = ctx.batch.n_streams, weights.ne[:2]
    each = n_tokens // streams
    return ctx.graph.view(weights, (heads, each, 1, streams), (0, weights.nb[1], weights.nb[1] * each))


def best_cells(ctx: GraphContext, q: Tensor, cache: Tensor, weights: Tensor, mask: Tensor, n_chosen: int) -> Tensor:
    """Return the `n_chosen` cells of a cache of indexer keys that score best: the heads' scores, weighted and added."""
    graph, (head, cells, streams, _) = ctx.graph, cache.ne
    row = cache.nb[1]
    keys = graph.view(cache, (head, 1, cells, streams), (0, row, row, row * cells))
    each = q.ne[2] // streams
    q = graph.view(q, (*q.ne[:2], each, streams), (0, q.nb[1], q.nb[2], q.nb[2] * each))
    scores = graph.new("lightning_indexer", (cells, each, 1, streams), q, keys, weights, mask)
    return graph.new("top_k", (min(cells, n_chosen), each, 1, streams), scores, type_name="i32")


def only_chosen(ctx: GraphContext, mask: Tensor, chosen: Tensor, zeros_type: str = "f32") -> Tensor:
    """Return `mask` without the cells that were not chosen; `zeros_type`: of what marks the others."""
    graph, (cells, each, _, streams) = ctx.graph, mask.ne
    hidden = graph.like("fill", mask)
    hidden = graph.view(hidden, (1, cells, each, streams), (0, *hidden.nb[:2], hidden.nb[2]))
    zeros = graph.like("fill", graph.scratch(zeros_type, 1, chosen.ne[0], each, streams))
    rows = graph.view(chosen, (chosen.ne[0], each, streams), chosen.nb)
    shown = graph.write("set_rows", hidden, zeros, rows)
    return graph.add(graph.view(shown, mask.ne, (0, *hidden.nb[2:], hidden.nb[3])), mask)


_POOL_PADDING = 64
_MOST_GATHERED = 16
"""Batches of up to so many tokens gather the rows that they attend to."""


@dataclass(frozen=True, slots=True)
class _Pools:
    """Inputs of the indexer: `cells` and `members` of all pools, which of them a token may see (`mask`), its own cells
    that fill none (`tail`), what is out of reach among those selected (`dead`), and pools that this batch fills."""

    cells: Tensor
    members: Tensor
    mask: Tensor
    tail: Tensor
    dead: Tensor
    new_members: Tensor
    new_cells: Tensor


@dataclass(frozen=True, slots=True)
class _Selection:
    """What the last layer with an indexer picked: cells, or a mask of them."""

    found: Tensor


def open_pools(ctx: GraphContext, current: Tensor) -> Tensor:
    """Add the inputs of the indexer, then return the embeddings once for each stream."""
    new, n_tokens, pool = ctx.graph.new_input, ctx.batch.n_tokens, ctx.numbers.indexer.pool
    n_pools, n_new = _n_pools(ctx), max(1, _n_full_pools(ctx))
    pools = _Pools(
        cells=new("i32", n_pools),
        members=new("i32", pool, n_pools),
        mask=new("f16", n_pools, n_tokens),
        tail=new("i32", pool - 1, n_tokens),
        dead=new("f32", _n_selected(ctx), 1, 1, n_tokens),
        new_members=new("i32", pool, n_new),
        new_cells=new("i64", n_new),
    )
    ctx.shared.put(pools)
    for tensor in (pools.cells, pools.members, pools.mask, pools.tail, pools.dead):
        ctx.graph.expand(tensor)
    return open_streams(ctx, current)


def pooled_attention(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the attention of a layer; layers without an indexer use the last one's choice."""
    graph, masks, batch = ctx.graph, ctx.inputs.full, ctx.batch
    narrow = narrow_queries(ctx, graph.expand(current))
    q = graph.mul_mat(ctx.weight("attn_q_b"), narrow)
    heads = ctx.layer.numbers.n_head
    q = graph.permute(graph.reshape(q, q.ne[0] // heads, heads, batch.n_tokens), 0, 2, 1, 3)
    q = graph.permute(graph.mul_mat(ctx.weight("attn_k_b"), q), 0, 2, 1, 3)
    kv_cmpr = ctx.build_norm(graph.mul_mat(ctx.weight("attn_kv_a_mqa"), current), "attn_kv_a_norm")
    kv_cmpr = graph.reshape(kv_cmpr, kv_cmpr.ne[0], 1, batch.n_tokens)
    gathers = batch.n_tokens <= _MOST_GATHERED and batch.n_cells > _n_selected(ctx)
    if ctx.layer.numbers.indexer_width:
        chosen = _selected_cells(ctx, narrow, current)
        ctx.shared.put(_Selection(chosen if gathers else _mask_of(ctx, masks, chosen)))
    selection = ctx.shared.get(_Selection).found
    if gathers:
        found = _gathered(ctx, masks, selection, q, kv_cmpr)
    else:
        mask = graph.reshape(selection, *masks.mask.ne)
        found = build_attn_mla(ctx, replace(masks, mask=mask), q, kv_cmpr, kv_cmpr, out=None)
    return ctx.linear("attn_output", found)


def _n_full_pools(ctx: GraphContext) -> int:
    """Return how many pools all sequences can have, as if each had all the cells of a unified cache."""
    return ctx.batch.n_cells // ctx.numbers.indexer.pool * ctx.batch.n_states


def _n_pools(ctx: GraphContext) -> int:
    return pad(_n_full_pools(ctx) + 1, _POOL_PADDING)


def _n_selected(ctx: GraphContext) -> int:
    """Return how many cells a token attends to at most."""
    numbers = ctx.numbers.indexer
    tail = numbers.pool - 1 if numbers.picks_tail else 0
    return numbers.pool * _n_best(ctx) + tail


def _n_best(ctx: GraphContext) -> int:
    return min(_n_pools(ctx), ctx.numbers.indexer.n_chosen // ctx.numbers.indexer.pool)


def _selected_cells(ctx: GraphContext, narrow: Tensor, current: Tensor) -> Tensor:
    """Return the cells of the pools with the best scores for each token."""
    graph, numbers, pools, n_tokens = ctx.graph, ctx.numbers.indexer, ctx.shared.get(_Pools), current.ne[1]
    q = graph.mul_mat(ctx.weight("indexer.attn_q_b"), narrow)
    q = graph.reshape(q, numbers.head, numbers.n_heads, n_tokens)
    n_pools = _n_pools(ctx)
    pooled = graph.reshape(_pooled_keys(ctx, current), numbers.head, 1, n_pools)
    weights = graph.scale(graph.mul_mat(ctx.weight("indexer.proj"), current))
    scores = graph.new("lightning_indexer", (n_pools, n_tokens), q, pooled, weights, pools.mask)
    n_best = _n_best(ctx)
    best = graph.new("top_k", (n_best, n_tokens), scores, type_name="i32")
    order = graph.get_rows(graph.reshape(scores, 1, n_pools, n_tokens), best)
    order = graph.new("argsort", (n_best, n_tokens), graph.reshape(order, n_best, n_tokens), type_name="i32")
    best = graph.get_rows(graph.reshape(graph.cast(best, "f32"), 1, n_best, n_tokens), order)
    best = graph.cast(graph.cont(graph.reshape(best, n_best, n_tokens)), "i32")
    members = graph.get_rows(pools.members, graph.reshape(best, n_best * n_tokens))
    members = graph.reshape(members, numbers.pool * n_best, n_tokens)
    return graph.concat(members, pools.tail, 0) if numbers.picks_tail else members


def _pooled_keys(ctx: GraphContext, current: Tensor) -> Tensor:
    """Put keys and gates into the cache and pool those of complete pools; return what all pools have there."""
    graph, numbers, pools, n_tokens = ctx.graph, ctx.numbers.indexer, ctx.shared.get(_Pools), current.ne[1]
    assert ctx.inputs.indexer is not None
    keys = ctx.build_norm(graph.mul_mat(ctx.weight("indexer.attn_k"), current), "indexer.k_norm", layer_norm=True)
    gates = graph.mul_mat(ctx.weight("indexer_compressor_gate"), current)
    nothing = graph.like("fill", graph.scratch("f32", numbers.head, n_tokens))
    row = graph.concat(graph.concat(keys, gates, 0), nothing, 0)
    cache = stored_keys(ctx, 3 * numbers.head, ctx.batch.n_cells)
    graph.expand(cpy_k(ctx, cache, graph.reshape(row, row.ne[0], 1, n_tokens), ctx.inputs.indexer.k_idxs))
    n_rows = cache.ne[1] * cache.ne[2]
    n_new = pools.new_cells.ne[0]
    members = graph.reshape(pools.new_members, numbers.pool * n_new)
    known = graph.get_rows(graph.view(cache, (2 * numbers.head, n_rows), cache.nb), members)
    known = graph.reshape(known, 2 * numbers.head, numbers.pool, n_new)
    key, gate = (graph.view(known, (numbers.head, numbers.pool, n_new), known.nb) for _ in range(2))
    gate = graph.cont(graph.permute(graph.add(gate, ctx.weight("indexer_compressor_ape")), 1, 0, 2, 3))
    shares = graph.like("soft_max", graph.reshape(gate, numbers.pool, numbers.head * n_new))
    shares = graph.reshape(shares, numbers.pool, numbers.head, n_new)
    pooled = graph.sum_rows(graph.mul(shares, graph.cont(graph.permute(key, 1, 0, 2, 3))))
    place = graph.view(cache, (numbers.head, n_rows), cache.nb)
    graph.expand(graph.write("set_rows", place, graph.reshape(pooled, numbers.head, n_new), pools.new_cells))
    return graph.get_rows(place, pools.cells)


def _mask_of(ctx: GraphContext, masks: Masks, chosen: Tensor) -> Tensor:
    """Return the mask of attention without the cells that were not chosen."""
    graph, (n_chosen, n_tokens), n_cells = ctx.graph, chosen.ne[:2], masks.mask.ne[0]
    seed = graph.cast(graph.view(chosen, (1,)), "f32")
    hidden = seed if masks.mask.type == "f32" else graph.cast(seed, masks.mask.type)
    hidden = graph.repeat(graph.like("fill", hidden), 1, n_cells + n_chosen, n_tokens)
    zeros = graph.repeat(graph.like("fill", seed), 1, n_chosen, n_tokens)
    alive = graph.unary(graph.reshape(ctx.shared.get(_Pools).dead, n_chosen, n_tokens))
    outside = graph.new("arange", (n_chosen,))
    cells = graph.mul(graph.like("sub", graph.cast(chosen, "f32"), outside), alive)
    cells = graph.cast(graph.add(cells, outside), "i32")
    hidden, zeros = graph.reshape(hidden, *hidden.ne), graph.reshape(zeros, *zeros.ne)
    shown = graph.write("set_rows", hidden, zeros, graph.reshape(cells, n_chosen, n_tokens, 1))
    shown = graph.view(shown, (n_cells, n_tokens), (0, shown.nb[2]))
    return graph.add(shown, graph.reshape(masks.mask, n_cells, n_tokens))


def _gathered(ctx: GraphContext, masks: Masks, chosen: Tensor, q: Tensor, kv_cmpr: Tensor) -> Tensor:
    """Store compressed keys, and attend to copies of the chosen ones."""
    graph, (rank, heads, n_tokens, _), n_chosen = ctx.graph, q.ne, chosen.ne[0]
    graph.expand(q)
    graph.expand(kv_cmpr)
    cache, _ = cache_of(ctx, k_only=True)
    graph.expand(cpy_k(ctx, cache, kv_cmpr, masks.k_idxs))
    graph.expand(masks.mask)
    rows = graph.view(cache, (rank, cache.ne[1] * cache.ne[2]), cache.nb)
    keys = graph.get_rows(rows, graph.reshape(chosen, n_chosen * n_tokens))
    keys = graph.reshape(keys, rank, n_chosen, 1, n_tokens)
    weights = graph.mul_mat(keys, graph.permute(q, 0, 2, 3, 1))
    weights = graph.like("soft_max", weights, ctx.shared.get(_Pools).dead)
    found = graph.mul_mat(graph.cont(graph.transpose(keys)), weights)
    found = graph.mul_mat(ctx.weight("attn_v_b"), found)
    found = graph.cont(graph.permute(found, 0, 2, 1, 3))
    return graph.reshape(found, found.ne[0] * heads, n_tokens)
