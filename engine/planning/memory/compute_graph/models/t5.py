"""Layers of T5: a bias by distance on attention, and in the decoder attention to what the encoder made of a text."""

from __future__ import annotations

from dataclasses import dataclass

from engine.planning.memory.compute_graph.building.attention import build_attn, build_attn_inp_no_cache, build_attn_mha
from engine.planning.memory.compute_graph.building.context import GraphContext, Masks
from engine.planning.memory.compute_graph.ggml.graph import Tensor


@dataclass(frozen=True, slots=True)
class _Encoded:
    """What the encoder made of a text of the longest length, and the mask of attention to it."""

    text: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class _Distances:
    """Numbers of the distances between tokens."""

    buckets: Tensor


@dataclass(frozen=True, slots=True)
class _FirstTable:
    """The first layer's biases by distance, for layers that have none of their own."""

    biases: Tensor


def open_decoder(ctx: GraphContext, current: Tensor) -> Tensor:
    """Make the decoder's inputs: an encoded text of the longest length, its mask, and distances; return `current`."""
    batch, numbers, new = ctx.batch, ctx.numbers, ctx.graph.new_input
    ctx.shared.put(
        _Encoded(
            text=new("f32", numbers.n_embd, numbers.n_ctx_train),
            mask=new("f16" if batch.flash else "f32", numbers.n_ctx_train, batch.n_tokens),
        )
    )
    ctx.shared.put(_Distances(new("i32", batch.n_cells, batch.n_tokens)))
    return current


def open_encoder(ctx: GraphContext, current: Tensor) -> Tensor:
    """Make the encoder's inputs: a mask of the batch against itself, and distances in it; return `current`."""
    ctx.shared.put(build_attn_inp_no_cache(ctx))
    ctx.shared.put(_Distances(ctx.graph.new_input("i32", ctx.batch.n_tokens, ctx.batch.n_tokens)))
    return current


def t5_decoder_layer(ctx: GraphContext, previous: Tensor) -> Tensor:
    """Return the output of a layer that attends to the cache, then to the encoded text."""
    graph, encoded = ctx.graph, ctx.shared.get(_Encoded)
    q, k, v = _projections(ctx, "attn", *[ctx.build_norm(previous, "attn_norm")] * 3)
    bias = _bias(ctx)
    found = build_attn(ctx, ctx.inputs.full, q, k, v, sliding=False, bias=bias, out="attn_o")
    joined = graph.add(found, previous)
    normed = ctx.build_norm(joined, "cross_attn_norm")
    q, k, v = _projections(ctx, "cross_attn", normed, encoded.text, encoded.text)
    for part in (q, k, v):
        graph.expand(part)
    current = ctx.linear("cross_attn_o", build_attn_mha(ctx, q, k, v, encoded.mask))
    return _feed_forward(ctx, current, joined)


def t5_encoder_layer(ctx: GraphContext, previous: Tensor) -> Tensor:
    """Return the output of a layer that attends to the batch alone."""
    graph = ctx.graph
    q, k, v = _projections(ctx, "attn", *[ctx.build_norm(previous, "attn_norm")] * 3)
    bias = _bias(ctx)
    for part in (q, k, v):
        graph.expand(part)
    found = build_attn_mha(ctx, q, k, v, ctx.shared.get(Masks).mask, bias=bias)
    return _feed_forward(ctx, ctx.linear("attn_o", found), previous)


def _projections(ctx: GraphContext, name: str, *sources: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of one source each."""
    graph, numbers = ctx.graph, ctx.layer.numbers
    heads = ((numbers.head_k, numbers.n_head), (numbers.head_k, numbers.n_head_kv), (numbers.head_v, numbers.n_head_kv))
    parts = []
    for letter, (head, count), source in zip("qkv", heads, sources, strict=True):
        part = graph.mul_mat(ctx.weight(f"{name}_{letter}"), source)
        if part.ne[0] != head * count:
            raise ValueError(f"{name}_{letter} has {part.ne[0]} rows for {count} heads of {head}")
        parts.append(graph.reshape(part, head, count, source.ne[1]))
    return parts[0], parts[1], parts[2]


def _bias(ctx: GraphContext) -> Tensor:
    """Return what distances add to attention, by the layer's own table or the first one's."""
    graph, buckets = ctx.graph, ctx.shared.get(_Distances).buckets
    if ctx.place == 0 or ctx.has("attn_rel_b"):
        table = ctx.weight("attn_rel_b")
        if ctx.place == 0:
            ctx.shared.put(_FirstTable(table))
    else:
        table = ctx.shared.get(_FirstTable).biases
    rows = graph.get_rows(table, graph.reshape(buckets, buckets.ne[0] * buckets.ne[1]))
    rows = graph.reshape(rows, rows.ne[0], *buckets.ne[:2])
    return graph.cont(graph.permute(rows, 2, 0, 1, 3))


def _feed_forward(ctx: GraphContext, current: Tensor, residual: Tensor) -> Tensor:
    graph = ctx.graph
    if ctx.layer.is_last:
        current = graph.get_rows(current, ctx.inputs.inp_out_ids)
        residual = graph.get_rows(residual, ctx.inputs.inp_out_ids)
    joined = graph.add(current, residual)
    return graph.add(ctx.build_ffn(ctx.build_norm(joined, "ffn_norm")), joined)
