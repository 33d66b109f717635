"""Attention to blocks of cells that are selected for each token.

In MSA (src/models/minimax-m3.cpp) an indexer selects blocks for each group of heads. In QSA (qwen4exp.cpp) blocks are
selected by the scores of their mean keys.
"""

from __future__ import annotations

from msgspec import Struct

from engine.base.values import replace
from engine.model.gguf.tensor_table import TYPES_BY_NAME
from engine.planning.memory.compute_graph.building.attention import cpy_k, rotate, store, stored_keys
from engine.planning.memory.compute_graph.building.context import AttnInput, GraphContext
from engine.planning.memory.compute_graph.ggml.graph import Tensor, is_contiguous
from engine.planning.memory.compute_graph.models.delta_net import build_layer_attn_to
from engine.planning.memory.compute_graph.models.mla import build_top_k_mask
from engine.planning.memory.compute_graph.models.transformer import attention, roped_qkv


class MsaInput(Struct, frozen=True):
    """Input tensors for attention to selected blocks that all layers share (`llm_graph_input_attn_kv_msa`).

    `forced`: bias of blocks near a token, which are always selected.
    `visible`: bias of the positions before a token.
    `cells`: cell of each position.
    `blocks`: block of each cell.
    `mask`: attention mask in F32.
    `cell_numbers`: `cells` as F32, so that rows of it can be gathered.
    """

    forced: Tensor
    visible: Tensor
    cells: Tensor
    blocks: Tensor
    mask: Tensor
    cell_numbers: Tensor


def msa_attention(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the output of MSA: attention to blocks of cells that an indexer selects (`build_attn_msa_fa`).

    Return that of full attention instead if the layer has no indexer, flash attention is off, or several sequences
    share one stream (part) of the KV cache.
    """
    batch = ctx.batch
    # Cells of several sequences in one stream cannot be divided into blocks of one sequence.
    apart = batch.n_sequences == 1 or batch.n_streams > 1
    if not (ctx.layer.hparams.indexer_width and batch.flash and apart):
        return attention(ctx, current)
    graph, inp_attn = ctx.graph, ctx.inputs.inp_attn
    q, k, v = roped_qkv(ctx, current)
    idx_q, cache = _indexer_qk(ctx, current)
    if inp_attn.k_rot is not None:
        q, k = rotate(ctx, q, inp_attn.k_rot), rotate(ctx, k, inp_attn.k_rot)
    if inp_attn.v_rot is not None:
        v = rotate(ctx, v, inp_attn.v_rot)
    for part in (q, k, v):
        graph.build_forward_expand(part)
    keys, values = store(ctx, inp_attn, k, v)
    blocks = _blocks(ctx, inp_attn)
    if batch.n_tokens == batch.n_streams:
        found = _single_tokens(ctx, blocks, idx_q, cache, q, keys, values)
    else:
        found = _one_stream(ctx, blocks, idx_q, cache, q, keys, values)
        for _ in range(1, batch.n_streams):
            found = graph.concat(found, _one_stream(ctx, blocks, idx_q, cache, q, keys, values), 1)
    if inp_attn.v_rot is not None:
        found = rotate(ctx, found, inp_attn.v_rot)
    return ctx.linear("attn_output", found)


def _blocks(ctx: GraphContext, inp_attn: AttnInput) -> MsaInput:
    """Return the input tensors for attention to blocks that an indexer selects. Layers share them."""
    graph, batch, size = ctx.graph, ctx.batch, ctx.hparams.indexer.block_size
    n_blocks = -(-batch.n_positions // size)
    return ctx.shared.once(
        MsaInput,
        lambda: MsaInput(
            forced=graph.new_input("f32", n_blocks, batch.n_tokens),
            visible=graph.new_input("f32", n_blocks * size, batch.n_tokens),
            cells=graph.new_input("i32", n_blocks * size, batch.n_streams),
            blocks=graph.new_input("i32", batch.n_cells, batch.n_streams),
            mask=graph.cast(inp_attn.mask, "f32"),
            cell_numbers=graph.new_input("f32", n_blocks * size, batch.n_streams),
        ),
    )


def _indexer_qk(ctx: GraphContext, current: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indexer's queries, and its keys in the cache with shape (head, 1, cells, streams)."""
    graph, hparams, inp_attn = ctx.graph, ctx.hparams.indexer, ctx.inputs.inp_indexer
    assert inp_attn is not None
    n_tokens = current.ne[1]
    q = graph.mul_mat(ctx.weight("indexer.q_proj"), current)
    k = graph.mul_mat(ctx.weight("indexer.k_proj"), current)
    q = ctx.build_norm(graph.reshape(q, hparams.head_size, hparams.n_head, n_tokens), "indexer.q_norm")
    k = ctx.build_norm(graph.reshape(k, hparams.head_size, 1, n_tokens), "indexer.k_norm")
    q, k = ctx.rope(q, ctx.inputs.inp_pos), ctx.rope(k, ctx.inputs.inp_pos)
    cache = stored_keys(ctx, hparams.head_size, ctx.batch.n_cells)
    graph.build_forward_expand(cpy_k(ctx, cache, k, inp_attn.k_idxs))
    cells, streams = cache.ne[1:3]
    return q, graph.view(cache, (hparams.head_size, 1, cells, streams), (0, cache.nb[1], *cache.nb[1:3]))


def _one_stream(
    ctx: GraphContext, blocks: MsaInput, idx_q: Tensor, cache: Tensor, q: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Return the output of attention to selected blocks, for the tokens of one sequence.

    `idx_q`, `cache`: the indexer's queries, and its keys in the cache.
    """
    graph, n_tokens = ctx.graph, ctx.batch.n_tokens // ctx.batch.n_streams
    row = blocks.forced.nb[1]
    forced = graph.view(blocks.forced, (blocks.forced.ne[0], 1, n_tokens), (0, row, row))
    chosen = _chosen_blocks(ctx, blocks, forced, idx_q, cache)
    mask = _mask_of(ctx, blocks, forced, chosen)
    q = graph.view(q, (*q.ne[:2], n_tokens), q.nb)
    k, v = (graph.permute(graph.view(part, part.ne[:3], part.nb), 0, 3, 1, 2) for part in (keys, values))
    return _attended(ctx, q, k, v, mask)


def _single_tokens(
    ctx: GraphContext, blocks: MsaInput, idx_q: Tensor, cache: Tensor, q: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Return the output of attention to copies of the selected blocks, for one token of each sequence.

    `idx_q`, `cache`: the indexer's queries, and its keys in the cache.
    """
    graph, hparams, (head, groups, n_cells, streams) = ctx.graph, ctx.hparams.indexer, keys.ne
    n_positions, n_blocks = blocks.visible.ne[0], blocks.forced.ne[0]
    known = graph.get_rows(graph.view(cache, (hparams.head_size, n_cells, streams), cache.nb[1:]), blocks.cells)
    known = graph.reshape(known, hparams.head_size, n_positions, 1, streams)
    scores = graph.mul_mat(known, graph.reshape(idx_q, hparams.head_size, hparams.n_head, 1, streams))
    scores = graph.add_inplace(scores, graph.reshape(blocks.visible, n_positions, 1, 1, streams))
    best = graph.new("pool", (n_blocks, hparams.n_head, 1, streams), scores)
    best = graph.add(best, graph.reshape(blocks.forced, n_blocks, 1, 1, streams))
    n_chosen, size, heads = min(n_blocks, hparams.top_k), hparams.block_size, hparams.n_head
    chosen = graph.new("top_k", (n_chosen, heads, 1, streams), best, type_name="i32")
    first = graph.reshape(graph.scale(graph.cast(chosen, "f32")), 1, n_chosen, heads, streams)
    positions = graph.add(graph.repeat(first, size, n_chosen, heads, streams), graph.new("arange", (size,)))
    count = size * n_chosen
    positions = graph.cast(graph.reshape(positions, count * heads, streams), "i32")
    cells = graph.get_rows(graph.reshape(blocks.cell_numbers, 1, n_positions, streams), positions)
    cells = graph.scale(graph.reshape(cells, size, n_chosen, heads, streams))
    # A cell has one row for each group of heads, so the row of a group is cell x groups + group.
    rows = graph.add(cells, graph.reshape(graph.new("arange", (groups,)), 1, 1, heads))
    rows = graph.cast(graph.reshape(rows, count * heads, streams), "i32")

    def gathered(source: Tensor) -> Tensor:
        found = graph.get_rows(
            graph.view(source, (head, groups * n_cells, streams), (0, source.nb[1], source.nb[3])), rows
        )
        found = graph.reshape(found, head, count, 1, heads * streams)
        # `get_rows` makes F32 of a quantised cache, and flash attention then reads a copy in F16.
        wanted = "f16" if TYPES_BY_NAME[source.type].block_elements > 1 else source.type
        return found if found.type == wanted else graph.cast(found, wanted)

    k, v = gathered(keys), gathered(values)
    mask = graph.get_rows(graph.reshape(blocks.visible, 1, n_positions, streams), positions)
    mask = graph.cast(graph.reshape(mask, count, 1, 1, heads * streams), "f16")
    return _attended(ctx, q, k, v, mask)


def _attended(ctx: GraphContext, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return the output of attention, computed in one graph node for all groups of heads of all sequences.

    Groups and sequences share one dimension of the tensors.
    """
    graph, (head, heads, n_tokens, _), channels = ctx.graph, q.ne, k.ne[3]
    each = heads // ctx.layer.hparams.n_head_kv
    q = graph.reshape(q, head, each, channels, heads * n_tokens // (each * channels))
    q = graph.permute(q, 0, 2, 3, 1)
    found = graph.new("flash_attn", (v.ne[0], q.ne[2], q.ne[1], q.ne[3]), q, k, v, mask)
    found = graph.permute(found, 0, 1, 3, 2)
    found = found if is_contiguous(found) else graph.cont(found)
    return graph.reshape(found, head * heads, n_tokens)


def _chosen_blocks(ctx: GraphContext, blocks: MsaInput, forced: Tensor, idx_q: Tensor, cache: Tensor) -> Tensor:
    """Return the indices of the blocks with the highest scores, by head of the indexer and token.

    `forced`: bias of blocks that are always selected.
    `idx_q`, `cache`: the indexer's queries, and its keys in the cache.
    """
    graph, (n_blocks, _, n_tokens, _), n_positions = ctx.graph, forced.ne, blocks.visible.ne[0]
    rows = graph.view(cache, (cache.ne[0], cache.ne[2]), cache.nb[1:])
    known = graph.get_rows(rows, graph.view(blocks.cells, (n_positions,)))
    idx_q = graph.view(idx_q, (*idx_q.ne[:2], n_tokens), idx_q.nb)
    scores = graph.mul_mat(known, graph.reshape(idx_q, idx_q.ne[0], idx_q.ne[1] * n_tokens))
    scores = graph.reshape(scores, n_positions, idx_q.ne[1], n_tokens)
    row = blocks.visible.nb[1]
    scores = graph.add_inplace(scores, graph.view(blocks.visible, (n_positions, 1, n_tokens), (0, row, row)))
    best = graph.add(graph.new("pool", (n_blocks, *scores.ne[1:]), scores), forced)
    n_chosen = min(n_blocks, ctx.hparams.indexer.top_k)
    return graph.new("top_k", (n_chosen, *best.ne[1:]), best, type_name="i32")


def _mask_of(ctx: GraphContext, blocks: MsaInput, forced: Tensor, chosen: Tensor) -> Tensor:
    """Return the attention mask in which all blocks are masked except the selected ones.

    `forced`: bias of blocks that are always selected.
    `chosen`: indices of the selected blocks, by head of the indexer and token.
    """
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
    by_cell = graph.add_inplace(graph.reshape(by_cell, n_cells, n_tokens, heads), seen)
    return graph.cast(graph.reshape(by_cell, n_cells, n_tokens, 1, heads), "f16")


class _QsaInput(Struct, frozen=True):
    """Input tensors of QSA (attention to blocks by their mean keys) that layers with the same block size share.

    `size`: number of cells in a block.
    `rows`: rows of the cache to which the batch's keys are written.
    `of_cells`: block of each cell. `cells`: cells of each block.
    `positions`: position of each block.
    `bias`: bias of each block for each token.
    """

    size: int
    rows: Tensor
    of_cells: Tensor
    cells: Tensor
    positions: Tensor
    bias: Tensor

    @property
    def count(self) -> int:
        return self.bias.ne[0]


def qsa_attention(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the output of gated attention to blocks that are selected by mean keys (`build_attn_qsa` in qwen4exp.cpp).

    If there is no indexer, it is attention to all cells.
    """
    inp_attn, size = ctx.inputs.inp_attn, ctx.layer.hparams.block_size
    if size and ctx.hparams.indexer.n_head:
        chosen = _build_qsa_top_k(ctx, _mean_blocks(ctx, size), current)
        inp_attn = replace(inp_attn, mask=build_top_k_mask(ctx, inp_attn.mask, chosen))
    return build_layer_attn_to(ctx, inp_attn, current)


def _mean_blocks(ctx: GraphContext, size: int) -> _QsaInput:
    """Return the input tensors for selecting blocks of `size` cells by their mean keys. Layers share them."""
    batch, streams, new = ctx.batch, ctx.batch.n_streams, ctx.graph.new_input
    count = -(-batch.n_cells // size)
    return ctx.shared.once(
        _QsaInput,
        lambda: _QsaInput(
            size=size,
            rows=new("i64", batch.n_tokens),
            of_cells=new("i32", batch.n_cells, streams),
            cells=new("i32", size * count, streams),
            positions=new("i32", 4 * count * streams),
            bias=new("f32", count, batch.n_tokens // streams, streams),
        ),
        of=size,
    )


def _build_qsa_top_k(ctx: GraphContext, blocks: _QsaInput, current: Tensor) -> Tensor:
    """Return the cells of the blocks with the highest scores, by token (`build_qsa_top_k`)."""
    graph, batch, hparams = ctx.graph, ctx.batch, ctx.hparams.indexer
    streams, cells = batch.n_streams, batch.n_cells
    each = batch.n_tokens // streams
    k = graph.reshape(graph.mul_mat(ctx.weight("indexer.k_proj"), current), hparams.head_size, 1, batch.n_tokens)
    cache = stored_keys(ctx, hparams.head_size, cells)
    graph.build_forward_expand(cpy_k(ctx, cache, k, blocks.rows))
    keys = _mean_keys(ctx, blocks, cache)
    q = graph.mul_mat(ctx.weight("indexer.q_proj"), current)
    q = ctx.build_norm(graph.reshape(q, hparams.head_size, hparams.n_head, batch.n_tokens), "indexer.q_norm")
    q = ctx.rope(q, ctx.inputs.inp_pos)
    scores = graph.mul_mat(keys, graph.reshape(q, hparams.head_size, hparams.n_head * each, streams))
    scores = graph.unary(graph.reshape(scores, blocks.count, hparams.n_head, each, streams))
    total = None
    for _ in range(hparams.n_head):
        part = graph.view(scores, (blocks.count, each, streams), (0, *scores.nb[2:]))
        total = graph.cont(part) if total is None else graph.add(total, part)
    assert total is not None
    total = graph.add(total, blocks.bias)
    spread = graph.get_rows(graph.cont(graph.permute(total, 1, 0, 2, 3)), blocks.of_cells)
    spread = graph.cont(graph.permute(spread, 1, 0, 2, 3))
    mask = ctx.inputs.inp_attn.mask
    mask = mask if mask.type == "f32" else graph.cast(mask, "f32")
    spread = graph.add(spread, graph.reshape(mask, cells, each, streams))
    n_chosen = min(cells, hparams.top_k + blocks.size - 1)
    best = graph.cont(graph.new("top_k", (n_chosen, each, streams), spread, type_name="i32"))
    return graph.reshape(best, n_chosen, each, 1, streams)


def _mean_keys(ctx: GraphContext, blocks: _QsaInput, cache: Tensor) -> Tensor:
    """Return the mean of the keys in each block, normalised and rotated by the block's position."""
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
