"""DeepSeek 4 (src/models/deepseek4.cpp): attention to a sliding window, and to compressed keys of all tokens before it.

The keys of several tokens are compressed to one. A state contains the tokens that do not yet fill a block.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

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
from engine.planning.memory.compute_graph.models.mla import build_lid_top_k_cells, build_top_k_mask, by_stream, q_lora
from engine.planning.memory.compute_graph.models.residual_streams import repeat_streams
from engine.planning.memory.kv_cache import CELL_PADDING, pad

Kind = Literal["csa", "hca", "lid"]
"""Kinds of compressed keys, as in llama-kv-cache-dsv4.cpp.

`csa`: lower compression ratio. `hca`: higher ratio. `lid`: for the lightning indexer, lower ratio.
"""


class Compression(Struct, frozen=True):
    """Input tensors that all layers share for one kind of compressed keys (`llm_graph_input_dsv4`).

    The keys of a block of tokens are compressed to one key. A layer's state has one row for each of the latest tokens,
    because later blocks need these tokens.

    `offsets`: index of each token in its block.
    `kept`: indices of the batch's tokens that are written to the state.
    `rows`: rows of the state for these tokens.
    `read`: indices of the rows of complete blocks. Rows of the state are numbered first, then those of the batch.
    `cells`: cells of the new compressed keys.
    `positions`: positions of the new compressed keys.
    `mask`: mask of attention to the compressed keys.
    """

    offsets: Tensor
    kept: Tensor
    rows: Tensor
    read: Tensor
    cells: Tensor
    positions: Tensor
    mask: Tensor


class _Rotation(Struct, frozen=True):
    """Hadamard matrix for keys of one kind (compressed, or in the window). Keys are multiplied by it before storing."""

    matrix: Tensor


def compression(ctx: GraphContext, kind: Kind) -> Compression:
    """Return the input tensors for a kind of compressed keys; they are made for the first layer and then shared."""
    return ctx.shared.once(Compression, lambda: _new_compression(ctx, kind), of=kind)


def _new_compression(ctx: GraphContext, kind: Kind) -> Compression:
    batch, new, ratio = ctx.batch, ctx.graph.new_input, _ratio(kind)
    # Each sequence may complete one more block with the tokens that its state keeps from earlier batches.
    n_blocks = batch.n_tokens // ratio + batch.n_sequences
    n_kept = min(batch.n_tokens, _n_rows(ctx, kind))
    shape = n_cells(ctx, kind), batch.n_tokens // batch.n_streams, 1, batch.n_streams
    return Compression(
        offsets=new("i32", batch.n_tokens),
        kept=new("i32", n_kept),
        rows=new("i32", n_kept),
        read=new("i32", (1 if kind == "hca" else 2) * ratio * n_blocks),
        cells=new("i64", n_blocks),
        positions=new("i32", n_blocks),
        mask=new("f16" if kind == "lid" or batch.flash else "f32", *shape),
    )


def n_cells(ctx: GraphContext, kind: Kind) -> int:
    """Return the number of cells for compressed keys of `kind` in one stream (the cache of one sequence)."""
    return pad(max(1, -(-ctx.batch.n_cells // _ratio(kind))), CELL_PADDING)


def rotation_matrix(ctx: GraphContext, kind: Kind | Literal["window"]) -> Tensor | None:
    """Return the Hadamard matrix for a kind of compressed keys, or for keys in the window; None if there is none."""
    head = ctx.hparams.indexer.head_size
    if kind != "lid":
        head = ctx.layer.hparams.head_k
        quantised = ctx.batch.type_k not in ("f32", "f16", "bf16") and head % 64 == 0
        # `llama_kv_cache` always has a matrix if heads are as large as those of the indexer, also for an F16 cache.
        if not quantised and head != ctx.hparams.indexer.head_size:
            return None
    size = hadamard_size(head)
    return ctx.shared.once(_Rotation, lambda: _Rotation(ctx.graph.new_input("f32", size, size)), of=kind).matrix


def compress(ctx: GraphContext, kind: Kind, current: Tensor, cache: Tensor) -> None:
    """Write compressed keys of complete blocks to `cache`, and keys and scores of the last tokens to the layer's state.

    Later blocks need the state.

    `current`: normalised input of the layer.
    """
    graph, batch, stem = ctx.graph, ctx.batch, "indexer_compressor" if kind == "lid" else "attn_compressor"
    given = compression(ctx, kind)
    keys = graph.mul_mat(ctx.weight(f"{stem}_kv"), current)
    scores = graph.mul_mat(ctx.weight(f"{stem}_gate"), current)
    scores = graph.add(scores, graph.get_rows(ctx.weight(f"{stem}_ape"), given.offsets))
    buft = ctx.layer.buft if batch.offload_kqv else "host"
    n_rows, width = _n_rows(ctx, kind), keys.ne[0]
    states = [graph.cache_tensor(buft, "f32", width, n_rows // batch.n_streams, batch.n_streams) for _ in range(2)]
    known, known_scores = (
        graph.concat(graph.view(graph.view(state, (width, n_rows)), (width, n_rows)), new, 1)
        for state, new in zip(states, (keys, scores), strict=True)
    )
    weigh = _hca_compressed_kv if kind == "hca" else _overlap_compressed_kv
    found = ctx.build_norm(weigh(ctx, given, known, known_scores), f"{stem}_norm")
    found = ctx.rope(found, given.positions)
    matrix = rotation_matrix(ctx, kind)
    if matrix is not None:
        found = rotate(ctx, found, matrix)
    graph.build_forward_expand(cpy_k(ctx, cache, found, given.cells))
    kept = [
        graph.write("set_rows", graph.view(state, (width, n_rows)), graph.get_rows(new, given.kept), given.rows)
        for state, new in zip(states, (keys, scores), strict=True)
    ]
    for part in kept:
        graph.build_forward_expand(part)


def _ratio(kind: Kind) -> int:
    low, high = COMPRESSED_RATIOS
    return high if kind == "hca" else low


def _n_rows(ctx: GraphContext, kind: Kind) -> int:
    """Return the number of rows of a layer's state for all streams.

    A stream has as many rows as the compression ratio. Kinds "csa" and "lid" have twice as many, because their blocks
    overlap.
    """
    return (1 if kind == "hca" else 2) * _ratio(kind) * ctx.batch.n_streams


def _hca_compressed_kv(ctx: GraphContext, given: Compression, keys: Tensor, scores: Tensor) -> Tensor:
    """Return the compressed keys of blocks that do not overlap (`build_hca_compressed_kv_from_state`).

    `keys`, `scores`: rows of the layer's state (tokens of earlier batches), then rows of this batch.
    """
    graph, ratio = ctx.graph, _ratio("hca")
    shape = keys.ne[0], ratio, given.positions.ne[0]
    keys = graph.reshape(graph.get_rows(keys, given.read), *shape)
    scores = graph.reshape(graph.get_rows(scores, given.read), *shape)
    return _weighted(ctx, keys, scores)


def _overlap_compressed_kv(ctx: GraphContext, given: Compression, keys: Tensor, scores: Tensor) -> Tensor:
    """Return the compressed keys of blocks that overlap the previous block
    (`build_overlap_compressed_kv_from_state`).

    `keys`, `scores`: rows of the layer's state (tokens of earlier batches), then rows of this batch.
    """
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
    """Return the sum of each block's keys, weighted by the softmax of their scores; its shape is (head, 1, blocks)."""
    graph = ctx.graph
    keys, scores = (graph.cont(graph.permute(part, 1, 0, 2, 3)) for part in (keys, scores))
    total = graph.sum_rows(graph.mul(keys, graph.like("soft_max", scores)))
    return graph.cont(graph.permute(total, 1, 0, 2, 3))


def dsv4_inputs(ctx: GraphContext, current: Tensor) -> Tensor:
    """Add the mask of the sliding window to the graph, and return the embeddings repeated for each residual stream."""
    assert ctx.inputs.inp_attn_swa is not None
    ctx.graph.build_forward_expand(ctx.inputs.inp_attn_swa.mask)
    return repeat_streams(ctx, current)


def dsv4_attention(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the output of a layer's attention for its normalised input (`build_attention`)."""
    graph, hparams, n_tokens = ctx.graph, ctx.layer.hparams, current.ne[1]
    head, heads = hparams.head_k, hparams.n_head
    narrow = q_lora(ctx, current)
    q = graph.reshape(graph.mul_mat(ctx.weight("attn_q_b"), narrow), head, heads, n_tokens)
    q = ctx.rope(ctx.raw_norm(q), ctx.inputs.inp_pos)
    k = ctx.build_norm(graph.mul_mat(ctx.weight("attn_kv"), current), "attn_kv_a_norm")
    k = ctx.rope(graph.reshape(k, head, 1, n_tokens), ctx.inputs.inp_pos)
    found = _attended(ctx, q, k, narrow, current)
    found = ctx.rope(graph.reshape(found, head, heads, n_tokens), ctx.inputs.inp_pos)
    width, _, groups, _ = (*ctx.layer.weights["attn_output_a"].ne, 1)
    found = graph.permute(graph.reshape(found, width, groups, n_tokens), 0, 2, 1, 3)
    found = graph.permute(graph.mul_mat(ctx.weight("attn_output_a"), found), 0, 2, 1, 3)
    found = graph.cont(found, found.ne[0] * found.ne[1], n_tokens)
    return graph.mul_mat(ctx.weight("attn_output_b"), found)


def _attended(ctx: GraphContext, q: Tensor, k: Tensor, narrow: Tensor, current: Tensor) -> Tensor:
    """Return the output of attention to the window, and to compressed keys if the layer has them.

    `narrow`: low-rank input of the query projection.
    Mirrors `build_raw_attention`, `build_csa_lid_attention` and `build_hca_attention`.
    """
    graph, inp_attn, low = ctx.graph, ctx.inputs.inp_attn_swa, COMPRESSED_RATIOS[0]
    assert inp_attn is not None
    kind: Kind | None = None
    mask = None
    if ctx.layer.hparams.ratio:
        kind = "csa" if ctx.layer.hparams.ratio == low else "hca"
        stored = stored_keys(ctx, k.ne[0], n_cells(ctx, kind))
        compress(ctx, kind, current, stored)
        mask = compression(ctx, kind).mask
    if kind == "csa" and mask is not None:
        mask = build_top_k_mask(ctx, mask, _lid_top_k(ctx, narrow, current), mask.type)
    matrix = rotation_matrix(ctx, "window")
    if matrix is not None:
        q, k = rotate(ctx, q, matrix), rotate(ctx, k, matrix)
    for part in (q, k):
        graph.build_forward_expand(part)
    cache, _ = cache_of(ctx, k_only=True)
    graph.build_forward_expand(cpy_k(ctx, cache, k, inp_attn.k_idxs))
    keys, seen = _by_head(ctx, cache), inp_attn.mask
    if mask is not None:
        keys = graph.concat(keys, _by_head(ctx, stored), 2)
        seen = graph.concat(seen, mask, 0)
    found = build_attn_mha(ctx, q, keys, keys, seen, sinks=ctx.maybe("attn_sinks"))
    return found if matrix is None else rotate(ctx, found, matrix)


def _by_head(ctx: GraphContext, cache: Tensor) -> Tensor:
    row = cache.nb[1]
    return ctx.graph.view(cache, (cache.ne[0], 1, *cache.ne[1:3]), (0, row, row, row * cache.ne[1]))


def _lid_top_k(ctx: GraphContext, narrow: Tensor, current: Tensor) -> Tensor:
    """Return the indices of the compressed keys with the highest scores of the lightning indexer, by token.

    Mirrors `build_lid_top_k`.

    `narrow`: low-rank input of the query projection.
    """
    graph, hparams, n_tokens = ctx.graph, ctx.hparams.indexer, current.ne[1]
    cache = stored_keys(ctx, hparams.head_size, n_cells(ctx, "lid"))
    compress(ctx, "lid", current, cache)
    q = graph.reshape(
        graph.mul_mat(ctx.weight("indexer.attn_q_b"), narrow), hparams.head_size, hparams.n_head, n_tokens
    )
    q = ctx.rope(q, ctx.inputs.inp_pos)
    matrix = rotation_matrix(ctx, "lid")
    assert matrix is not None
    q = rotate(ctx, q, matrix)
    weights = by_stream(ctx, graph.scale(graph.mul_mat(ctx.weight("indexer.proj"), current)))
    mask = compression(ctx, "lid").mask
    return graph.cont(build_lid_top_k_cells(ctx, q, cache, weights, mask, hparams.top_k))
