"""Multi-head latent attention (MLA) over all cells of the KV cache, or over those that an indexer selects (DSA).

Mirrors src/models/deepseek2.cpp (weights absorbed into queries, or keys expanded for every head), deepseek32.cpp,
glm-dsa.cpp, dots3note.cpp and hy-v4.cpp with their lightning indexer, and glm5-next.cpp, whose indexer scores pools of
tokens.
"""

from __future__ import annotations

from msgspec import Struct

from engine.base.values import replace
from engine.planning.memory.compute_graph.building.attention import (
    build_attn,
    build_attn_mla,
    cache_of,
    cpy_k,
    stored_keys,
)
from engine.planning.memory.compute_graph.building.context import AttnInput, GraphContext
from engine.planning.memory.compute_graph.ggml.graph import Tensor
from engine.planning.memory.compute_graph.models.residual_streams import repeat_streams
from engine.planning.memory.kv_cache import pad


def mla_attention(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the output of MLA for the layer's normalised input (src/models/deepseek2.cpp)."""
    return ctx.linear("attn_output", gated(ctx, mla_heads(ctx, current), current))


def mla_attention_head_gate(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the output of MLA, in which the output of each head is multiplied by a gate (bailingmoe3.cpp).

    The product is copied (`ggml_cont`) before it is multiplied by the output matrix.
    """
    graph, (heads, n_tokens) = ctx.graph, (ctx.layer.hparams.n_head, current.ne[1])
    found = mla_heads(ctx, current)
    width = found.ne[0]
    gate = graph.mul_mat(ctx.weight("attn_gate", current.ne[0], heads), current)
    gate = graph.unary(graph.reshape(gate, 1, heads, n_tokens))
    found = graph.mul(graph.reshape(found, width // heads, heads, n_tokens), gate)
    return graph.mul_mat(ctx.weight("attn_output"), graph.cont(found, width, n_tokens))


def gated(ctx: GraphContext, found: Tensor, current: Tensor) -> Tensor:
    """Return `found`, the output of the heads, multiplied by the layer's gate; `found` itself if there is no gate.

    There is a gate value for each element or for each head.
    """
    if not ctx.has("attn_gate"):
        return found
    graph, (width, n_tokens) = ctx.graph, found.ne[:2]
    gate = graph.unary(graph.mul_mat(ctx.weight("attn_gate"), current))
    if gate.ne[0] == width:
        return graph.mul(found, gate)
    each = graph.reshape(found, width // gate.ne[0], gate.ne[0], n_tokens)
    return graph.reshape(graph.mul(each, graph.reshape(gate, 1, gate.ne[0], n_tokens)), width, n_tokens)


def mla_heads(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the output of all heads of MLA, concatenated, before the output matrix."""
    graph, hparams = ctx.graph, ctx.hparams
    n_tokens, heads = current.ne[1], ctx.layer.hparams.n_head
    narrow = q_lora(ctx, current)
    if hparams.latent:
        return build_attn_mla(ctx, ctx.inputs.inp_attn, *absorbed(ctx, narrow, current), out=None)
    q = _queries(ctx, narrow)
    q = graph.reshape(q, q.ne[0] // heads, heads, n_tokens)
    kv_cmpr, k_pe = _kv_cmpr_and_k_pe(ctx, current)
    unpacked = graph.mul_mat(ctx.weight("attn_kv_b"), kv_cmpr)
    bare = q.ne[0] - hparams.n_rot
    width = unpacked.ne[0] // heads
    nb = (0, 4 * width, 4 * width * heads)
    k_bare = graph.view(unpacked, (bare, heads, n_tokens), nb)
    values = graph.cont(graph.view(unpacked, (width - bare, heads, n_tokens), nb))
    k_repeated = graph.repeat(k_pe, hparams.n_rot, heads, n_tokens)
    first, second = (k_bare, k_repeated) if ctx.layer.hparams.has_rope else (k_repeated, k_bare)
    keys = graph.concat(first, second, 0)
    return build_attn(ctx, ctx.inputs.inp_attn, _roped(ctx, q), keys, values, sliding=False, out=None)


def q_lora(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the input of the query projection: `current` reduced to a low-rank vector (`q_lora_rank`).

    If the layer has no `attn_q_a`, it is `current` itself.
    """
    if not ctx.has("attn_q_a"):
        return current
    return ctx.build_norm(ctx.graph.mul_mat(ctx.weight("attn_q_a"), current), "attn_q_a_norm")


def absorbed(ctx: GraphContext, narrow: Tensor, current: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of MLA as one compressed head (the `is_mla` branch of deepseek2.cpp).

    `narrow`: low-rank input of the query projection.
    """
    graph, hparams = ctx.graph, ctx.hparams
    n_tokens, heads, rope = current.ne[1], ctx.layer.hparams.n_head, hparams.n_rot
    q = _queries(ctx, narrow)
    width = q.ne[0] // heads
    nb = (0, q.nb[0] * width, q.nb[1])
    if ctx.style.shapes_queries:
        q = graph.reshape(q, width, heads, n_tokens)
    kv_cmpr, k_pe = _kv_cmpr_and_k_pe(ctx, current)
    q_nope = graph.view(q, (width - rope, heads, n_tokens), nb)
    q_pe = _roped(ctx, graph.view(q, (rope, heads, n_tokens), nb))
    # Absorption: `attn_k_b` is applied to queries, so keys stay compressed in the cache.
    q_nope = graph.mul_mat(ctx.weight("attn_k_b"), graph.permute(q_nope, 0, 2, 1, 3))
    queries = graph.concat(graph.permute(q_nope, 0, 2, 1, 3), q_pe, 0)
    values = graph.reshape(kv_cmpr, kv_cmpr.ne[0], 1, n_tokens)
    return queries, graph.concat(values, k_pe, 0), values


def _queries(ctx: GraphContext, narrow: Tensor) -> Tensor:
    return ctx.graph.mul_mat(ctx.weight("attn_q_b" if ctx.has("attn_q_a") else "attn_q"), narrow)


def _kv_cmpr_and_k_pe(ctx: GraphContext, current: Tensor) -> tuple[Tensor, Tensor]:
    """Return each token's compressed vector, and the part of its key that RoPE rotates (`kv_cmpr`, `k_pe`)."""
    graph, hparams, n_tokens = ctx.graph, ctx.hparams, current.ne[1]
    joined = graph.mul_mat(ctx.weight("attn_kv_a_mqa"), current)
    kv_cmpr = graph.view(joined, (joined.ne[0] - hparams.n_rot, n_tokens), joined.nb)
    k_pe = graph.view(joined, (hparams.n_rot, 1, n_tokens), (0, joined.nb[1], joined.nb[1]))
    if ctx.has("attn_k_norm"):
        k_pe = ctx.build_norm(k_pe, "attn_k_norm")
    return ctx.build_norm(kv_cmpr, "attn_kv_a_norm"), _roped(ctx, k_pe)


def _roped(ctx: GraphContext, source: Tensor) -> Tensor:
    return ctx.rope(source, ctx.inputs.inp_pos) if ctx.layer.hparams.has_rope else source


class _TopK(Struct, frozen=True):
    """Cells of the KV cache that an indexer has selected, for its layer and the next layers that have no indexer."""

    cells: Tensor


def dsa_attention(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the output of attention to the cells that an indexer selects (src/models/deepseek32.cpp).

    Layers with a sliding window attend to the whole window. A layer without an indexer uses the cells that
    the indexer of an earlier layer, the nearest one, has selected.
    """
    return _dsa_attention(ctx, current, ropes=True)


def dsa_attention_without_rotation(ctx: GraphContext, current: Tensor) -> Tensor:
    """Like `dsa_attention`, but without a Hadamard matrix for the indexer's queries and keys (hy-v4.cpp)."""
    return _dsa_attention(ctx, current, ropes=False)


def _dsa_attention(ctx: GraphContext, current: Tensor, *, ropes: bool) -> Tensor:
    narrow, inp_attn = q_lora(ctx, current), ctx.inp_attn
    if ctx.layer.hparams.indexer_width:
        ctx.shared.put(_TopK(_build_lid_top_k(ctx, narrow, current, ropes=ropes)))
    if ctx.hparams.indexer.n_head and not ctx.layer.hparams.is_swa:
        inp_attn = replace(inp_attn, mask=build_top_k_mask(ctx, inp_attn.mask, ctx.shared.get(_TopK).cells))
    found = build_attn_mla(ctx, inp_attn, *absorbed(ctx, narrow, current), out=None)
    return ctx.linear("attn_output", gated(ctx, found, current))


def _build_lid_top_k(ctx: GraphContext, narrow: Tensor, current: Tensor, *, ropes: bool) -> Tensor:
    """Return for each token the cells with the highest scores of the lightning indexer.

    `narrow`: low-rank input of the query projection.
    `ropes`: whether to multiply the indexer's queries and keys by a Hadamard matrix. RoPE is applied in both cases.
    """
    graph, hparams, inp_attn = ctx.graph, ctx.hparams.indexer, ctx.inputs.inp_indexer
    assert inp_attn is not None
    assert inp_attn.k_rot is not None
    n_tokens = current.ne[1]
    q = graph.mul_mat(ctx.weight("indexer.attn_q_b"), narrow)
    q = ctx.rope(graph.reshape(q, hparams.head_size, hparams.n_head, n_tokens), ctx.inputs.inp_pos)
    k = graph.mul_mat(ctx.weight("indexer.attn_k"), current)
    k = ctx.build_norm(k, "indexer.k_norm", layer_norm=True)
    k = ctx.rope(graph.reshape(k, hparams.head_size, 1, n_tokens), ctx.inputs.inp_pos)
    if ropes:
        q, k = graph.mul_mat(inp_attn.k_rot, q), graph.mul_mat(inp_attn.k_rot, k)
    cache = stored_keys(ctx, hparams.head_size, ctx.batch.n_cells)
    graph.build_forward_expand(cpy_k(ctx, cache, k, inp_attn.k_idxs))
    weights = graph.scale(by_stream(ctx, graph.mul_mat(ctx.weight("indexer.proj"), current)))
    return graph.cont(build_lid_top_k_cells(ctx, q, cache, weights, inp_attn.mask, hparams.top_k))


def by_stream(ctx: GraphContext, weights: Tensor) -> Tensor:
    """Return the weights of the indexer's heads with shape (heads, tokens, 1, streams)."""
    streams, (heads, n_tokens) = ctx.batch.n_streams, weights.ne[:2]
    each = n_tokens // streams
    return ctx.graph.view(weights, (heads, each, 1, streams), (0, weights.nb[1], weights.nb[1] * each))


def build_lid_top_k_cells(
    ctx: GraphContext, q: Tensor, cache: Tensor, weights: Tensor, mask: Tensor, n_chosen: int
) -> Tensor:
    """Return the `n_chosen` cells with the highest scores for each token.

    A score is the weighted sum of the scores of all heads (`ggml_lightning_indexer`).

    `q`, `cache`: the indexer's queries, and its keys in the cache.
    `weights`: weight of each head for each token.
    """
    graph, (head, cells, streams, _) = ctx.graph, cache.ne
    row = cache.nb[1]
    keys = graph.view(cache, (head, 1, cells, streams), (0, row, row, row * cells))
    each = q.ne[2] // streams
    q = graph.view(q, (*q.ne[:2], each, streams), (0, q.nb[1], q.nb[2], q.nb[2] * each))
    scores = graph.new("lightning_indexer", (cells, each, 1, streams), q, keys, weights, mask)
    return graph.new("top_k", (min(cells, n_chosen), each, 1, streams), scores, type_name="i32")


def build_top_k_mask(ctx: GraphContext, mask: Tensor, chosen: Tensor, zeros_type: str = "f32") -> Tensor:
    """Return `mask` with all cells masked except those in `chosen` (`build_top_k_mask`).

    `zeros_type`: type of the tensor of zeros that is written over the chosen cells to unmask them.
    """
    graph, (cells, each, _, streams) = ctx.graph, mask.ne
    hidden = graph.like("fill", mask)
    hidden = graph.view(hidden, (1, cells, each, streams), (0, *hidden.nb[:2], hidden.nb[2]))
    zeros = graph.like("fill", graph.scratch(zeros_type, 1, chosen.ne[0], each, streams))
    rows = graph.view(chosen, (chosen.ne[0], each, streams), chosen.nb)
    shown = graph.write("set_rows", hidden, zeros, rows)
    return graph.add(graph.view(shown, mask.ne, (0, *hidden.nb[2:], hidden.nb[3])), mask)


_POOL_PADDING = 64
"""The number of pools is rounded up to a multiple of this (`build_inp_kpool` in glm5-next.cpp).

A pool is a group of consecutive tokens whose keys the indexer compresses to one.
"""
_MOST_GATHERED = 16
"""Largest batch, in tokens, for which attention reads copies of the selected keys.

For larger batches it reads the whole cache, and a mask hides the other keys (`build_dsa_layer`).
"""


class _KpoolInput(Struct, frozen=True):
    """Input tensors of an indexer that selects pools (`llm_graph_input_kpool`).

    A pool is a group of consecutive tokens that have one compressed key.

    `cells`: cells of all pools. `members`: tokens in each pool.
    `mask`: mask of the pools that each token may attend to.
    `tail`: cells of each token's sequence that are not in a complete pool.
    `dead`: mask of selected cells that a token must not attend to.
    `new_members`, `new_cells`: `members` and `cells` of the pools that this batch completes.
    """

    cells: Tensor
    members: Tensor
    mask: Tensor
    tail: Tensor
    dead: Tensor
    new_members: Tensor
    new_cells: Tensor


class _Selection(Struct, frozen=True):
    """Cells of the KV cache that an indexer has selected: their indices, or an attention mask that hides all others.

    The layer with the indexer uses them, and so do the next layers that have no indexer.
    """

    found: Tensor


def build_inp_kpool(ctx: GraphContext, current: Tensor) -> Tensor:
    """Make the inputs by which the indexer selects pools of cached tokens (`build_inp_kpool`).

    Returns `current`, the token embeddings, repeated for each residual stream.
    """
    new, n_tokens, pool = ctx.graph.new_input, ctx.batch.n_tokens, ctx.hparams.indexer.kpool
    # At least one: a micro batch that completes no pool builds a dummy entry, so that the graph keeps its shape.
    n_pools, n_new = _n_pools(ctx), max(1, _n_full_pools(ctx))
    pools = _KpoolInput(
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
        ctx.graph.build_forward_expand(tensor)
    return repeat_streams(ctx, current)


def kpool_attention(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the output of attention to the cells of the selected pools (`build_dsa_layer` in glm5-next.cpp).

    A pool is a group of consecutive tokens that have one compressed key. An indexer selects pools for each token.
    A layer without an indexer uses the pools that the indexer of an earlier layer, the nearest one, has selected.
    """
    graph, inp_attn, batch = ctx.graph, ctx.inputs.inp_attn, ctx.batch
    narrow = q_lora(ctx, graph.build_forward_expand(current))
    q = graph.mul_mat(ctx.weight("attn_q_b"), narrow)
    heads = ctx.layer.hparams.n_head
    q = graph.permute(graph.reshape(q, q.ne[0] // heads, heads, batch.n_tokens), 0, 2, 1, 3)
    q = graph.permute(graph.mul_mat(ctx.weight("attn_k_b"), q), 0, 2, 1, 3)
    kv_cmpr = ctx.build_norm(graph.mul_mat(ctx.weight("attn_kv_a_mqa"), current), "attn_kv_a_norm")
    kv_cmpr = graph.reshape(kv_cmpr, kv_cmpr.ne[0], 1, batch.n_tokens)
    # Gathering costs a copy of each chosen row for each token, so only small batches do it.
    gathers = batch.n_tokens <= _MOST_GATHERED and batch.n_cells > _n_selected(ctx)
    if ctx.layer.hparams.indexer_width:
        chosen = _build_kpool_select(ctx, narrow, current)
        ctx.shared.put(_Selection(chosen if gathers else _mask_of(ctx, inp_attn, chosen)))
    selection = ctx.shared.get(_Selection).found
    if gathers:
        found = _gathered(ctx, inp_attn, selection, q, kv_cmpr)
    else:
        mask = graph.reshape(selection, *inp_attn.mask.ne)
        found = build_attn_mla(ctx, replace(inp_attn, mask=mask), q, kv_cmpr, kv_cmpr, out=None)
    return ctx.linear("attn_output", found)


def _n_full_pools(ctx: GraphContext) -> int:
    """Return the number of complete pools in the worst case: each sequence has all cells of a unified cache.

    A pool is a group of consecutive tokens that have one compressed key.
    """
    return ctx.batch.n_cells // ctx.hparams.indexer.kpool * ctx.batch.n_states


def _n_pools(ctx: GraphContext) -> int:
    return pad(_n_full_pools(ctx) + 1, _POOL_PADDING)


def _n_selected(ctx: GraphContext) -> int:
    """Return the largest number of cells that a token attends to."""
    hparams = ctx.hparams.indexer
    tail = hparams.kpool - 1 if hparams.kpool_select_tail else 0
    return hparams.kpool * _n_best(ctx) + tail


def _n_best(ctx: GraphContext) -> int:
    return min(_n_pools(ctx), ctx.hparams.indexer.top_k // ctx.hparams.indexer.kpool)


def _build_kpool_select(ctx: GraphContext, narrow: Tensor, current: Tensor) -> Tensor:
    """Return the cells of the pools with the highest scores, by token (`build_kpool_select`).

    A pool is a group of consecutive tokens that have one compressed key.

    `narrow`: low-rank input of the query projection.
    """
    graph, hparams, pools, n_tokens = ctx.graph, ctx.hparams.indexer, ctx.shared.get(_KpoolInput), current.ne[1]
    q = graph.mul_mat(ctx.weight("indexer.attn_q_b"), narrow)
    q = graph.reshape(q, hparams.head_size, hparams.n_head, n_tokens)
    n_pools = _n_pools(ctx)
    pooled = graph.reshape(_pooled_keys(ctx, current), hparams.head_size, 1, n_pools)
    weights = graph.scale(graph.mul_mat(ctx.weight("indexer.proj"), current))
    scores = graph.new("lightning_indexer", (n_pools, n_tokens), q, pooled, weights, pools.mask)
    n_best = _n_best(ctx)
    best = graph.new("top_k", (n_best, n_tokens), scores, type_name="i32")
    # `ggml_top_k` returns no order, but the mask of dead slots needs the best pools first.
    order = graph.get_rows(graph.reshape(scores, 1, n_pools, n_tokens), best)
    order = graph.new("argsort", (n_best, n_tokens), graph.reshape(order, n_best, n_tokens), type_name="i32")
    best = graph.get_rows(graph.reshape(graph.cast(best, "f32"), 1, n_best, n_tokens), order)
    best = graph.cast(graph.cont(graph.reshape(best, n_best, n_tokens)), "i32")
    members = graph.get_rows(pools.members, graph.reshape(best, n_best * n_tokens))
    members = graph.reshape(members, hparams.kpool * n_best, n_tokens)
    return graph.concat(members, pools.tail, 0) if hparams.kpool_select_tail else members


def _pooled_keys(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the compressed keys of all pools. A pool is a group of consecutive tokens that have one compressed key.

    The batch's keys and gates are written to the cache first, and the keys of complete pools are computed from it.
    """
    graph, hparams, pools, n_tokens = ctx.graph, ctx.hparams.indexer, ctx.shared.get(_KpoolInput), current.ne[1]
    assert ctx.inputs.inp_indexer is not None
    keys = ctx.build_norm(graph.mul_mat(ctx.weight("indexer.attn_k"), current), "indexer.k_norm", layer_norm=True)
    gates = graph.mul_mat(ctx.weight("indexer_compressor_gate"), current)
    nothing = graph.like("fill", graph.scratch("f32", hparams.head_size, n_tokens))
    row = graph.concat(graph.concat(keys, gates, 0), nothing, 0)
    cache = stored_keys(ctx, 3 * hparams.head_size, ctx.batch.n_cells)
    graph.build_forward_expand(
        cpy_k(ctx, cache, graph.reshape(row, row.ne[0], 1, n_tokens), ctx.inputs.inp_indexer.k_idxs)
    )
    n_rows = cache.ne[1] * cache.ne[2]
    n_new = pools.new_cells.ne[0]
    members = graph.reshape(pools.new_members, hparams.kpool * n_new)
    known = graph.get_rows(graph.view(cache, (2 * hparams.head_size, n_rows), cache.nb), members)
    known = graph.reshape(known, 2 * hparams.head_size, hparams.kpool, n_new)
    key, gate = (graph.view(known, (hparams.head_size, hparams.kpool, n_new), known.nb) for _ in range(2))
    gate = graph.cont(graph.permute(graph.add(gate, ctx.weight("indexer_compressor_ape")), 1, 0, 2, 3))
    shares = graph.like("soft_max", graph.reshape(gate, hparams.kpool, hparams.head_size * n_new))
    shares = graph.reshape(shares, hparams.kpool, hparams.head_size, n_new)
    pooled = graph.sum_rows(graph.mul(shares, graph.cont(graph.permute(key, 1, 0, 2, 3))))
    pooled_cache = graph.view(cache, (hparams.head_size, n_rows), cache.nb)
    graph.build_forward_expand(
        graph.write("set_rows", pooled_cache, graph.reshape(pooled, hparams.head_size, n_new), pools.new_cells)
    )
    return graph.get_rows(pooled_cache, pools.cells)


def _mask_of(ctx: GraphContext, inp_attn: AttnInput, chosen: Tensor) -> Tensor:
    """Return the attention mask in which all cells are masked except those in `chosen`."""
    graph, (n_chosen, n_tokens), n_cells = ctx.graph, chosen.ne[:2], inp_attn.mask.ne[0]
    seed = graph.cast(graph.view(chosen, (1,)), "f32")
    hidden = seed if inp_attn.mask.type == "f32" else graph.cast(seed, inp_attn.mask.type)
    hidden = graph.repeat(graph.like("fill", hidden), 1, n_cells + n_chosen, n_tokens)
    zeros = graph.repeat(graph.like("fill", seed), 1, n_chosen, n_tokens)
    alive = graph.unary(graph.reshape(ctx.shared.get(_KpoolInput).dead, n_chosen, n_tokens))
    # Dead slots each write a row of their own after the cells, so that the indices of one token are unique.
    outside = graph.new("arange", (n_chosen,))
    cells = graph.mul(graph.like("sub", graph.cast(chosen, "f32"), outside), alive)
    cells = graph.cast(graph.add(cells, outside), "i32")
    hidden, zeros = graph.reshape(hidden, *hidden.ne), graph.reshape(zeros, *zeros.ne)
    shown = graph.write("set_rows", hidden, zeros, graph.reshape(cells, n_chosen, n_tokens, 1))
    shown = graph.view(shown, (n_cells, n_tokens), (0, shown.nb[2]))
    return graph.add(shown, graph.reshape(inp_attn.mask, n_cells, n_tokens))


def _gathered(ctx: GraphContext, inp_attn: AttnInput, chosen: Tensor, q: Tensor, kv_cmpr: Tensor) -> Tensor:
    """Return the output of attention to copies of the selected keys. The batch's keys are stored in the cache first.

    `chosen`: cells of the selected keys, by token.
    `kv_cmpr`: compressed keys of the batch.
    """
    graph, (rank, heads, n_tokens, _), n_chosen = ctx.graph, q.ne, chosen.ne[0]
    graph.build_forward_expand(q)
    graph.build_forward_expand(kv_cmpr)
    cache, _ = cache_of(ctx, k_only=True)
    graph.build_forward_expand(cpy_k(ctx, cache, kv_cmpr, inp_attn.k_idxs))
    graph.build_forward_expand(inp_attn.mask)
    rows = graph.view(cache, (rank, cache.ne[1] * cache.ne[2]), cache.nb)
    keys = graph.get_rows(rows, graph.reshape(chosen, n_chosen * n_tokens))
    keys = graph.reshape(keys, rank, n_chosen, 1, n_tokens)
    weights = graph.mul_mat(keys, graph.permute(q, 0, 2, 3, 1))
    weights = graph.like("soft_max", weights, ctx.shared.get(_KpoolInput).dead)
    found = graph.mul_mat(graph.cont(graph.transpose(keys)), weights)
    found = graph.mul_mat(ctx.weight("attn_v_b"), found)
    found = graph.cont(graph.permute(found, 0, 2, 1, 3))
    return graph.reshape(found, found.ne[0] * heads, n_tokens)
