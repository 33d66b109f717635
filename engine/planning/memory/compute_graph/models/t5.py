"""T5 (src/models/t5.cpp, t5encoder.cpp): attention with a bias by distance, and cross attention in the decoder."""

from __future__ import annotations

from msgspec import Struct

from engine.planning.memory.compute_graph.building.attention import build_attn, build_attn_inp_no_cache, build_attn_mha
from engine.planning.memory.compute_graph.building.context import AttnInput, GraphContext
from engine.planning.memory.compute_graph.ggml.graph import Tensor


class _Encoded(Struct, frozen=True):
    """Output of the encoder for the longest text (`build_inp_cross_embd`), and the mask of cross attention."""

    text: Tensor
    mask: Tensor


class _Distances(Struct, frozen=True):
    """Buckets of the distances between tokens (`build_inp_pos_bucket_dec`, `build_inp_pos_bucket_enc`)."""

    buckets: Tensor


class _FirstTable(Struct, frozen=True):
    """The first layer's table of attention biases by distance, for layers without a table of their own."""

    biases: Tensor


def open_decoder(ctx: GraphContext, current: Tensor) -> Tensor:
    """Make the decoder's input tensors, and return `current` unchanged."""
    batch, hparams, new = ctx.batch, ctx.hparams, ctx.graph.new_input
    ctx.shared.put(
        _Encoded(
            # Before a text is encoded llama.cpp reserves room for the trained length (`build_inp_cross_embd`).
            text=new("f32", hparams.n_embd, hparams.n_ctx_train),
            mask=new("f16" if batch.flash else "f32", hparams.n_ctx_train, batch.n_tokens),
        )
    )
    ctx.shared.put(_Distances(new("i32", batch.n_cells, batch.n_tokens)))
    return current


def open_encoder(ctx: GraphContext, current: Tensor) -> Tensor:
    """Make the encoder's input tensors, and return `current` unchanged."""
    ctx.shared.put(build_attn_inp_no_cache(ctx))
    ctx.shared.put(_Distances(ctx.graph.new_input("i32", ctx.batch.n_tokens, ctx.batch.n_tokens)))
    return current


def t5_decoder_layer(ctx: GraphContext, previous: Tensor) -> Tensor:
    """Return the output of a decoder layer, which attends to the KV cache and then to the encoded text."""
    graph, encoded = ctx.graph, ctx.shared.get(_Encoded)
    q, k, v = _projections(ctx, "attn", *[ctx.build_norm(previous, "attn_norm")] * 3)
    bias = _bias(ctx)
    found = build_attn(ctx, ctx.inputs.inp_attn, q, k, v, sliding=False, bias=bias, out="attn_o")
    joined = graph.add(found, previous)
    normed = ctx.build_norm(joined, "cross_attn_norm")
    q, k, v = _projections(ctx, "cross_attn", normed, encoded.text, encoded.text)
    for part in (q, k, v):
        graph.build_forward_expand(part)
    current = ctx.linear("cross_attn_o", build_attn_mha(ctx, q, k, v, encoded.mask))
    return _feed_forward(ctx, current, joined)


def t5_encoder_layer(ctx: GraphContext, previous: Tensor) -> Tensor:
    """Return the output of an encoder layer, which attends to the tokens of the batch."""
    graph = ctx.graph
    q, k, v = _projections(ctx, "attn", *[ctx.build_norm(previous, "attn_norm")] * 3)
    bias = _bias(ctx)
    for part in (q, k, v):
        graph.build_forward_expand(part)
    found = build_attn_mha(ctx, q, k, v, ctx.shared.get(AttnInput).mask, bias=bias)
    return _feed_forward(ctx, ctx.linear("attn_o", found), previous)


def _projections(ctx: GraphContext, name: str, *sources: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, each computed from its own tensor in `sources`.

    `name`: beginning of the names of the three weights, which end in "_q", "_k" and "_v".
    """
    graph, hparams = ctx.graph, ctx.layer.hparams
    heads = ((hparams.head_k, hparams.n_head), (hparams.head_k, hparams.n_head_kv), (hparams.head_v, hparams.n_head_kv))
    parts = []
    for letter, (head, count), source in zip("qkv", heads, sources, strict=True):
        part = graph.mul_mat(ctx.weight(f"{name}_{letter}"), source)
        if part.ne[0] != head * count:
            raise ValueError(f"{name}_{letter} has {part.ne[0]} rows for {count} heads of {head}")
        parts.append(graph.reshape(part, head, count, source.ne[1]))
    return parts[0], parts[1], parts[2]


def _bias(ctx: GraphContext) -> Tensor:
    """Return the bias of attention by distance (`build_pos_bias`), from the layer's own table or the first layer's."""
    graph, buckets = ctx.graph, ctx.shared.get(_Distances).buckets
    if ctx.layer_number == 0 or ctx.has("attn_rel_b"):
        table = ctx.weight("attn_rel_b")
        if ctx.layer_number == 0:
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
