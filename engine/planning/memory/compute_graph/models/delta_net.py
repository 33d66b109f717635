"""Layers whose state a delta rule updates (src/models/delta-net-base.cpp).

The rule has one decay for each head (qwen3next.cpp, qwen35.cpp), or one for each element of a key (Kimi's delta
attention, kimi-linear.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.planning.memory.compute_graph.building.attention import build_attn
from engine.planning.memory.compute_graph.building.context import GraphContext, Masks
from engine.planning.memory.compute_graph.ggml.graph import Tensor
from engine.planning.memory.compute_graph.models.recurrent import States


def delta_net(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return a gated delta net with beta and alpha from weights of their own."""
    return _delta_net(ctx, current, copies=False)


def copying_delta_net(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the same, where what the convolution keeps is copied before it is stored."""
    return _delta_net(ctx, current, copies=True)


def _delta_net(ctx: GraphContext, current: Tensor, *, copies: bool) -> Tensor:
    graph, batch, heads = ctx.graph, ctx.batch, ctx.numbers.state.dt_rank
    tokens, sequences = batch.sequence_tokens, batch.n_sequences
    graph.expand(current)
    mixed, z = _mixed_and_gate(ctx, current)
    beta = graph.reshape(ctx.linear("ssm_beta", current), 1, heads, tokens, sequences)
    alpha = graph.reshape(ctx.linear("ssm_alpha", current), heads, tokens, sequences)
    return _updated(ctx, States(ctx), mixed, z, graph.unary(beta), alpha, copies=copies)


def joint_delta_net(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return a gated delta net with beta and alpha in one weight, and queries and keys for each head of values."""
    graph, batch, size = ctx.graph, ctx.batch, ctx.numbers.state
    tokens, sequences = batch.sequence_tokens, batch.n_sequences
    each = size.dt_rank // size.n_groups
    graph.expand(current)
    mixed, z = _mixed_and_gate(ctx, current) if ctx.has("attn_qkv") else _from_one_weight(ctx, current)
    joined = graph.reshape(ctx.linear("ssm_ba", current), 2 * each, size.n_groups, tokens, sequences)
    half = (each, size.n_groups, tokens, sequences)
    beta = graph.unary(graph.cont(graph.view(joined, half, joined.nb)))
    beta = graph.reshape(beta, 1, size.dt_rank, tokens, sequences)
    alpha = graph.cont(graph.view(joined, half, joined.nb), size.dt_rank, tokens, sequences)
    repeats = size.n_groups != size.dt_rank
    return _updated(ctx, States(ctx), mixed, z, beta, alpha, repeats=repeats)


def _mixed_and_gate(ctx: GraphContext, current: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries, keys and values in one, and the gate of the output."""
    mixed = ctx.linear("attn_qkv", current)
    mixed = ctx.graph.reshape(mixed, mixed.ne[0], ctx.batch.sequence_tokens, ctx.batch.n_sequences)
    return mixed, ctx.linear("attn_gate", current)


def _from_one_weight(ctx: GraphContext, current: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same from the one weight that older files have, whose rows alternate between them."""
    graph, batch, size = ctx.graph, ctx.batch, ctx.numbers.state
    outer = (batch.sequence_tokens, batch.n_sequences)
    groups, wide = size.n_groups, size.inner // size.n_groups
    joined = ctx.linear("ssm_in", current)
    joined = graph.reshape(joined, 2 * size.state + 2 * wide, groups, *outer)
    q, k, v, z = (
        graph.view(joined, (width, groups, *outer), joined.nb) for width in (size.state, size.state, wide, wide)
    )
    z = graph.cont(z)
    q, k, v = (graph.cont(part, part.ne[0] * groups, *outer) for part in (q, k, v))
    return graph.concat(graph.concat(q, k, 0), v, 0), z


def _updated(
    ctx: GraphContext,
    states: States,
    mixed: Tensor,
    z: Tensor,
    beta: Tensor,
    alpha: Tensor,
    *,
    repeats: bool = False,
    copies: bool = False,
) -> Tensor:
    """Return what the rule reads from its state.

    `repeats`: queries and keys, for each head of values; `copies`: what the convolution keeps, before it is stored.
    """
    graph, batch, size = ctx.graph, ctx.batch, ctx.numbers.state
    tokens, sequences = batch.sequence_tokens, batch.n_sequences
    heads, head = size.dt_rank, size.inner // size.dt_rank
    wide = size.inner + 2 * size.n_groups * size.state
    alpha = graph.unary(graph.add(alpha, ctx.weight("ssm_dt.bias")))
    decay = graph.reshape(graph.mul(alpha, ctx.weight("ssm_a")), 1, heads, tokens, sequences)
    rolling = graph.reshape(states.read(states.rolling), size.conv - 1, wide, sequences)
    window = graph.concat(rolling, graph.transpose(mixed), 0)
    kept = graph.view(window, (size.conv - 1, wide, sequences), window.nb)
    states.write(states.rolling, graph.cont(kept) if copies else kept)
    state = graph.reshape(states.read(states.recurrent), head, head, heads, sequences)
    mixed = graph.unary(graph.new("ssm_conv", (wide, tokens, sequences), window, ctx.weight("ssm_conv1d")))
    row = 4 * wide
    key, nb = (size.state, size.n_groups, tokens, sequences), (0, 4 * size.state, row, row * tokens)
    q, k = (graph.scale(ctx.raw_norm(graph.view(mixed, key, nb))) for _ in range(2))
    if repeats:
        q, k = (_for_each_head(ctx, part) for part in (q, k))
    v = graph.view(mixed, (head, heads, tokens, sequences), (0, 4 * head, row, row * tokens))
    n_rows = (tokens + head) * sequences
    found = graph.new("delta_net", (head * heads, n_rows), q, k, v, decay, beta, state)
    y = graph.view(found, (head, heads, tokens, sequences))
    states.write(states.recurrent, graph.view(found, (head, head, heads, sequences)))
    y = ctx.build_norm(y, "ssm_norm")
    y = graph.mul(y, graph.unary(graph.reshape(z, head, heads, tokens, sequences)))
    y = ctx.linear("ssm_out", graph.reshape(y, head * heads, tokens, sequences))
    return graph.reshape(y, y.ne[0], batch.n_tokens)


def _for_each_head(ctx: GraphContext, source: Tensor) -> Tensor:
    """Return queries or keys repeated for the heads of values that share them."""
    graph, (head, groups, tokens, sequences) = ctx.graph, source.ne
    each = ctx.numbers.state.dt_rank // groups
    apart = graph.reshape(source, head, 1, groups, tokens * sequences)
    repeated = graph.repeat(apart, head, each, groups, tokens * sequences)
    return graph.reshape(repeated, head, groups * each, tokens, sequences)


def gated_attention(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return attention whose query projection makes the gate of its output as well."""
    return gated_attention_to(ctx, ctx.inputs.full, current)


def gated_attention_to(ctx: GraphContext, masks: Masks, current: Tensor) -> Tensor:
    """Return the same, to what `masks` lets tokens see."""
    graph, numbers = ctx.graph, ctx.layer.numbers
    n_tokens, heads, head = current.ne[1], numbers.n_head, numbers.head_k
    joined = ctx.projection("attn_q", graph.expand(current))
    k = ctx.projection("attn_k", current)
    v = ctx.projection("attn_v", current)
    half, nb = (head, heads, n_tokens), (0, 8 * head, 8 * head * heads)
    q = ctx.build_norm(graph.view(joined, half, nb), "attn_q_norm")
    k = ctx.build_norm(graph.reshape(k, head, numbers.n_head_kv, n_tokens), "attn_k_norm")
    gate = graph.cont(graph.view(joined, half, nb), head * heads, n_tokens)
    v = graph.reshape(v, numbers.head_v, numbers.n_head_kv, n_tokens)
    q, k = ctx.rope(q, ctx.inputs.positions), ctx.rope(k, ctx.inputs.positions)
    found = build_attn(ctx, masks, q, k, v, sliding=False, out=None)
    return ctx.linear("attn_output", graph.mul(found, graph.unary(gate)))


def delta_attention(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return what the rule reads from its state, behind a gate."""
    graph, batch, size = ctx.graph, ctx.batch, ctx.numbers.state
    tokens, sequences = batch.sequence_tokens, batch.n_sequences
    inner = size.rolling_width // (3 * size.kept)
    head = size.recurrent_width // inner
    each = (head, inner // head, tokens, sequences)
    states = States(ctx)
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


def early_delta_attention(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the same, with the layer's input computed before its state is read."""
    return delta_attention(ctx, ctx.graph.expand(current))


def _decay(ctx: GraphContext, current: Tensor, head: int, heads: int) -> Tensor:
    """Return what each element of a key is to lose."""
    graph, shape = ctx.graph, (head, heads, ctx.batch.n_tokens)
    found = graph.add(_through(ctx, current, "ssm_f_a", "ssm_f_b"), ctx.weight("ssm_dt.bias"))
    factors = graph.reshape(ctx.weight("ssm_a"), 1, heads)
    if not ctx.numbers.state.bounds_decay:
        return graph.mul(graph.reshape(graph.unary(found), *shape), factors)
    found = graph.mul(graph.reshape(found, *shape), factors)
    # Bailing's, which is made of one weight, has the sign in its factors.
    found = graph.scale(found) if ctx.has("ssm_f_b") else found
    return graph.scale(graph.unary(found))


def _through(ctx: GraphContext, source: Tensor, *stems: str) -> Tensor:
    """Return `source` multiplied with those of the weights that the layer has, one after the other."""
    for stem in stems:
        if ctx.has(stem):
            source = ctx.graph.mul_mat(ctx.weight(stem), source)
    return source


def _sources(ctx: GraphContext, current: Tensor, inner: int) -> Sequence[Tensor]:
    """Return queries, keys and values before their convolutions."""
    graph = ctx.graph
    if not ctx.has("attn_qkv"):
        return [_through(ctx, current, stem) for stem in ("attn_q", "attn_k", "attn_v")]
    joined = _through(ctx, current, "attn_qkv")
    return [graph.cont(graph.view(joined, (inner, joined.ne[1]), (0, joined.nb[1]))) for _ in range(3)]


def _convolved(ctx: GraphContext, states: States, seen: Tensor, source: Tensor, stem: str) -> Tensor:
    """Return `source` behind a convolution over the last tokens, which the state `seen` keeps."""
    graph, batch, kept = ctx.graph, ctx.batch, ctx.numbers.state.kept
    tokens, sequences, inner = batch.sequence_tokens, batch.n_sequences, source.ne[0]
    rolling = graph.view(seen, (kept, inner, sequences), (0, 4 * kept, seen.nb[1]))
    window = graph.concat(rolling, graph.transpose(graph.reshape(source, inner, tokens, sequences)), 0)
    states.write(states.rolling, graph.view(window, (kept, inner, sequences), window.nb))
    weight = graph.reshape(ctx.weight(stem), kept + 1, inner)
    found = graph.new("ssm_conv", (inner, tokens, sequences), window, weight)
    return graph.unary(graph.reshape(found, inner, batch.n_tokens))
