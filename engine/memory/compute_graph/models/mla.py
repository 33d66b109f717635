"""Attention to compressed keys and values (MLA), to all of them or to those that an indexer picks.

Mirrors src/models/deepseek2.cpp (absorbed into queries, or unpacked for every head), deepseek32.cpp with its lightning
indexer (also of GLM DSA, dots 3 note and Hunyuan 4), and glm5-next.cpp, whose indexer scores pools of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.memory.compute_graph.building.attention import attend, attend_latent, cache_of, store_keys, stored_keys
from engine.memory.compute_graph.building.context import Masks, Sketch
from engine.memory.compute_graph.ggml.graph import Tensor
from engine.memory.compute_graph.models.residual_streams import open_streams
from engine.memory.kv_cache import pad


def latent_attention(sketch: Sketch, current: Tensor) -> Tensor:
    """Return the attention of a layer to its normalised input."""
    return sketch.linear("attn_output", gated(sketch, latent_heads(sketch, current), current))


def latent_attention_by_head(sketch: Sketch, current: Tensor) -> Tensor:
    """Return the same behind a gate for each head, whose product is copied before the projection."""
    graph, (heads, n_tokens) = sketch.graph, (sketch.layer.numbers.n_head, current.ne[1])
    found = latent_heads(sketch, current)
    width = found.ne[0]
    gate = graph.mul_mat(sketch.weight("attn_gate", current.ne[0], heads), current)
    gate = graph.unary(graph.reshape(gate, 1, heads, n_tokens))
    found = graph.mul(graph.reshape(found, width // heads, heads, n_tokens), gate)
    return graph.mul_mat(sketch.weight("attn_output"), graph.cont(found, width, n_tokens))


def gated(sketch: Sketch, found: Tensor, current: Tensor) -> Tensor:
    """Return what heads found behind a gate for each element or each head, if the layer has one."""
    if not sketch.has("attn_gate"):
        return found
    graph, (width, n_tokens) = sketch.graph, found.ne[:2]
    gate = graph.unary(graph.mul_mat(sketch.weight("attn_gate"), current))
    if gate.ne[0] == width:
        return graph.mul(found, gate)
    each = graph.reshape(found, width // gate.ne[0], gate.ne[0], n_tokens)
    return graph.reshape(graph.mul(each, graph.reshape(gate, 1, gate.ne[0], n_tokens)), width, n_tokens)


def latent_heads(sketch: Sketch, current: Tensor) -> Tensor:
    """Return what the heads of a layer find, side by side."""
    graph, numbers = sketch.graph, sketch.numbers
    n_tokens, heads = current.ne[1], sketch.layer.numbers.n_head
    narrow = narrow_queries(sketch, current)
    if numbers.latent:
        return attend_latent(sketch, sketch.inputs.full, *absorbed(sketch, narrow, current), out=None)
    q = _queries(sketch, narrow)
    q = graph.reshape(q, q.ne[0] // heads, heads, n_tokens)
    packed, k_turned = _packed(sketch, current)
    unpacked = graph.mul_mat(sketch.weight("attn_kv_b"), packed)
    bare = q.ne[0] - numbers.rope_part
    width = unpacked.ne[0] // heads
    nb = (0, 4 * width, 4 * width * heads)
    k_bare = graph.view(unpacked, (bare, heads, n_tokens), nb)
    values = graph.cont(graph.view(unpacked, (width - bare, heads, n_tokens), nb))
    k_repeated = graph.repeat(k_turned, numbers.rope_part, heads, n_tokens)
    first, second = (k_bare, k_repeated) if sketch.layer.numbers.has_rope else (k_repeated, k_bare)
    keys = graph.concat(first, second, 0)
    return attend(sketch, sketch.inputs.full, _turned(sketch, q), keys, values, sliding=False, out=None)


def narrow_queries(sketch: Sketch, current: Tensor) -> Tensor:
    """Return what queries are made of: a narrow vector where the layer has weights for it, else its input."""
    if not sketch.has("attn_q_a"):
        return current
    return sketch.norm(sketch.graph.mul_mat(sketch.weight("attn_q_a"), current), "attn_q_a_norm")


def absorbed(sketch: Sketch, narrow: Tensor, current: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of one compressed head."""
    graph, numbers = sketch.graph, sketch.numbers
    n_tokens, heads, rope = current.ne[1], sketch.layer.numbers.n_head, numbers.rope_part
    q = _queries(sketch, narrow)
    width = q.ne[0] // heads
    nb = (0, q.nb[0] * width, q.nb[1])
    if sketch.style.shapes_queries:
        q = graph.reshape(q, width, heads, n_tokens)
    packed, k_turned = _packed(sketch, current)
    q_bare = graph.view(q, (width - rope, heads, n_tokens), nb)
    q_turned = _turned(sketch, graph.view(q, (rope, heads, n_tokens), nb))
    q_bare = graph.mul_mat(sketch.weight("attn_k_b"), graph.permute(q_bare, 0, 2, 1, 3))
    queries = graph.concat(graph.permute(q_bare, 0, 2, 1, 3), q_turned, 0)
    values = graph.reshape(packed, packed.ne[0], 1, n_tokens)
    return queries, graph.concat(values, k_turned, 0), values


def _queries(sketch: Sketch, narrow: Tensor) -> Tensor:
    return sketch.graph.mul_mat(sketch.weight("attn_q_b" if sketch.has("attn_q_a") else "attn_q"), narrow)


def _packed(sketch: Sketch, current: Tensor) -> tuple[Tensor, Tensor]:
    """Return the compressed vector of each token, and the part of its key that is turned by position."""
    graph, numbers, n_tokens = sketch.graph, sketch.numbers, current.ne[1]
    joined = graph.mul_mat(sketch.weight("attn_kv_a_mqa"), current)
    packed = graph.view(joined, (joined.ne[0] - numbers.rope_part, n_tokens), joined.nb)
    k_turned = graph.view(joined, (numbers.rope_part, 1, n_tokens), (0, joined.nb[1], joined.nb[1]))
    if sketch.has("attn_k_norm"):
        k_turned = sketch.norm(k_turned, "attn_k_norm")
    return sketch.norm(packed, "attn_kv_a_norm"), _turned(sketch, k_turned)


def _turned(sketch: Sketch, source: Tensor) -> Tensor:
    return sketch.rope(source, sketch.inputs.positions) if sketch.layer.numbers.has_rope else source


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


def open_pools(sketch: Sketch, current: Tensor) -> Tensor:
    """Add the inputs of the indexer, then return the embeddings once for each stream."""
    new, n_tokens, pool = sketch.graph.new_input, sketch.batch.n_tokens, sketch.numbers.indexer.pool
    n_pools, n_new = _n_pools(sketch), max(1, _n_full_pools(sketch))
    pools = _Pools(
        cells=new("i32", n_pools),
        members=new("i32", pool, n_pools),
        mask=new("f16", n_pools, n_tokens),
        tail=new("i32", pool - 1, n_tokens),
        dead=new("f32", _n_selected(sketch), 1, 1, n_tokens),
        new_members=new("i32", pool, n_new),
        new_cells=new("i64", n_new),
    )
    sketch.shared.put(pools)
    for tensor in (pools.cells, pools.members, pools.mask, pools.tail, pools.dead):
        sketch.graph.expand(tensor)
    return open_streams(sketch, current)


def pooled_attention(sketch: Sketch, current: Tensor) -> Tensor:
    """Return the attention of a layer; layers without an indexer use the last one's choice."""
    graph, masks, batch = sketch.graph, sketch.inputs.full, sketch.batch
    narrow = narrow_queries(sketch, graph.expand(current))
    q = graph.mul_mat(sketch.weight("attn_q_b"), narrow)
    heads = sketch.layer.numbers.n_head
    q = graph.permute(graph.reshape(q, q.ne[0] // heads, heads, batch.n_tokens), 0, 2, 1, 3)
    q = graph.permute(graph.mul_mat(sketch.weight("attn_k_b"), q), 0, 2, 1, 3)
    packed = sketch.norm(graph.mul_mat(sketch.weight("attn_kv_a_mqa"), current), "attn_kv_a_norm")
    packed = graph.reshape(packed, packed.ne[0], 1, batch.n_tokens)
    gathers = batch.n_tokens <= _MOST_GATHERED and batch.n_cells > _n_selected(sketch)
    if sketch.layer.numbers.indexer_width:
        chosen = _selected_cells(sketch, narrow, current)
        sketch.shared.put(_Selection(chosen if gathers else _mask_of(sketch, masks, chosen)))
    selection = sketch.shared.get(_Selection).found
    if gathers:
        found = _gathered(sketch, masks, selection, q, packed)
    else:
        mask = graph.reshape(selection, *masks.mask.ne)
        found = attend_latent(sketch, replace(masks, mask=mask), q, packed, packed, out=None)
    return sketch.linear("attn_output", found)


def _n_full_pools(sketch: Sketch) -> int:
    """Return how many pools all sequences can have, as if each had all the cells of a unified cache."""
    return sketch.batch.n_cells // sketch.numbers.indexer.pool * sketch.batch.n_states


def _n_pools(sketch: Sketch) -> int:
    return pad(_n_full_pools(sketch) + 1, _POOL_PADDING)


def _n_selected(sketch: Sketch) -> int:
    """Return how many cells a token attends to at most."""
    numbers = sketch.numbers.indexer
    tail = numbers.pool - 1 if numbers.picks_tail else 0
    return numbers.pool * _n_best(sketch) + tail


def _n_best(sketch: Sketch) -> int:
    return min(_n_pools(sketch), sketch.numbers.indexer.n_chosen // sketch.numbers.indexer.pool)


def _selected_cells(sketch: Sketch, narrow: Tensor, current: Tensor) -> Tensor:
    """Return the cells of the pools with the best scores for each token."""
    graph, numbers, pools, n_tokens = sketch.graph, sketch.numbers.indexer, sketch.shared.get(_Pools), current.ne[1]
    q = graph.mul_mat(sketch.weight("indexer.attn_q_b"), narrow)
    q = graph.reshape(q, numbers.head, numbers.n_heads, n_tokens)
    n_pools = _n_pools(sketch)
    pooled = graph.reshape(_pooled_keys(sketch, current), numbers.head, 1, n_pools)
    weights = graph.scale(graph.mul_mat(sketch.weight("indexer.proj"), current))
    scores = graph.new("lightning_indexer", (n_pools, n_tokens), q, pooled, weights, pools.mask)
    n_best = _n_best(sketch)
    best = graph.new("top_k", (n_best, n_tokens), scores, type_name="i32")
    order = graph.get_rows(graph.reshape(scores, 1, n_pools, n_tokens), best)
    order = graph.new("argsort", (n_best, n_tokens), graph.reshape(order, n_best, n_tokens), type_name="i32")
    best = graph.get_rows(graph.reshape(graph.cast(best, "f32"), 1, n_best, n_tokens), order)
    best = graph.cast(graph.cont(graph.reshape(best, n_best, n_tokens)), "i32")
    members = graph.get_rows(pools.members, graph.reshape(best, n_best * n_tokens))
    members = graph.reshape(members, numbers.pool * n_best, n_tokens)
    return graph.concat(members, pools.tail, 0) if numbers.picks_tail else members


def _pooled_keys(sketch: Sketch, current: Tensor) -> Tensor:
    """Put keys and gates into the cache and pool those of complete pools; return what all pools have there."""
    graph, numbers, pools, n_tokens = sketch.graph, sketch.numbers.indexer, sketch.shared.get(_Pools), current.ne[1]
    assert sketch.inputs.indexer is not None
    keys = sketch.norm(graph.mul_mat(sketch.weight("indexer.attn_k"), current), "indexer.k_norm", layer_norm=True)
    gates = graph.mul_mat(sketch.weight("indexer_compressor_gate"), current)
    nothing = graph.like("fill", graph.scratch("f32", numbers.head, n_tokens))
    row = graph.concat(graph.concat(keys, gates, 0), nothing, 0)
    cache = stored_keys(sketch, 3 * numbers.head, sketch.batch.n_cells)
    graph.expand(store_keys(sketch, cache, graph.reshape(row, row.ne[0], 1, n_tokens), sketch.inputs.indexer.k_rows))
    n_rows = cache.ne[1] * cache.ne[2]
    n_new = pools.new_cells.ne[0]
    members = graph.reshape(pools.new_members, numbers.pool * n_new)
    known = graph.get_rows(graph.view(cache, (2 * numbers.head, n_rows), cache.nb), members)
    known = graph.reshape(known, 2 * numbers.head, numbers.pool, n_new)
    key, gate = (graph.view(known, (numbers.head, numbers.pool, n_new), known.nb) for _ in range(2))
    gate = graph.cont(graph.permute(graph.add(gate, sketch.weight("indexer_compressor_ape")), 1, 0, 2, 3))
    shares = graph.like("soft_max", graph.reshape(gate, numbers.pool, numbers.head * n_new))
    shares = graph.reshape(shares, numbers.pool, numbers.head, n_new)
    pooled = graph.sum_rows(graph.mul(shares, graph.cont(graph.permute(key, 1, 0, 2, 3))))
    place = graph.view(cache, (numbers.head, n_rows), cache.nb)
    graph.expand(graph.write("set_rows", place, graph.reshape(pooled, numbers.head, n_new), pools.new_cells))
    return graph.get_rows(place, pools.cells)


def _mask_of(sketch: Sketch, masks: Masks, chosen: Tensor) -> Tensor:
    """Return the mask of attention without the cells that were not chosen."""
    graph, (n_chosen, n_tokens), n_cells = sketch.graph, chosen.ne[:2], masks.mask.ne[0]
    seed = graph.cast(graph.view(chosen, (1,)), "f32")
    hidden = seed if masks.mask.type == "f32" else graph.cast(seed, masks.mask.type)
    hidden = graph.repeat(graph.like("fill", hidden), 1, n_cells + n_chosen, n_tokens)
    zeros = graph.repeat(graph.like("fill", seed), 1, n_chosen, n_tokens)
    alive = graph.unary(graph.reshape(sketch.shared.get(_Pools).dead, n_chosen, n_tokens))
    outside = graph.new("arange", (n_chosen,))
    cells = graph.mul(graph.like("sub", graph.cast(chosen, "f32"), outside), alive)
    cells = graph.cast(graph.add(cells, outside), "i32")
    hidden, zeros = graph.reshape(hidden, *hidden.ne), graph.reshape(zeros, *zeros.ne)
    shown = graph.write("set_rows", hidden, zeros, graph.reshape(cells, n_chosen, n_tokens, 1))
    shown = graph.view(shown, (n_cells, n_tokens), (0, shown.nb[2]))
    return graph.add(shown, graph.reshape(masks.mask, n_cells, n_tokens))


def _gathered(sketch: Sketch, masks: Masks, chosen: Tensor, q: Tensor, packed: Tensor) -> Tensor:
    """Store compressed keys, and attend to copies of the chosen ones."""
    graph, (rank, heads, n_tokens, _), n_chosen = sketch.graph, q.ne, chosen.ne[0]
    graph.expand(q)
    graph.expand(packed)
    cache, _ = cache_of(sketch, k_only=True)
    graph.expand(store_keys(sketch, cache, packed, masks.k_rows))
    graph.expand(masks.mask)
    rows = graph.view(cache, (rank, cache.ne[1] * cache.ne[2]), cache.nb)
    keys = graph.get_rows(rows, graph.reshape(chosen, n_chosen * n_tokens))
    keys = graph.reshape(keys, rank, n_chosen, 1, n_tokens)
    weights = graph.mul_mat(keys, graph.permute(q, 0, 2, 3, 1))
    weights = graph.like("soft_max", weights, sketch.shared.get(_Pools).dead)
    found = graph.mul_mat(graph.cont(graph.transpose(keys)), weights)
    found = graph.mul_mat(sketch.weight("attn_v_b"), found)
    found = graph.cont(graph.permute(found, 0, 2, 1, 3))
    return graph.reshape(found, found.ne[0] * heads, n_tokens)
