"""Layers with a state that is updated by a delta rule, and the attention layers of the same models.

Mirrors src/models/delta-net-base.cpp. The rule has one decay for each head (qwen3next.cpp, qwen35.cpp), or one for each
element of a key (KDA: kimi-linear.cpp, kimi-k3.cpp, glm5-next.cpp, bailingmoe3.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.planning.memory.compute_graph.building.attention import build_attn
from engine.planning.memory.compute_graph.building.context import AttnInput, GraphContext
from engine.planning.memory.compute_graph.ggml.graph import Tensor
from engine.planning.memory.compute_graph.models.recurrent import RecurrentStates


def build_layer_attn_linear(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the output of a gated delta net with separate weights for beta (update strength) and alpha (decay).

    Mirrors `build_layer_attn_linear` in qwen35.cpp.
    """
    return _layer_attn_linear(ctx, current, copies=False)


def build_layer_attn_linear_copy(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the output of a gated delta net whose convolution state is copied before it is stored (qwen4exp.cpp)."""
    return _layer_attn_linear(ctx, current, copies=True)


def _layer_attn_linear(ctx: GraphContext, current: Tensor, *, copies: bool) -> Tensor:
    graph, batch, heads = ctx.graph, ctx.batch, ctx.hparams.ssm.dt_rank
    tokens, sequences = batch.sequence_tokens, batch.n_sequences
    graph.build_forward_expand(current)
    mixed, z = _build_qkvz(ctx, current)
    beta = graph.reshape(ctx.linear("ssm_beta", current), 1, heads, tokens, sequences)
    alpha = graph.reshape(ctx.linear("ssm_alpha", current), heads, tokens, sequences)
    return _build_delta_net(ctx, RecurrentStates(ctx), mixed, z, graph.unary(beta), alpha, copies=copies)


def build_layer_attn_linear_ba(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the output of a gated delta net with one weight for beta (update strength) and alpha (decay).

    Mirrors `build_layer_attn_linear` in qwen3next.cpp.
    """
    graph, batch, ssm = ctx.graph, ctx.batch, ctx.hparams.ssm
    tokens, sequences = batch.sequence_tokens, batch.n_sequences
    each = ssm.dt_rank // ssm.n_group
    graph.build_forward_expand(current)
    mixed, z = _build_qkvz(ctx, current) if ctx.has("attn_qkv") else _build_qkvz_from_ssm_in(ctx, current)
    joined = graph.reshape(ctx.linear("ssm_ba", current), 2 * each, ssm.n_group, tokens, sequences)
    half = (each, ssm.n_group, tokens, sequences)
    beta = graph.unary(graph.cont(graph.view(joined, half, joined.nb)))
    beta = graph.reshape(beta, 1, ssm.dt_rank, tokens, sequences)
    alpha = graph.cont(graph.view(joined, half, joined.nb), ssm.dt_rank, tokens, sequences)
    repeats = ssm.n_group != ssm.dt_rank
    return _build_delta_net(ctx, RecurrentStates(ctx), mixed, z, beta, alpha, repeats=repeats)


def _build_qkvz(ctx: GraphContext, current: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors: queries, keys and values in one, and the output gate (`build_qkvz`)."""
    mixed = ctx.linear("attn_qkv", current)
    mixed = ctx.graph.reshape(mixed, mixed.ne[0], ctx.batch.sequence_tokens, ctx.batch.n_sequences)
    return mixed, ctx.linear("attn_gate", current)


def _build_qkvz_from_ssm_in(ctx: GraphContext, current: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors for older files: queries, keys and values in one, and the output gate.

    Older files have one weight for all four, with rows grouped by key head.
    """
    graph, batch, ssm = ctx.graph, ctx.batch, ctx.hparams.ssm
    outer = (batch.sequence_tokens, batch.n_sequences)
    groups, wide = ssm.n_group, ssm.d_inner // ssm.n_group
    joined = ctx.linear("ssm_in", current)
    joined = graph.reshape(joined, 2 * ssm.d_state + 2 * wide, groups, *outer)
    q, k, v, z = (
        graph.view(joined, (width, groups, *outer), joined.nb) for width in (ssm.d_state, ssm.d_state, wide, wide)
    )
    z = graph.cont(z)
    q, k, v = (graph.cont(part, part.ne[0] * groups, *outer) for part in (q, k, v))
    return graph.concat(graph.concat(q, k, 0), v, 0), z


def _build_delta_net(
    ctx: GraphContext,
    states: RecurrentStates,
    mixed: Tensor,
    z: Tensor,
    beta: Tensor,
    alpha: Tensor,
    *,
    repeats: bool = False,
    copies: bool = False,
) -> Tensor:
    """Return the output of the delta rule (`build_conv_state`, `build_recurrent_attn`).

    `mixed`: queries, keys and values in one tensor.
    `z`: output gate. `beta`: strength of the state's update. `alpha`: input from which the state's decay is computed.
    `repeats`: whether queries and keys are repeated for each head of values.
    `copies`: whether the state of the convolution is copied before it is stored.
    """
    graph, batch, ssm = ctx.graph, ctx.batch, ctx.hparams.ssm
    tokens, sequences = batch.sequence_tokens, batch.n_sequences
    heads, head = ssm.dt_rank, ssm.d_inner // ssm.dt_rank
    wide = ssm.d_inner + 2 * ssm.n_group * ssm.d_state
    alpha = graph.unary(graph.add(alpha, ctx.weight("ssm_dt.bias")))
    decay = graph.reshape(graph.mul(alpha, ctx.weight("ssm_a")), 1, heads, tokens, sequences)
    rolling = graph.reshape(states.read(states.rolling), ssm.d_conv - 1, wide, sequences)
    window = graph.concat(rolling, graph.transpose(mixed), 0)
    kept = graph.view(window, (ssm.d_conv - 1, wide, sequences), window.nb)
    states.write(states.rolling, graph.cont(kept) if copies else kept)
    state = graph.reshape(states.read(states.recurrent), head, head, heads, sequences)
    mixed = graph.unary(graph.new("ssm_conv", (wide, tokens, sequences), window, ctx.weight("ssm_conv1d")))
    row = 4 * wide
    key, nb = (ssm.d_state, ssm.n_group, tokens, sequences), (0, 4 * ssm.d_state, row, row * tokens)
    q, k = (graph.scale(ctx.raw_norm(graph.view(mixed, key, nb))) for _ in range(2))
    if repeats:
        q, k = (_for_each_head(ctx, part) for part in (q, k))
    v = graph.view(mixed, (head, heads, tokens, sequences), (0, 4 * head, row, row * tokens))
    # The result has the outputs of all tokens first, then the new states with `head` rows for each sequence.
    n_rows = (tokens + head) * sequences
    found = graph.new("delta_net", (head * heads, n_rows), q, k, v, decay, beta, state)
    y = graph.view(found, (head, heads, tokens, sequences))
    states.write(states.recurrent, graph.view(found, (head, head, heads, sequences)))
    y = ctx.build_norm(y, "ssm_norm")
    y = graph.mul(y, graph.unary(graph.reshape(z, head, heads, tokens, sequences)))
    y = ctx.linear("ssm_out", graph.reshape(y, head * heads, tokens, sequences))
    return graph.reshape(y, y.ne[0], batch.n_tokens)


def _for_each_head(ctx: GraphContext, source: Tensor) -> Tensor:
    """Return `source` (queries or keys) with each head repeated, once for each value head that uses it."""
    graph, (head, groups, tokens, sequences) = ctx.graph, source.ne
    each = ctx.hparams.ssm.dt_rank // groups
    apart = graph.reshape(source, head, 1, groups, tokens * sequences)
    repeated = graph.repeat(apart, head, each, groups, tokens * sequences)
    return graph.reshape(repeated, head, groups * each, tokens, sequences)


def build_layer_attn(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the output of attention whose query projection also makes the output gate (`build_layer_attn` in
    qwen35.cpp).
    """
    return build_layer_attn_to(ctx, ctx.inputs.inp_attn, current)


def build_layer_attn_to(ctx: GraphContext, inp_attn: AttnInput, current: Tensor) -> Tensor:
    """Return the output of attention with the inputs `inp_attn`; the query projection also makes the output gate."""
    graph, hparams = ctx.graph, ctx.layer.hparams
    n_tokens, heads, head = current.ne[1], hparams.n_head, hparams.head_k
    joined = ctx.projection("attn_q", graph.build_forward_expand(current))
    k = ctx.projection("attn_k", current)
    v = ctx.projection("attn_v", current)
    # Query and gate alternate by head in one row: two F32 vectors of `head` elements, so 8 bytes for each element.
    half, nb = (head, heads, n_tokens), (0, 8 * head, 8 * head * heads)
    q = ctx.build_norm(graph.view(joined, half, nb), "attn_q_norm")
    k = ctx.build_norm(graph.reshape(k, head, hparams.n_head_kv, n_tokens), "attn_k_norm")
    gate = graph.cont(graph.view(joined, half, nb), head * heads, n_tokens)
    v = graph.reshape(v, hparams.head_v, hparams.n_head_kv, n_tokens)
    q, k = ctx.rope(q, ctx.inputs.inp_pos), ctx.rope(k, ctx.inputs.inp_pos)
    found = build_attn(ctx, inp_attn, q, k, v, sliding=False, out=None)
    return ctx.linear("attn_output", graph.mul(found, graph.unary(gate)))


def build_kda_layer(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the output of Kimi delta attention with its output gate (`build_kda_layer` in kimi-k3.cpp)."""
    graph, batch, ssm = ctx.graph, ctx.batch, ctx.hparams.ssm
    tokens, sequences = batch.sequence_tokens, batch.n_sequences
    # The rolling state holds `kept` tokens of queries, keys and values, which are equally wide.
    inner = ssm.n_embd_r // (3 * ssm.kept)
    head = ssm.n_embd_s // inner
    each = (head, inner // head, tokens, sequences)
    states = RecurrentStates(ctx)
    seen = states.read(states.rolling)
    q, k, v = (
        graph.reshape(_convolved(ctx, states, seen, source, f"ssm_conv1d_{letter}"), *each)
        for source, letter in zip(_sources(ctx, current, inner), "qkv", strict=True)
    )
    decay = graph.reshape(_decay(ctx, current, *each[:2]), *each)
    beta = graph.unary(graph.reshape(_through(ctx, current, "ssm_beta"), 1, *each[1:]))
    state = graph.reshape(states.read(states.recurrent), head, head, each[1], sequences)
    q, k = (graph.scale(ctx.raw_norm(part)) for part in (q, k))
    found = graph.new("delta_net", (inner, (tokens + head) * sequences), q, k, v, decay, beta, state)
    states.write(states.recurrent, graph.view(found, (head, head, each[1], sequences)))
    y = graph.reshape(graph.cont(graph.view(found, each)), *each[:2], batch.n_tokens)
    gate = graph.reshape(_through(ctx, current, "ssm_g", "ssm_g_a", "ssm_g_b"), *each[:2], batch.n_tokens)
    y = graph.mul(ctx.build_norm(y, "ssm_norm"), graph.unary(gate))
    return graph.mul_mat(ctx.weight("attn_output"), graph.cont(y, inner, batch.n_tokens))


def build_kda_layer_expanded(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the output of Kimi delta attention; its input is added to the graph first (`build_forward_expand`).

    Mirrors kimi-linear.cpp and glm5-next.cpp.
    """
    return build_kda_layer(ctx, ctx.graph.build_forward_expand(current))


def _decay(ctx: GraphContext, current: Tensor, head: int, heads: int) -> Tensor:
    """Return the decay of each element of a key, for Kimi delta attention.

    `head`: elements of a head. `heads`: number of heads.
    """
    graph, shape = ctx.graph, (head, heads, ctx.batch.n_tokens)
    found = graph.add(_through(ctx, current, "ssm_f_a", "ssm_f_b"), ctx.weight("ssm_dt.bias"))
    factors = graph.reshape(ctx.weight("ssm_a"), 1, heads)
    if not ctx.hparams.ssm.has_gate_lower_bound:
        return graph.mul(graph.reshape(graph.unary(found), *shape), factors)
    found = graph.mul(graph.reshape(found, *shape), factors)
    # Bailing's, which is made of one weight, has the sign in its factors.
    found = graph.scale(found) if ctx.has("ssm_f_b") else found
    return graph.scale(graph.unary(found))


def _through(ctx: GraphContext, source: Tensor, *stems: str) -> Tensor:
    """Return `source` multiplied by several weights in turn. Weights that the layer lacks are skipped.

    `stems`: names of the weights without layer and suffix.
    """
    for stem in stems:
        if ctx.has(stem):
            source = ctx.graph.mul_mat(ctx.weight(stem), source)
    return source


def _sources(ctx: GraphContext, current: Tensor, inner: int) -> Sequence[Tensor]:
    """Return queries, keys and values before their convolutions, for Kimi delta attention.

    `inner`: elements of the queries of one token; keys and values have as many.
    """
    graph = ctx.graph
    if not ctx.has("attn_qkv"):
        return [_through(ctx, current, stem) for stem in ("attn_q", "attn_k", "attn_v")]
    joined = _through(ctx, current, "attn_qkv")
    return [graph.cont(graph.view(joined, (inner, joined.ne[1]), (0, joined.nb[1]))) for _ in range(3)]


def _convolved(ctx: GraphContext, states: RecurrentStates, seen: Tensor, source: Tensor, stem: str) -> Tensor:
    """Return `source` after a convolution with the previous tokens, which are in the state `seen`.

    `stem`: short name of the convolution's weight.
    """
    graph, batch, kept = ctx.graph, ctx.batch, ctx.hparams.ssm.kept
    tokens, sequences, inner = batch.sequence_tokens, batch.n_sequences, source.ne[0]
    rolling = graph.view(seen, (kept, inner, sequences), (0, 4 * kept, seen.nb[1]))
    window = graph.concat(rolling, graph.transpose(graph.reshape(source, inner, tokens, sequences)), 0)
    states.write(states.rolling, graph.view(window, (kept, inner, sequences), window.nb))
    weight = graph.reshape(ctx.weight(stem), kept + 1, inner)
    found = graph.new("ssm_conv", (inner, tokens, sequences), window, weight)
    return graph.unary(graph.reshape(found, inner, batch.n_tokens))
