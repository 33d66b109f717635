"""RWKV 6 and 7, also with the feed-forward part of another model.

Each token is mixed with the one before it, and each head has a matrix as recurrent state. Mirrors
src/models/rwkv6-base.cpp, rwkv7-base.cpp, rwkv6qwen2.cpp and arwkv7.cpp.
"""

from __future__ import annotations

from msgspec import Struct

from engine.planning.memory.compute_graph.building.context import GraphContext
from engine.planning.memory.compute_graph.ggml.graph import Tensor
from engine.planning.memory.compute_graph.models.recurrent import RecurrentStates


class _FirstValues(Struct, frozen=True):
    """Values of the first layer, which later layers mix with their own (`v_first` in rwkv7-base.cpp)."""

    values: Tensor


def time_mixing(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the output of a layer's time mixing, and store each sequence's last token (src/models/arwkv7.cpp)."""
    states, shift = _build_token_shift_load(ctx)
    mixed = _mix_time(ctx, states, current, _shifted(ctx, shift, current))
    _build_token_shift_store(states, ctx, ctx.graph.view(current, (shift.ne[0], 1, shift.ne[2]), current.nb))
    return mixed


def rwkv_layer(ctx: GraphContext, previous: Tensor) -> Tensor:
    """Return the output of a layer with time mixing and channel mixing (src/models/rwkv6.cpp, rwkv7.cpp).

    Both kinds of mixing combine the input of each token with that of the token before. The last token of both inputs is
    stored in one step. Therefore this function computes time mixing itself, instead of through `ctx.mixed`.
    """
    graph = ctx.graph
    states, shift = _build_token_shift_load(ctx)
    last = (shift.ne[0], 1, shift.ne[2])
    previous = _by_sequence(ctx, previous)
    normed = ctx.build_norm(previous, "attn_norm", layer_norm=ctx.style.layer_norm)
    mixed = _mix_time(ctx, states, normed, _shifted(ctx, graph.view(shift, last, shift.nb), normed))
    joined = graph.add(mixed, previous)
    second = ctx.build_norm(joined, "attn_norm_2", layer_norm=ctx.style.layer_norm)
    shifted = _shifted(ctx, graph.view(shift, last, shift.nb), second)
    kept = graph.concat(graph.view(normed, last, normed.nb), graph.view(second, last, second.nb), 1)
    _build_token_shift_store(states, ctx, kept)
    # The scale of `rescale_every_n_layers` is left out: its result reuses the memory of its source.
    joined, second, shifted = (_flat(ctx, tensor) for tensor in (joined, second, shifted))
    return graph.add(_build_rwkv_channel_mix(ctx, second, shifted), joined)


def rwkv_gated_layer(ctx: GraphContext, previous: Tensor) -> Tensor:
    """Return the output of a layer with time mixing and a gated feed-forward part (src/models/rwkv6qwen2.cpp,
    arwkv7.cpp).
    """
    previous = _by_sequence(ctx, previous)
    mixed = ctx.mixed(ctx.build_norm(previous, "attn_norm"))
    joined = _flat(ctx, ctx.graph.add(mixed, previous))
    return ctx.graph.add(ctx.build_ffn(ctx.build_norm(joined, "ffn_norm")), joined)


def _by_sequence(ctx: GraphContext, source: Tensor) -> Tensor:
    """Return `source` with shape (width, tokens, sequences)."""
    batch = ctx.batch
    return ctx.graph.reshape(source, source.ne[0], batch.sequence_tokens, batch.n_sequences)


def _build_token_shift_load(ctx: GraphContext) -> tuple[RecurrentStates, Tensor]:
    """Return the layer's states, and the last tokens of the previous batch (`build_rwkv_token_shift_load`)."""
    graph, width = ctx.graph, ctx.hparams.n_embd
    states = RecurrentStates(ctx)
    count = states.rolling.ne[0] // width
    return states, graph.reshape(states.read(states.rolling), width, count, ctx.batch.n_sequences)


def _shifted(ctx: GraphContext, last: Tensor, tokens: Tensor) -> Tensor:
    """Return `tokens` shifted by one token: for each token, the values of the token before it.

    `last`: last tokens of the previous batch, which come before the first tokens of this one.
    """
    graph, (width, count, sequences, _) = ctx.graph, tokens.ne
    return graph.concat(last, graph.view(tokens, (width, count - 1, sequences), tokens.nb), 1)


def _build_token_shift_store(states: RecurrentStates, ctx: GraphContext, kept: Tensor) -> None:
    """Write `kept`, the last tokens of the batch, to the rolling states (`build_rwkv_token_shift_store`)."""
    n_elements = states.rolling.ne[0] * ctx.batch.n_sequences
    states.write(states.rolling, ctx.graph.view(kept, (n_elements,)))


def _flat(ctx: GraphContext, source: Tensor) -> Tensor:
    """Return `source` with shape (width, tokens of all sequences); in the last layer only tokens with logits."""
    found = ctx.graph.reshape(source, source.ne[0], ctx.batch.n_tokens)
    return ctx.graph.get_rows(found, ctx.inputs.inp_out_ids) if ctx.layer.is_last else found


def _build_rwkv_channel_mix(ctx: GraphContext, current: Tensor, shifted: Tensor) -> Tensor:
    """Return the output of channel mixing (`build_rwkv6_channel_mix`, `build_rwkv7_channel_mix`).

    `shifted`: `current` shifted by one token: for each token, the values of the token before it.
    """
    graph = ctx.graph
    change = graph.like("sub", shifted, current)
    key = graph.add(graph.mul(change, ctx.weight("channel_mix_lerp_k")), current)
    if not ctx.has("channel_mix_receptance"):
        return ctx.linear("channel_mix_value", _squared(ctx, key))
    receptance = graph.add(graph.mul(change, ctx.weight("channel_mix_lerp_r")), current)
    receptance = graph.unary(ctx.linear("channel_mix_receptance", receptance))
    return graph.mul(receptance, ctx.linear("channel_mix_value", _squared(ctx, key)))


def _squared(ctx: GraphContext, key: Tensor) -> Tensor:
    return ctx.graph.like("sqr", ctx.graph.unary(ctx.linear("channel_mix_key", key)))


def _mix_time(ctx: GraphContext, states: RecurrentStates, current: Tensor, shifted: Tensor) -> Tensor:
    """Return the output of time mixing, with shape (width, tokens, sequences).

    `shifted`: `current` shifted by one token: for each token, the values of the token before it.
    """
    mix = _build_rwkv7_time_mix if ctx.has("time_mix_w0") else _build_rwkv6_time_mix
    return _by_sequence(ctx, ctx.linear("time_mix_output", mix(ctx, states, current, shifted)))


def _heads(ctx: GraphContext, states: RecurrentStates) -> tuple[int, int]:
    """Return (size of a head, number of heads)."""
    width = ctx.hparams.n_embd
    size = states.recurrent.ne[0] // width
    return size, width // size


def _build_rwkv6_time_mix(ctx: GraphContext, states: RecurrentStates, current: Tensor, shifted: Tensor) -> Tensor:
    graph, n_tokens, width = ctx.graph, ctx.batch.n_tokens, ctx.hparams.n_embd
    size, heads = _heads(ctx, states)
    gated = not ctx.has("time_mix_first")
    w, k, v, r, g = _parts6(ctx, current, shifted)
    r, k, v = (
        ctx.linear("time_mix_receptance", r),
        ctx.linear("time_mix_key", k),
        ctx.linear("time_mix_value", v),
    )
    g = graph.unary(ctx.linear("time_mix_gate", g))
    n_head_kv = ctx.layer.hparams.n_head_kv
    if n_head_kv not in (0, heads):
        group = (size, heads // n_head_kv, n_head_kv, n_tokens)
        k = graph.repeat(graph.reshape(k, size, 1, n_head_kv, n_tokens), *group)
        v = graph.repeat(graph.reshape(v, size, 1, n_head_kv, n_tokens), *group)
    k, v, r = (graph.reshape(part, size, heads, n_tokens) for part in (k, v, r))
    decay = graph.unary(graph.mul_mat(ctx.weight("time_mix_decay_w1"), w))
    w = graph.add(graph.mul_mat(ctx.weight("time_mix_decay_w2"), decay), ctx.weight("time_mix_decay"))
    # Three nodes of llama.cpp: exp(-exp(w)).
    w = graph.reshape(graph.unary(graph.unary(graph.unary(w))), size, heads, n_tokens)
    if gated:
        k = graph.like("sub", k, graph.mul(k, w))
    first = () if gated else (ctx.weight("time_mix_first"),)
    found = _wkv(ctx, states, (k, v, r, *first, w))
    if gated:
        return graph.mul(graph.reshape(found, width, n_tokens), g)
    return graph.mul(_group_norm(ctx, found, heads), g)


def _parts6(ctx: GraphContext, current: Tensor, shifted: Tensor) -> list[Tensor]:
    """Return the inputs of decay, keys, values, receptance and gate, for RWKV 6."""
    graph, n_tokens, width = ctx.graph, ctx.batch.n_tokens, ctx.hparams.n_embd
    change = graph.reshape(graph.like("sub", shifted, current), width, n_tokens)
    current = graph.reshape(current, width, n_tokens)
    joined = graph.add(graph.mul(change, ctx.weight("time_mix_lerp_x")), current)
    first, second = ctx.weight("time_mix_w1"), ctx.weight("time_mix_w2")
    joined = graph.reshape(graph.unary(graph.mul_mat(first, joined)), first.ne[1] // 5, 1, 5, n_tokens)
    joined = graph.cont(graph.permute(joined, 0, 1, 3, 2))
    joined = graph.mul_mat(graph.reshape(second, *second.ne[:2], 1, 5), joined)
    part = (width, n_tokens)
    if ctx.has("time_mix_lerp_fused"):
        change, current = (graph.reshape(each, width, 1, n_tokens) for each in (change, current))
        joined = graph.add(joined, ctx.weight("time_mix_lerp_fused"))
        joined = graph.add(graph.mul(joined, change), current)
        return [graph.view(joined, part, joined.nb[:2]) for _ in range(5)]
    parts = [graph.view(joined, part, joined.nb[:2]) for _ in range(5)]
    return [
        graph.add(graph.mul(graph.add(each, ctx.weight(f"time_mix_lerp_{name}")), change), current)
        for each, name in zip(parts, "wkvrg", strict=True)
    ]


def _build_rwkv7_time_mix(ctx: GraphContext, states: RecurrentStates, current: Tensor, shifted: Tensor) -> Tensor:
    graph, batch, width = ctx.graph, ctx.batch, ctx.hparams.n_embd
    size, heads = _heads(ctx, states)
    n_tokens, gates = batch.n_tokens, ctx.has("time_mix_g1")
    change = graph.like("sub", shifted, current)
    # One mixed input each for r, w, k, v and a, and for g if the layer has a gate.
    change = graph.repeat(change, width, batch.sequence_tokens, batch.n_sequences, 6 if gates else 5)
    joined = graph.add(graph.mul(change, ctx.weight("time_mix_lerp_fused")), current)
    xr, xw, xk, xv, xa, xg = (graph.view(joined, (width, n_tokens), joined.nb[:2]) for _ in range(6))
    r = ctx.linear("time_mix_receptance", xr)
    w = _low_rank(ctx, "w", xw, squashed=True)
    w = graph.unary(graph.scale(graph.unary(w)))
    k, v = ctx.linear("time_mix_key", xk), ctx.linear("time_mix_value", xv)
    v = _with_first_values(ctx, v, xv)
    a = graph.unary(_low_rank(ctx, "a", xa))
    kk = graph.reshape(graph.mul(k, ctx.weight("time_mix_k_k")), size, heads, n_tokens)
    kk = graph.like("l2_norm", kk)
    ka = graph.mul(k, ctx.weight("time_mix_k_a"))
    k = graph.add(k, graph.like("sub", graph.mul(a, ka), ka))
    r, w, k, v, a = (graph.reshape(part, size, heads, n_tokens) for part in (r, w, k, v, a))
    found = _wkv(ctx, states, (r, w, k, v, graph.unary(kk), graph.mul(kk, a)))
    found = _group_norm(ctx, found, heads) if ctx.has("time_mix_ln") else graph.reshape(found, width, n_tokens)
    rk = graph.mul(graph.mul(k, r), graph.reshape(ctx.weight("time_mix_r_k"), size, heads))
    found = graph.add(found, graph.reshape(graph.mul(v, graph.sum_rows(rk)), width, n_tokens))
    if gates:
        gate = graph.unary(graph.mul_mat(ctx.weight("time_mix_g1"), xg))
        found = graph.mul(found, graph.mul_mat(ctx.weight("time_mix_g2"), gate))
    return found


def _low_rank(ctx: GraphContext, name: str, source: Tensor, *, squashed: bool = False) -> Tensor:
    graph = ctx.graph
    narrow = graph.mul_mat(ctx.weight(f"time_mix_{name}1"), source)
    narrow = graph.unary(narrow) if squashed else narrow
    return graph.add(graph.mul_mat(ctx.weight(f"time_mix_{name}2"), narrow), ctx.weight(f"time_mix_{name}0"))


def _with_first_values(ctx: GraphContext, values: Tensor, source: Tensor) -> Tensor:
    """Return the layer's values mixed with those of the first layer.

    `source`: input from which the weights of this mixture are computed.
    """
    graph = ctx.graph
    first = ctx.shared.once(_FirstValues, lambda: _FirstValues(values)).values
    if first is values:
        return values
    share = graph.unary(_low_rank(ctx, "v", source))
    return graph.add(values, graph.mul(graph.like("sub", first, values), share))


def _wkv(ctx: GraphContext, states: RecurrentStates, parts: tuple[Tensor, ...]) -> Tensor:
    """Return the output of the heads for all tokens, and store their recurrent matrices.

    `parts`: inputs of the operation, without the recurrent matrices.
    Mirrors `ggml_rwkv_wkv6`, `ggml_rwkv_wkv7` and `ggml_gated_linear_attn`.
    """
    graph, batch, width = ctx.graph, ctx.batch, ctx.hparams.n_embd
    size, _ = _heads(ctx, states)
    state = states.read(states.recurrent)
    # One tensor for both results: the outputs of all tokens, then the new matrices.
    found = graph.new("wkv", (width, batch.n_tokens + size * batch.n_sequences), *parts, state)
    output = graph.view(found, (width * batch.n_tokens,))
    states.write(states.recurrent, graph.view(found, (width * size * batch.n_sequences,)))
    return output


def _group_norm(ctx: GraphContext, source: Tensor, heads: int) -> Tensor:
    graph, n_tokens, width = ctx.graph, ctx.batch.n_tokens, ctx.hparams.n_embd
    found = ctx.raw_norm(graph.reshape(source, width // heads, heads, n_tokens), layer_norm=True)
    found = graph.reshape(found, width, n_tokens)
    return graph.add(graph.mul(found, ctx.weight("time_mix_ln")), ctx.weight("time_mix_ln.bias"))
