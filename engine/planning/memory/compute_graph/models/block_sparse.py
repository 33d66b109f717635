"""Attention to blocks of cells that are chosen for each token.

An indexer picks them for each group of heads (src/models/minimax-m3.cpp), or their mean keys score best (qwen4exp.cpp).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.model.gguf.tensor_table import TYPES_BY_NAME
from engine.planning.memory.compute_graph.building.attention import cpy_k, rotate, store, stored_keys
from engine.planning.memory.compute_graph.building.context import GraphContext, Masks
from engine.planning.memory.compute_graph.ggml.graph import Tensor, is_contiguous
from engine.planning.memory.compute_graph.models.delta_net import gated_attention_to
from engine.planning.memory.compute_graph.models.mla import only_chosen
from engine.planning.memory.compute_graph.models.transformer import attention, roped_qkv

_LEAST_POSITIONS = 256
"""The engine makes room for the positions in the cache, rounded up to this: an empty one when it is loaded."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Inputs that all layers share. `forced`: blocks near a token; `visible`: positions before it; `cells`: of a
    position; `blocks`: of a cell; `mask`: that of attention, in F32; `cell_numbers`: `cells` that can be gathered."""

    forced: Tensor
    visible: Tensor
    cells: Tensor
    blocks: Tensor
    mask: Tensor
    cell_numbers: Tensor


def block_sparse_attention(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the attention of a layer, to everything where blocks cannot be told apart."""
    batch = ctx.batch
    apart = batch.n_sequences == 1 or batch.n_streams > 1
    if not (ctx.layer.numbers.indexer_width and batch.flash and apart):
        return attention(ctx, current)
    graph, masks = ctx.graph, ctx.inputs.full
    q, k, v = roped_qkv(ctx, current)
    asks, cache = _asks(ctx, current)
    if masks.k_rot is not None:
        q, k = rotate(ctx, q, masks.k_rot), rotate(ctx, k, masks.k_rot)
    if masks.v_rot is not None:
        v = rotate(ctx, v, masks.v_rot)
    for part in (q, k, v):
        graph.expand(part)
    keys, values = store(ctx, masks, k, v)
    blocks = _blocks(ctx, masks)
    if batch.n_tokens == batch.n_streams:
        found = _single_tokens(ctx, blocks, asks, cache, q, keys, values)
    else:
        found = _one_stream(ctx, blocks, asks, cache, q, keys, values)
        for _ in range(1, batch.n_streams):
            found = graph.concat(found, _one_stream(ctx, blocks, asks, cache, q, keys, values), 1)
    if masks.v_rot is not None:
        found = rotate(ctx, found, masks.v_rot)
    return ctx.linear("attn_output", found)


def _blocks(ctx: GraphContext, masks: Masks) -> Blocks:
    """Return the inputs, made for the first layer that asks."""
    graph, batch, size = ctx.graph, ctx.batch, ctx.numbers.indexer.block
    n_blocks = -(-_LEAST_POSITIONS // size)
    return ctx.shared.once(
        Blocks,
        lambda: Blocks(
            forced=graph.new_input("f32", n_blocks, batch.n_tokens),
            visible=graph.new_input("f32", n_blocks * size, batch.n_tokens),
            cells=graph.new_input("i32", n_blocks * size, batch.n_streams),
            blocks=graph.new_input("i32", batch.n_cells, batch.n_streams),
            mask=graph.cast(masks.mask, "f32"),
            cell_numbers=graph.new_input("f32", n_blocks * size, batch.n_streams),
        ),
    )


def _asks(ctx: GraphContext, current: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the indexer looks for, and its keys in the cache as (head, 1, cells, sequences)."""
    graph, numbers, masks = ctx.graph, ctx.numbers.indexer, ctx.inputs.indexer
    assert masks is not None
    n_tokens = current.ne[1]
    q = graph.mul_mat(ctx.weight("indexer.q_proj"), current)
    k = graph.mul_mat(ctx.weight("indexer.k_proj"), current)
    q = ctx.build_norm(graph.reshape(q, numbers.head, numbers.n_heads, n_tokens), "indexer.q_norm")
    k = ctx.build_norm(graph.reshape(k, numbers.head, 1, n_tokens), "indexer.k_norm")
    q, k = ctx.rope(q, ctx.inputs.positions), ctx.rope(k, ctx.inputs.positions)
    cache = stored_keys(ctx, numbers.head, ctx.batch.n_cells)
    graph.expand(cpy_k(ctx, cache, k, masks.k_idxs))
    cells, streams = cache.ne[1:3]
    return q, graph.view(cache, (numbers.head, 1, cells, streams), (0, cache.nb[1], *cache.nb[1:3]))


def _one_stream(
    ctx: GraphContext, blocks: Blocks, asks: Tensor, cache: Tensor, q: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Return what one sequence finds."""
    graph, n_tokens = ctx.graph, ctx.batch.n_tokens // ctx.batch.n_streams
    row = blocks.forced.nb[1]
    forced = graph.view(blocks.forced, (blocks.forced.ne[0], 1, n_tokens), (0, row, row))
    chosen = _chosen_blocks(ctx, blocks, forced, asks, cache)
    mask = _mask_of(ctx, blocks, forced, chosen)
    q = graph.view(q, (*q.ne[:2], n_tokens), q.nb)
    k, v = (graph.permute(graph.view(part, part.ne[:3], part.nb), 0, 3, 1, 2) for part in (keys, values))
    return _attended(ctx, q, k, v, mask)


def _single_tokens(
    ctx: GraphContext, blocks: Blocks, asks: Tensor, cache: Tensor, q: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Return what one token of each sequence finds in gathered blocks."""
    graph, numbers, (head, groups, n_cells, streams) = ctx.graph, ctx.numbers.indexer, keys.ne
    n_positions, n_blocks = blocks.visible.ne[0], blocks.forced.ne[0]
    known = graph.get_rows(graph.view(cache, (numbers.head, n_cells, streams), cache.nb[1:]), blocks.cells)
    known = graph.reshape(known, numbers.head, n_positions, 1, streams)
    scores = graph.mul_mat(known, graph.reshape(asks, numbers.head, numbers.n_heads, 1, streams))
    scores = graph.add_to(scores, graph.reshape(blocks.visible, n_positions, 1, 1, streams))
    best = graph.new("pool", (n_blocks, numbers.n_heads, 1, streams), scores)
    best = graph.add(best, graph.reshape(blocks.forced, n_blocks, 1, 1, streams))
    n_chosen, size, heads = min(n_blocks, numbers.n_chosen), numbers.block, numbers.n_heads
    chosen = graph.new("top_k", (n_chosen, heads, 1, streams), best, type_name="i32")
    first = graph.reshape(graph.scale(graph.cast(chosen, "f32")), 1, n_chosen, heads, streams)
    positions = graph.add(graph.repeat(first, size, n_chosen, heads, streams), graph.new("arange", (size,)))
    count = size * n_chosen
    positions = graph.cast(graph.reshape(positions, count * heads, streams), "i32")
    cells = graph.get_rows(graph.reshape(blocks.cell_numbers, 1, n_positions, streams), positions)
    cells = graph.scale(graph.reshape(cells, size, n_chosen, heads, streams))
    rows = graph.add(cells, graph.reshape(graph.new("arange", (groups,)), 1, 1, heads))
    rows = graph.cast(graph.reshape(rows, count * heads, streams), "i32")

    def gathered(source: Tensor) -> Tensor:
        found = graph.get_rows(
            graph.view(source, (head, groups * n_cells, streams), (0, source.nb[1], source.nb[3])), rows
        )
        found = graph.reshape(found, head, count, 1, heads * streams)
        wanted = "f16" if TYPES_BY_NAME[source.type].block_elements > 1 else source.type
        return found if found.type == wanted else graph.cast(found, wanted)

    k, v = gathered(keys), gathered(values)
    mask = graph.get_rows(graph.reshape(blocks.visible, 1, n_positions, streams), positions)
    mask = graph.cast(graph.reshape(mask, count, 1, 1, heads * streams), "f16")
    return _attended(ctx, q, k, v, mask)


def _attended(ctx: GraphContext, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return attention of all groups of heads at once, groups and sequences side by side."""
    graph, (head, heads, n_tokens, _), channels = ctx.graph, q.ne, k.ne[3]
    each = heads // ctx.layer.numbers.n_head_kv
    q = graph.reshape(q, head, each, channels, heads * n_tokens // (each * channels))
    q = graph.permute(q, 0, 2, 3, 1)
    found = graph.new("flash_attn", (v.ne[0], q.ne[2], q.ne[1], q.ne[3]), q, k, v, mask)
    found = graph.permute(found, 0, 1, 3, 2)
    found = found if is_contiguous(found) else graph.cont(found)
    return graph.reshape(found, head * heads, n_tokens)


def _chosen_blocks(ctx: GraphContext, blocks: Blocks, forced: Tensor, asks: Tensor, cache: Tensor) -> Tensor:
    """Return the blocks with the best scores."""
    graph, (n_blocks, _, n_tokens, _), n_positions = ctx.graph, forced.ne, blocks.visible.ne[0]
    rows = graph.view(cache, (cache.ne[0], cache.ne[2]), cache.nb[1:])
    known = graph.get_rows(rows, graph.view(blocks.cells, (n_positions,)))
    asks = graph.view(asks, (*asks.ne[:2], n_tokens), asks.nb)
    scores = graph.mul_mat(known, graph.reshape(asks, asks.ne[0], asks.ne[1] * n_tokens))
    scores = graph.reshape(scores, n_positions, asks.ne[1], n_tokens)
    row = blocks.visible.nb[1]
    scores = graph.add_to(scores, graph.view(blocks.visible, (n_positions, 1, n_tokens), (0, row, row)))
    best = graph.add(graph.new("pool", (n_blocks, *scores.ne[1:]), scores), forced)
    n_chosen = min(n_blocks, ctx.numbers.indexer.n_chosen)
    return graph.new("top_k", (n_chosen, *best.ne[1:]), best, type_name="i32")


def _mask_of(ctx: GraphContext, blocks: Blocks, forced: Tensor, chosen: Tensor) -> Tensor:
    """Return the mask of attention without the blocks that were not chosen."""
    graph, (n_chosen, heads, n_tokens, _), n_blocks = ctx.graph, chosen.ne, forced.ne[0]
    hidden = graph.cast(graph.scale(forced), "f16")
    hidden = graph.reshape(graph.repeat(hidden, n_blocks, heads, n_tokens), 1, n_blocks, heads * n_tokens)
    shown = graph.reshape(graph.scale(graph.cast(chosen, "f32")), 1, n_chosen, heads * n_tokens)
    mask = graph.write("set_rows", hidden, shown, graph.reshape(chosen, n_chosen, heads * n_tokens))
    mask = graph.cont(graph.permute(graph.reshape(mask, n_blocks, heads, n_tokens), 0, 2, 1, 3))
    by_block = graph.cont(graph.transpose(graph.reshape(mask, n_blocks, n_tokens * heads)))
    n_cells = blocks.blocks.ne[0]
    by_cell = graph.cont(graph.transpose(graph.get_rows(by_block, graph.view(blocks.blocks, (n_cells,)))))
    seen = graph.view(blocks.mask, (n_cells, n_tokens), blocks.mask.nb)
    by_cell = graph.add_to(graph.reshape(by_cell, n_cells, n_tokens, heads), seen)
    return graph.cast(graph.reshape(by_cell, n_cells, n_tokens, 1, heads), "f16")


@dataclass(frozen=True, slots=True)
class _MeanBlocks:
    """Inputs that layers with blocks of the same size share. `bias`: of each block for each token."""

    size: int
    rows: Tensor
    of_cells: Tensor
    cells: Tensor
    positions: Tensor
    bias: Tensor

    @property
    def count(self) -> int:
        return self.bias.ne[0]


def block_scored_attention(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return gated attention; layers that compress their indexer's keys attend to the best blocks alone."""
    masks, size = ctx.inputs.full, ctx.layer.numbers.block_size
    if size and ctx.numbers.indexer.n_heads:
        chosen = _choose(ctx, _mean_blocks(ctx, size), current)
        masks = replace(masks, mask=only_chosen(ctx, masks.mask, chosen))
    return gated_attention_to(ctx, masks, current)


def _mean_blocks(ctx: GraphContext, size: int) -> _MeanBlocks:
    """Return the inputs for blocks of a size, made for the first layer that asks."""
    batch, streams, new = ctx.batch, ctx.batch.n_streams, ctx.graph.new_input
    count = -(-batch.n_cells // size)
    return ctx.shared.once(
        _MeanBlocks,
        lambda: _MeanBlocks(
            size=size,
            rows=new("i64", batch.n_tokens),
            of_cells=new("i32", batch.n_cells, streams),
            cells=new("i32", size * count, streams),
            positions=new("i32", 4 * count * streams),
            bias=new("f32", count, batch.n_tokens // streams, streams),
        ),
        of=size,
    )


def _choose(ctx: GraphContext, blocks: _MeanBlocks, current: Tensor) -> Tensor:
    """Return the cells of the blocks with the best scores for each token."""
    graph, batch, numbers = ctx.graph, ctx.batch, ctx.numbers.indexer
    streams, cells = batch.n_streams, batch.n_cells
    each = batch.n_tokens // streams
    k = graph.reshape(graph.mul_mat(ctx.weight("indexer.k_proj"), current), numbers.head, 1, batch.n_tokens)
    cache = stored_keys(ctx, numbers.head, cells)
    graph.expand(cpy_k(ctx, cache, k, blocks.rows))
    keys = _mean_keys(ctx, blocks, cache)
    q = graph.mul_mat(ctx.weight("indexer.q_proj"), current)
    q = ctx.build_norm(graph.reshape(q, numbers.head, numbers.n_heads, batch.n_tokens), "indexer.q_norm")
    q = ctx.rope(q, ctx.inputs.positions)
    scores = graph.mul_mat(keys, graph.reshape(q, numbers.head, numbers.n_heads * each, streams))
    scores = graph.unary(graph.reshape(scores, blocks.count, numbers.n_heads, each, streams))
    total = None
    for _ in range(numbers.n_heads):
        part = graph.view(scores, (blocks.count, each, streams), (0, *scores.nb[2:]))
        total = graph.cont(part) if total is None else graph.add(total, part)
    assert total is not None
    total = graph.add(total, blocks.bias)
    spread = graph.get_rows(graph.cont(graph.permute(total, 1, 0, 2, 3)), blocks.of_cells)
    spread = graph.cont(graph.permute(spread, 1, 0, 2, 3))
    mask = ctx.inputs.full.mask
    mask = mask if mask.type == "f32" else graph.cast(mask, "f32")
    spread = graph.add(spread, graph.reshape(mask, cells, each, streams))
    n_chosen = min(cells, numbers.n_chosen + blocks.size - 1)
    best = graph.cont(graph.new("top_k", (n_chosen, each, streams), spread, type_name="i32"))
    return graph.reshape(best, n_chosen, each, 1, streams)


def _mean_keys(ctx: GraphContext, blocks: _MeanBlocks, cache: Tensor) -> Tensor:
    """Return the mean key of each block, normalised and turned by the block's position."""
    graph, (head, cells, streams, _) = ctx.graph, cache.ne
    seen = graph.view(cache, (head, 1, cells, streams), (0, cache.nb[1], *cache.nb[1:3]))
    seen = graph.view(seen, (head, cells, streams), seen.nb[1:])
    members = graph.reshape(graph.get_rows(seen, blocks.cells), head, blocks.size, blocks.count, streams)
    total = None
    for _ in range(blocks.size):
        part = graph.cont(graph.view(members, (head, blocks.count, streams), (0, *members.nb[2:])))
        total = part if total is None else graph.add(total, part)
    assert total is not None
    flat = graph.reshape(graph.scale(total), head, blocks.count * streams)
    normed = ctx.build_norm(flat, "indexer.k_norm")
    roped = ctx.rope(graph.reshape(normed, head, 1, blocks.count * streams), blocks.positions)
    return graph.reshape(roped, head, blocks.count, streams)
