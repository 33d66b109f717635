"""Layers with more than one residual stream.

These are hyper-connections (src/models/deepseek4.cpp, glm5-next.cpp, hy-v4.cpp), streams with low-rank gates and hashed
token sequences (qwen4exp.cpp), and mixtures of earlier residuals (kimi-k3.cpp).
"""

from __future__ import annotations

from msgspec import Struct

from engine.planning.memory.compute_graph.building.context import GraphContext
from engine.planning.memory.compute_graph.building.graph import Tokens
from engine.planning.memory.compute_graph.ggml.graph import Tensor
from engine.planning.memory.compute_graph.ggml.scheduler import HOST
from engine.planning.memory.compute_graph.models.recurrent import RecurrentStates
from engine.planning.memory.compute_graph.models.transformer import feed_forward


class HcPre(Struct, frozen=True):
    """Input of attention or feed-forward in a layer with hyper-connections (`build_hc_pre`), and factors for its
    output.

    `streams`: all residual streams.
    `one`: weighted sum of the streams, which attention or feed-forward reads.
    `gives`: for each stream, a factor: the output is multiplied by it and added to the stream.
    `mixing`: matrix that mixes the streams with each other; None if they are not mixed.
    """

    streams: Tensor
    one: Tensor
    gives: Tensor
    mixing: Tensor | None


def repeat_streams(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the embeddings repeated for each residual stream, with shape (embedding, streams, tokens)."""
    graph, (n_embd, n_tokens) = ctx.graph, current.ne[:2]
    return graph.repeat(graph.reshape(current, n_embd, 1, n_tokens), n_embd, ctx.hparams.hc_mult, n_tokens)


def build_hc_head(ctx: GraphContext, streams: Tensor) -> Tensor:
    """Return the weighted sum of all residual streams, for tokens with logits (`build_hc_head` in deepseek4.cpp)."""
    return _weighted(ctx, *_shares_of_output_rows(ctx, streams))


def build_hc_head_cast(ctx: GraphContext, streams: Tensor) -> Tensor:
    """Return the weighted sum of F32 copies of all residual streams, for tokens with logits (`build_hc_head` in
    hy-v4.cpp).
    """
    return _weighted_copy(ctx, *_shares_of_output_rows(ctx, streams))


def build_hc_mean(ctx: GraphContext, streams: Tensor) -> Tensor:
    """Return the mean of all residual streams, for tokens with logits (`build_hc_mean` in glm5-next.cpp)."""
    graph, streams = ctx.graph, _output_rows(ctx, streams)
    views = [_stream(ctx, streams) for _ in range(streams.ne[1])]
    total = views[0]
    for view in views[1:]:
        total = graph.add(total, view)
    return graph.scale(total)


def hc_layer(ctx: GraphContext, previous: Tensor) -> Tensor:
    """Return the residual streams after a layer with hyper-connections.

    Attention and feed-forward each read a weighted sum of the streams, and add their result to each stream.
    """
    return _hc_layer(ctx, previous, pins=False)


def hc_layer_pinned(ctx: GraphContext, previous: Tensor) -> Tensor:
    """Return the residual streams after a layer with hyper-connections, as deepseek4.cpp computes them.

    The streams are added to the graph before the feed-forward part, and the result is pinned to the layer's device.
    """
    return _hc_layer(ctx, previous, pins=True)


def _hc_layer(ctx: GraphContext, previous: Tensor, *, pins: bool) -> Tensor:
    read = _build_hc_pre(ctx, previous, "attn")
    joined = _build_hc_post(ctx, read, ctx.mixed(ctx.build_norm(read.one, "attn_norm")))
    read = _build_hc_pre(ctx, joined, "ffn")
    if pins and read.mixing is not None:
        for part in (joined, read.gives, read.mixing):
            ctx.graph.build_forward_expand(part)
    chosen = None
    if ctx.has("ffn_gate_tid2eid"):
        chosen = ctx.graph.get_rows(ctx.weight("ffn_gate_tid2eid"), ctx.shared.get(Tokens).ids)
    found = feed_forward(ctx, ctx.build_norm(read.one, "ffn_norm"), chosen=chosen)
    found = _build_hc_post(ctx, read, found)
    if pins:
        found.backend = ctx.layer.backend
    return found


def _output_rows(ctx: GraphContext, streams: Tensor) -> Tensor:
    graph, (n_embd, count, n_tokens, _) = ctx.graph, streams.ne
    flat = graph.get_rows(graph.reshape(streams, n_embd * count, n_tokens), ctx.inputs.inp_out_ids)
    return graph.reshape(flat, n_embd, count, flat.ne[1])


def _shares_of_output_rows(ctx: GraphContext, streams: Tensor) -> tuple[Tensor, Tensor]:
    graph, streams = ctx.graph, _output_rows(ctx, streams)
    function, scale, base = (
        ctx.outer_weight(ctx.outer[f"output_hc_{stem}"], ctx.inputs.output) for stem in ("fn", "scale", "base")
    )
    shares = graph.mul_mat(function, ctx.raw_norm(_flat(ctx, streams)))
    return streams, graph.scale(graph.unary(graph.add(graph.mul(shares, scale), base)))


def _flat(ctx: GraphContext, streams: Tensor) -> Tensor:
    return ctx.graph.reshape(streams, streams.ne[0] * streams.ne[1], streams.ne[2])


def _build_hc_pre(ctx: GraphContext, streams: Tensor, part: str) -> HcPre:
    """Return the input of attention or feed-forward (`build_hc_pre`). `part`: "attn" or "ffn"."""
    graph, (_, count, n_tokens, _) = ctx.graph, streams.ne
    mixes = graph.mul_mat(ctx.weight(f"hc_{part}_fn"), ctx.raw_norm(_flat(ctx, streams)))
    scale, base = ctx.weight(f"hc_{part}_scale"), ctx.weight(f"hc_{part}_base")
    reads, gives = (
        graph.scale(graph.unary(_affine(ctx, graph.view(mixes, (count, n_tokens), mixes.nb), scale, base)))
        for _ in range(2)
    )
    # Without columns for the mixing matrix (hy-v4.cpp) the streams are not mixed with each other.
    if mixes.ne[0] == 2 * count:
        return HcPre(streams, _weighted_copy(ctx, streams, reads), graph.scale(gives), None)
    mixing = _build_hc_sinkhorn(ctx, mixes, scale, base, count)
    if ctx.fuses("hc_pre"):
        one = ctx.fused("hc_pre", (streams.ne[0], n_tokens), streams, reads)
    else:
        one = _weighted(ctx, streams, reads)
    return HcPre(streams, one, gives, mixing)


def _build_hc_post(ctx: GraphContext, read: HcPre, current: Tensor) -> Tensor:
    """Add `current`, the output of attention or feed-forward, to the residual streams, and return the streams
    (`build_hc_post`).

    `read`: result of `_build_hc_pre`: the streams, the factors for `current`, and the matrix that mixes the streams.
    """
    if read.mixing is None:
        return _added(ctx, current, read.streams, read.gives)
    return _mixed(ctx, current, read.streams, read.gives, read.mixing)


def _affine(ctx: GraphContext, source: Tensor, scale: Tensor, base: Tensor) -> Tensor:
    graph = ctx.graph
    return graph.add(graph.mul(source, graph.view(scale, (1,))), graph.view(base, (source.ne[0],)))


def _stream(ctx: GraphContext, streams: Tensor) -> Tensor:
    return ctx.graph.view(streams, (streams.ne[0], streams.ne[2]), (0, streams.nb[2]))


def _share(ctx: GraphContext, shares: Tensor) -> Tensor:
    """Return the factors of one residual stream, as a view with shape (1, tokens).

    The view is the same for every stream, because this graph has no offsets into tensors.

    `shares`: factors of all streams, with shape (streams, tokens).
    """
    return ctx.graph.view(shares, (1, shares.ne[1]), shares.nb)


def _weighted(ctx: GraphContext, streams: Tensor, shares: Tensor) -> Tensor:
    """Return the sum of the residual streams, each multiplied by its factor in `shares`."""
    graph, count = ctx.graph, streams.ne[1]
    total = graph.mul(_stream(ctx, streams), _share(ctx, shares))
    for _ in range(1, count):
        total = graph.add(total, graph.mul(_stream(ctx, streams), _share(ctx, shares)))
    return total


def _weighted_copy(ctx: GraphContext, streams: Tensor, shares: Tensor) -> Tensor:
    graph = ctx.graph
    return graph.cast(_weighted(ctx, graph.cast(streams, "f32"), shares), "f32")


def _added(ctx: GraphContext, current: Tensor, streams: Tensor, shares: Tensor) -> Tensor:
    """Return each residual stream plus `current` times the factor of this stream in `shares`."""
    graph, count = ctx.graph, streams.ne[1]
    current, shares, streams = (graph.cast(source, "f32") for source in (current, shares, streams))
    sums = [graph.add(_stream(ctx, streams), graph.mul(current, _share(ctx, shares))) for _ in range(count)]
    return graph.cast(_side_by_side(ctx, sums), "f32")


def _side_by_side(ctx: GraphContext, parts: list[Tensor]) -> Tensor:
    """Return separate residual streams concatenated into one tensor."""
    graph = ctx.graph
    apart = [graph.reshape(part, part.ne[0], 1, part.ne[1]) for part in parts]
    joined = apart[0]
    for part in apart[1:]:
        joined = graph.concat(joined, part, 1)
    return joined


def _build_hc_sinkhorn(ctx: GraphContext, mixes: Tensor, scale: Tensor, base: Tensor, count: int) -> Tensor:
    """Return the matrix that mixes the residual streams; each of its rows and columns sums to 1 (`build_hc_sinkhorn`).

    `mixes`: values from which the matrix is computed. `scale`, `base`: weights that scale and shift these values.
    `count`: number of streams.
    """
    graph, n_tokens = ctx.graph, mixes.ne[1]
    if ctx.fuses("hc_comb"):
        return ctx.fused("hc_comb", (count, count, n_tokens), mixes, scale, base)
    found = _affine(ctx, graph.view(mixes, (count * count, n_tokens), mixes.nb), scale, base)
    found = graph.like("soft_max", graph.reshape(found, count, count, n_tokens))
    least = graph.like("fill", graph.scratch("f32", 1))
    found = graph.add(found, least)
    # As the reference: softmax over rows, one normalisation of columns, then rows and columns in turn.
    for step in range(ctx.hparams.hc_sinkhorn_iters):
        if step:
            found = graph.like("div", found, graph.add(graph.sum_rows(found), least))
        columns = graph.sum_rows(graph.cont(graph.permute(found, 1, 0, 2, 3)))
        found = graph.like("div", found, graph.permute(graph.add(columns, least), 1, 0, 2, 3))
    return found


def _mixed(ctx: GraphContext, current: Tensor, streams: Tensor, shares: Tensor, mixing: Tensor) -> Tensor:
    """Return the residual streams mixed by `mixing`, each plus `current` times the stream's factor in `shares`."""
    graph, count = ctx.graph, streams.ne[1]
    if ctx.fuses("hc_post"):
        return ctx.fused("hc_post", streams.ne, current, streams, shares, mixing)
    parts = []
    for _ in range(count):
        total = graph.mul(current, _share(ctx, shares))
        for _ in range(count):
            part = graph.view(mixing, (1, mixing.ne[2]), (0, mixing.nb[2]))
            total = graph.add(total, graph.mul(_stream(ctx, streams), part))
        parts.append(total)
    return _side_by_side(ctx, parts)


class _PleInput(Struct, frozen=True):
    """Embeddings of hashed token sequences, by token (`build_inp_ple`)."""

    embeddings: Tensor


def build_inp_ple(ctx: GraphContext, current: Tensor) -> Tensor:
    """Make the embeddings of hashed token sequences, and return token embeddings repeated for each residual stream."""
    if "per_layer_token_embd" in ctx.outer:
        graph, n_tokens = ctx.graph, current.ne[1]
        table = ctx.outer_weight(ctx.outer["per_layer_token_embd"], HOST)
        rows = graph.new_input("i32", ctx.hparams.ple_n_heads * n_tokens)
        found = graph.get_rows(table, rows)
        joined = graph.reshape(found, found.ne[0] * ctx.hparams.ple_n_heads, n_tokens)
        ctx.shared.put(_PleInput(graph.build_forward_expand(joined)))
    return repeat_streams(ctx, current)


def qwen4exp_layer(ctx: GraphContext, previous: Tensor) -> Tensor:
    """Return the residual streams after a layer of qwen4exp.cpp.

    Attention and feed-forward each read the gated mean of the streams. Their outputs are added to all streams.
    """
    graph, streams = ctx.graph, previous
    if ctx.has("ple_key"):
        streams = _build_ple(ctx, streams)
    one, gives = _build_hc_mix(ctx, streams, "attn")
    current = ctx.mixed(graph.build_forward_expand(one))
    if ctx.layer.is_last:
        n_embd, count, n_tokens, _ = streams.ne
        current, gives = (graph.get_rows(part, ctx.inputs.inp_out_ids) for part in (current, gives))
        flat = graph.get_rows(graph.reshape(streams, n_embd * count, n_tokens), ctx.inputs.inp_out_ids)
        streams = graph.reshape(flat, n_embd, count, flat.ne[1])
    streams = _build_hc_combine(ctx, streams, current, gives)
    one, gives = _build_hc_mix(ctx, streams, "ffn")
    streams = _build_hc_combine(ctx, streams, feed_forward(ctx, one), gives)
    streams.backend = ctx.layer.backend
    return streams


def build_hc_mix_head(ctx: GraphContext, streams: Tensor) -> Tensor:
    """Return the gated mean of the residual streams after the last layer (`build_hc_mix`)."""
    norm, down, up = (
        ctx.outer_weight(ctx.outer[f"output_hc_{part}"], ctx.inputs.output) for part in ("norm", "down", "up")
    )
    flat, gate = _gate(ctx, streams, norm, down, up)
    return _mean(ctx, streams, flat, gate)


def _gate(ctx: GraphContext, streams: Tensor, norm: Tensor, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    graph = ctx.graph
    normed = graph.mul(ctx.raw_norm(streams), norm)
    flat = graph.reshape(normed, streams.ne[0] * streams.ne[1], streams.ne[2])
    return flat, graph.mul_mat(up, graph.unary(graph.scale(graph.mul_mat(down, flat))))


def _mean(ctx: GraphContext, streams: Tensor, flat: Tensor, gate: Tensor) -> Tensor:
    graph, (n_embd, count, n_tokens, _) = ctx.graph, streams.ne
    gated = graph.reshape(graph.mul(flat, graph.unary(gate)), n_embd, count, n_tokens)
    total = graph.cont(graph.view(gated, (n_embd, n_tokens), (0, gated.nb[2])))
    for _ in range(1, count):
        total = graph.add(total, graph.view(gated, (n_embd, n_tokens), (0, gated.nb[2])))
    return graph.scale(total)


def _build_hc_mix(ctx: GraphContext, streams: Tensor, part: str) -> tuple[Tensor, Tensor]:
    """Return the input of attention or feed-forward, and a value for each stream (`gives`).

    `_build_hc_combine` turns this value into a factor, and adds the output times this factor to the stream. Mirrors
    `build_hc_mix`. `part`: "attn" or "ffn".
    """
    graph, (n_embd, count, n_tokens, _) = ctx.graph, streams.ne
    flat, gate = _gate(ctx, streams, *(ctx.weight(f"hc_{part}_{stem}") for stem in ("norm", "down", "up")))
    if ctx.fuses("hc_pre"):
        both = (graph.reshape(each, n_embd, count, n_tokens) for each in (flat, gate))
        one = ctx.fused("hc_pre", (n_embd, n_tokens), *both)
    else:
        one = _mean(ctx, streams, flat, gate)
    return one, graph.mul_mat(ctx.weight(f"hc_{part}_inject"), flat)


def _build_hc_combine(ctx: GraphContext, streams: Tensor, current: Tensor, gives: Tensor) -> Tensor:
    """Add `current`, the output of attention or feed-forward, to the residual streams, and return the streams
    (`build_hc_combine`).

    `gives`: values from which the factor of `current` is computed for each stream.
    """
    graph, (n_embd, count, n_tokens, _) = ctx.graph, streams.ne
    shares = graph.scale(graph.unary(graph.scale(gives)))
    if ctx.fuses("hc_post"):
        return ctx.fused("hc_post", streams.ne, current, streams, shares)
    repeated = graph.repeat(graph.reshape(current, n_embd, 1, n_tokens), n_embd, count, n_tokens)
    return graph.add(streams, graph.mul(repeated, graph.reshape(shares, 1, count, n_tokens)))


def _build_ple(ctx: GraphContext, streams: Tensor) -> Tensor:
    """Add an output computed from the embeddings of hashed n-grams to the residual streams, and return the streams
    (`build_ple`).
    """
    graph, (n_embd, count, n_tokens, _) = ctx.graph, streams.ne
    hashed = ctx.shared.get(_PleInput).embeddings
    key, value = (graph.mul_mat(ctx.weight(stem), hashed) for stem in ("ple_key", "ple_value"))
    key = _normed(ctx, graph.reshape(key, *streams.ne[:3]), "key")
    score = graph.scale(graph.sum_rows(graph.mul(key, _normed(ctx, streams, "query"))))
    size = graph.like("sqrt", graph.like("clamp", graph.unary(score)))
    gate = graph.unary(graph.mul(graph.unary(score), size))
    repeated = graph.repeat(graph.reshape(value, n_embd, 1, n_tokens), n_embd, count, n_tokens)
    gated = graph.mul(repeated, gate)
    convolved = graph.unary(_convolved(ctx, graph.reshape(gated, n_embd * count, n_tokens), streams))
    convolved = graph.reshape(graph.cont(convolved), *streams.ne[:3])
    return graph.add(streams, graph.add(gated, convolved))


def _normed(ctx: GraphContext, streams: Tensor, stem: str) -> Tensor:
    return ctx.graph.mul(ctx.raw_norm(streams), ctx.weight(f"ple_norm_{stem}"))


def _convolved(ctx: GraphContext, source: Tensor, streams: Tensor) -> Tensor:
    """Return a dilated convolution of `source` over tokens, as a sum of shifted copies (`build_conv_state_at`).

    `streams`: all residual streams, of which only the shape is used.
    """
    graph, batch = ctx.graph, ctx.batch
    tokens, sequences, (wide, n_tokens) = batch.sequence_tokens, batch.n_sequences, source.ne[:2]
    normed = _normed(ctx, graph.reshape(source, *streams.ne[:3]), "conv")
    normed = graph.reshape(graph.reshape(normed, wide, n_tokens), wide, tokens, sequences)
    taps = ctx.layer.weights["ple_conv1d"].ne[0]
    kept = (taps - 1) * ctx.hparams.ple_ngram_size
    states = RecurrentStates(ctx)
    hashed = states.of_width(kept * wide)
    window = graph.concat(graph.reshape(states.read(hashed), kept, wide, sequences), graph.transpose(normed), 0)
    states.write(hashed, graph.cont(graph.view(window, (kept, wide, sequences), window.nb)))
    total = None
    for _ in range(taps):
        shifted = graph.cont(graph.transpose(graph.view(window, (tokens, wide, sequences), window.nb)))
        term = graph.mul(shifted, _tap(ctx, wide))
        total = term if total is None else graph.add(total, term)
    assert total is not None
    return total


def _tap(ctx: GraphContext, wide: int) -> Tensor:
    """Return one tap of the convolution over n-grams: a factor for each of `wide` channels, in F32."""
    graph, half = ctx.graph, ctx.layer.weights["ple_conv1d"].type_name != "F32"
    column = graph.view(ctx.weight("ple_conv1d"), (1, wide))
    column = graph.reshape(graph.new("cont", column.ne, column, type_name="f16" if half else "f32"), wide)
    return graph.cast(column, "f32") if half else column


class _Residuals(Struct, frozen=True):
    """Stored residuals of earlier layers, in one tensor."""

    residuals: Tensor


def res_mix_layer(ctx: GraphContext, previous: Tensor) -> Tensor:
    """Return the output of a layer that mixes in residuals of earlier layers (kimi-k3.cpp).

    After every `attn_res_block_size` layers the residual is stored, and the next layer begins a new residual.
    """
    graph, period = ctx.graph, ctx.hparams.attn_res_block_size
    current = _mixed_residuals(ctx, previous, "attn_res_score")
    keeps = period > 0 and ctx.layer.index % period == 0
    if keeps:
        _res_push(ctx, previous)
    current = ctx.mixed(graph.build_forward_expand(ctx.build_norm(current, "attn_norm")))
    # A stored residual is not added again: later layers read it from the mixture.
    residual = current if keeps else graph.add(previous, current)
    current = ctx.build_norm(_mixed_residuals(ctx, residual, "ffn_res_score"), "ffn_norm")
    return graph.add(residual, feed_forward(ctx, current))


def res_mix_rows(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the mixture of residuals after the last layer, for tokens with logits."""
    if "output_res_score" in ctx.outer:
        weight = ctx.outer_weight(ctx.outer["output_res_score"], ctx.inputs.output)
        current = _res_mix(ctx, current, weight)
    return ctx.graph.get_rows(current, ctx.inputs.inp_out_ids)


def _res_push(ctx: GraphContext, residual: Tensor) -> None:
    """Append `residual` to the stored residuals, from which later layers compute their input (`res_push`)."""
    graph, kept = ctx.graph, ctx.shared.find(_Residuals)
    residual = graph.reshape(residual, residual.ne[0], 1, residual.ne[1])
    ctx.shared.put(_Residuals(residual if kept is None else graph.concat(kept.residuals, residual, 1)))


def _mixed_residuals(ctx: GraphContext, current: Tensor, stem: str) -> Tensor:
    return current if ctx.shared.find(_Residuals) is None else _res_mix(ctx, current, ctx.weight(stem))


def _res_mix(ctx: GraphContext, current: Tensor, weight: Tensor) -> Tensor:
    """Return the sum of the stored residuals and `current`, weighted by softmax scores (`res_mix`).

    `weight`: weight from which the scores are computed.
    """
    graph, kept, (n_embd, n_tokens) = ctx.graph, ctx.shared.get(_Residuals).residuals, current.ne[:2]
    count = kept.ne[1]
    scores, own = (graph.sum_rows(graph.mul(ctx.raw_norm(part), weight)) for part in (kept, current))
    probs = graph.like("soft_max", graph.concat(graph.reshape(scores, count, n_tokens), own, 0))
    of_kept, of_own = (graph.cont(graph.view(probs, (width, n_tokens), probs.nb)) for width in (count, 1))
    found = graph.new("weighted_sum", (n_embd, n_tokens), kept, of_kept)
    return graph.add(found, graph.mul(current, of_own))
