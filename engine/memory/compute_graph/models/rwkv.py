"""Layers that mix each token with the one before it and keep a matrix for each head (RWKV 6 and 7, and their like with
another model's feed-forward part)."""

from __future__ import annotations

from dataclasses import dataclass

from engine.memory.compute_graph.building.context import Sketch
from engine.memory.compute_graph.ggml.graph import Tensor
from engine.memory.compute_graph.models.recurrent import States


@dataclass(frozen=True, slots=True)
class _FirstValues:
    """Values of the first layer, which later ones mix with theirs."""

    values: Tensor


def time_mixing(sketch: Sketch, current: Tensor) -> Tensor:
    """Return what the heads' matrices make of the tokens of each sequence, and keep its last token."""
    states, shift = _read_shift(sketch)
    mixed = _mix_time(sketch, states, current, _shifted(sketch, shift, current))
    _store(states, sketch, sketch.graph.view(current, (shift.ne[0], 1, shift.ne[2]), current.nb))
    return mixed


def rwkv_layer(sketch: Sketch, previous: Tensor) -> Tensor:
    """Return a layer of time mixing and channel mixing, which keeps the last token that each of them read at once and
    so does not leave that to the mixer.

    That every so many layers halve their output makes no difference: that is done in place.
    """
    graph = sketch.graph
    states, shift = _read_shift(sketch)
    last = (shift.ne[0], 1, shift.ne[2])
    previous = _by_sequence(sketch, previous)
    normed = sketch.norm(previous, "attn_norm", layer_norm=sketch.style.layer_norm)
    mixed = _mix_time(sketch, states, normed, _shifted(sketch, graph.view(shift, last, shift.nb), normed))
    joined = graph.add(mixed, previous)
    second = sketch.norm(joined, "attn_norm_2", layer_norm=sketch.style.layer_norm)
    shifted = _shifted(sketch, graph.view(shift, last, shift.nb), second)
    kept = graph.concat(graph.view(normed, last, normed.nb), graph.view(second, last, second.nb), 1)
    _store(states, sketch, kept)
    joined, second, shifted = (_flat(sketch, tensor) for tensor in (joined, second, shifted))
    return graph.add(_mix_channels(sketch, second, shifted), joined)


def rwkv_gated_layer(sketch: Sketch, previous: Tensor) -> Tensor:
    """Return a layer of time mixing and a gated feed-forward part."""
    previous = _by_sequence(sketch, previous)
    mixed = sketch.mixed(sketch.norm(previous, "attn_norm"))
    joined = _flat(sketch, sketch.graph.add(mixed, previous))
    return sketch.graph.add(sketch.feed_forward(sketch.norm(joined, "ffn_norm")), joined)


def _by_sequence(sketch: Sketch, source: Tensor) -> Tensor:
    batch = sketch.batch
    return sketch.graph.reshape(source, source.ne[0], batch.sequence_tokens, batch.n_sequences)


def _read_shift(sketch: Sketch) -> tuple[States, Tensor]:
    """Return the layer's states, and the last tokens of the batch before."""
    graph, width = sketch.graph, sketch.numbers.n_embd
    states = States(sketch)
    count = states.rolling.ne[0] // width
    return states, graph.reshape(states.read(states.rolling), width, count, sketch.batch.n_sequences)


def _shifted(sketch: Sketch, last: Tensor, tokens: Tensor) -> Tensor:
    """Return the token before each of `tokens`."""
    graph, (width, count, sequences, _) = sketch.graph, tokens.ne
    return graph.concat(last, graph.view(tokens, (width, count - 1, sequences), tokens.nb), 1)


def _store(states: States, sketch: Sketch, kept: Tensor) -> None:
    n_elements = states.rolling.ne[0] * sketch.batch.n_sequences
    states.write(states.rolling, sketch.graph.view(kept, (n_elements,)))


def _flat(sketch: Sketch, source: Tensor) -> Tensor:
    """Return the tokens of all sequences in a row, in the last layer those that are wanted."""
    found = sketch.graph.reshape(source, source.ne[0], sketch.batch.n_tokens)
    return sketch.graph.get_rows(found, sketch.inputs.output_rows) if sketch.layer.is_last else found


def _mix_channels(sketch: Sketch, current: Tensor, shifted: Tensor) -> Tensor:
    graph = sketch.graph
    change = graph.like("sub", shifted, current)
    key = graph.add(graph.mul(change, sketch.weight("channel_mix_lerp_k")), current)
    if not sketch.has("channel_mix_receptance"):
        return sketch.linear("channel_mix_value", _squared(sketch, key))
    receptance = graph.add(graph.mul(change, sketch.weight("channel_mix_lerp_r")), current)
    receptance = graph.unary(sketch.linear("channel_mix_receptance", receptance))
    return graph.mul(receptance, sketch.linear("channel_mix_value", _squared(sketch, key)))


def _squared(sketch: Sketch, key: Tensor) -> Tensor:
    return sketch.graph.like("sqr", sketch.graph.unary(sketch.linear("channel_mix_key", key)))


def _mix_time(sketch: Sketch, states: States, current: Tensor, shifted: Tensor) -> Tensor:
    """Return what the matrices of the heads make of the tokens, by sequence."""
    mix = _mix_time7 if sketch.has("time_mix_w0") else _mix_time6
    return _by_sequence(sketch, sketch.linear("time_mix_output", mix(sketch, states, current, shifted)))


def _heads(sketch: Sketch, states: States) -> tuple[int, int]:
    """Return the size of a head and how many there are."""
    width = sketch.numbers.n_embd
    size = states.recurrent.ne[0] // width
    return size, width // size


def _mix_time6(sketch: Sketch, states: States, current: Tensor, shifted: Tensor) -> Tensor:
    graph, n_tokens, width = sketch.graph, sketch.batch.n_tokens, sketch.numbers.n_embd
    size, heads = _heads(sketch, states)
    gated = not sketch.has("time_mix_first")
    w, k, v, r, g = _parts6(sketch, current, shifted)
    r, k, v = (
        sketch.linear("time_mix_receptance", r),
        sketch.linear("time_mix_key", k),
        sketch.linear("time_mix_value", v),
    )
    g = graph.unary(sketch.linear("time_mix_gate", g))
    n_head_kv = sketch.layer.numbers.n_head_kv
    if n_head_kv not in (0, heads):
        group = (size, heads // n_head_kv, n_head_kv, n_tokens)
        k = graph.repeat(graph.reshape(k, size, 1, n_head_kv, n_tokens), *group)
        v = graph.repeat(graph.reshape(v, size, 1, n_head_kv, n_tokens), *group)
    k, v, r = (graph.reshape(part, size, heads, n_tokens) for part in (k, v, r))
    decay = graph.unary(graph.mul_mat(sketch.weight("time_mix_decay_w1"), w))
    w = graph.add(graph.mul_mat(sketch.weight("time_mix_decay_w2"), decay), sketch.weight("time_mix_decay"))
    w = graph.reshape(graph.unary(graph.unary(graph.unary(w))), size, heads, n_tokens)
    if gated:
        k = graph.like("sub", k, graph.mul(k, w))
    first = () if gated else (sketch.weight("time_mix_first"),)
    found = _step(sketch, states, (k, v, r, *first, w))
    if gated:
        return graph.mul(graph.reshape(found, width, n_tokens), g)
    return graph.mul(_group_norm(sketch, found, heads), g)


def _parts6(sketch: Sketch, current: Tensor, shifted: Tensor) -> list[Tensor]:
    """Return what decay, keys, values, receptance and gate are made of."""
    graph, n_tokens, width = sketch.graph, sketch.batch.n_tokens, sketch.numbers.n_embd
    change = graph.reshape(graph.like("sub", shifted, current), width, n_tokens)
    current = graph.reshape(current, width, n_tokens)
    joined = graph.add(graph.mul(change, sketch.weight("time_mix_lerp_x")), current)
    first, second = sketch.weight("time_mix_w1"), sketch.weight("time_mix_w2")
    joined = graph.reshape(graph.unary(graph.mul_mat(first, joined)), first.ne[1] // 5, 1, 5, n_tokens)
    joined = graph.cont(graph.permute(joined, 0, 1, 3, 2))
    joined = graph.mul_mat(graph.reshape(second, *second.ne[:2], 1, 5), joined)
    part = (width, n_tokens)
    if sketch.has("time_mix_lerp_fused"):
        change, current = (graph.reshape(each, width, 1, n_tokens) for each in (change, current))
        joined = graph.add(joined, sketch.weight("time_mix_lerp_fused"))
        joined = graph.add(graph.mul(joined, change), current)
        return [graph.view(joined, part, joined.nb[:2]) for _ in range(5)]
    parts = [graph.view(joined, part, joined.nb[:2]) for _ in range(5)]
    return [
        graph.add(graph.mul(graph.add(each, sketch.weight(f"time_mix_lerp_{name}")), change), current)
        for each, name in zip(parts, "wkvrg", strict=True)
    ]


def _mix_time7(sketch: Sketch, states: States, current: Tensor, shifted: Tensor) -> Tensor:
    graph, batch, width = sketch.graph, sketch.batch, sketch.numbers.n_embd
    size, heads = _heads(sketch, states)
    n_tokens, gates = batch.n_tokens, sketch.has("time_mix_g1")
    change = graph.like("sub", shifted, current)
    change = graph.repeat(change, width, batch.sequence_tokens, batch.n_sequences, 6 if gates else 5)
    joined = graph.add(graph.mul(change, sketch.weight("time_mix_lerp_fused")), current)
    xr, xw, xk, xv, xa, xg = (graph.view(joined, (width, n_tokens), joined.nb[:2]) for _ in range(6))
    r = sketch.linear("time_mix_receptance", xr)
    w = _low_rank(sketch, "w", xw, squashed=True)
    w = graph.unary(graph.scale(graph.unary(w)))
    k, v = sketch.linear("time_mix_key", xk), sketch.linear("time_mix_value", xv)
    v = _with_first_values(sketch, v, xv)
    a = graph.unary(_low_rank(sketch, "a", xa))
    kk = graph.reshape(graph.mul(k, sketch.weight("time_mix_k_k")), size, heads, n_tokens)
    kk = graph.like("l2_norm", kk)
    ka = graph.mul(k, sketch.weight("time_mix_k_a"))
    k = graph.add(k, graph.like("sub", graph.mul(a, ka), ka))
    r, w, k, v, a = (graph.reshape(part, size, heads, n_tokens) for part in (r, w, k, v, a))
    found = _step(sketch, states, (r, w, k, v, graph.unary(kk), graph.mul(kk, a)))
    found = _group_norm(sketch, found, heads) if sketch.has("time_mix_ln") else graph.reshape(found, width, n_tokens)
    rk = graph.mul(graph.mul(k, r), graph.reshape(sketch.weight("time_mix_r_k"), size, heads))
    found = graph.add(found, graph.reshape(graph.mul(v, graph.sum_rows(rk)), width, n_tokens))
    if gates:
        gate = graph.unary(graph.mul_mat(sketch.weight("time_mix_g1"), xg))
        found = graph.mul(found, graph.mul_mat(sketch.weight("time_mix_g2"), gate))
    return found


def _low_rank(sketch: Sketch, name: str, source: Tensor, *, squashed: bool = False) -> Tensor:
    graph = sketch.graph
    narrow = graph.mul_mat(sketch.weight(f"time_mix_{name}1"), source)
    narrow = graph.unary(narrow) if squashed else narrow
    return graph.add(graph.mul_mat(sketch.weight(f"time_mix_{name}2"), narrow), sketch.weight(f"time_mix_{name}0"))


def _with_first_values(sketch: Sketch, values: Tensor, source: Tensor) -> Tensor:
    """Return the values mixed with those of the first layer, which are kept for that."""
    graph = sketch.graph
    first = sketch.shared.once(_FirstValues, lambda: _FirstValues(values)).values
    if first is values:
        return values
    share = graph.unary(_low_rank(sketch, "v", source))
    return graph.add(values, graph.mul(graph.like("sub", first, values), share))


def _step(sketch: Sketch, states: States, parts: tuple[Tensor, ...]) -> Tensor:
    """Return the output of all tokens in a row, and keep the matrices behind it."""
    graph, batch, width = sketch.graph, sketch.batch, sketch.numbers.n_embd
    size, _ = _heads(sketch, states)
    state = states.read(states.recurrent)
    found = graph.new("wkv", (width, batch.n_tokens + size * batch.n_sequences), *parts, state)
    output = graph.view(found, (width * batch.n_tokens,))
    states.write(states.recurrent, graph.view(found, (width * size * batch.n_sequences,)))
    return output


def _group_norm(sketch: Sketch, source: Tensor, heads: int) -> Tensor:
    graph, n_tokens, width = sketch.graph, sketch.batch.n_tokens, sketch.numbers.n_embd
    found = sketch.raw_norm(graph.reshape(source, width // heads, heads, n_tokens), layer_norm=True)
    found = graph.reshape(found, width, n_tokens)
    return graph.add(graph.mul(found, sketch.weight("time_mix_ln")), sketch.weight("time_mix_ln.bias"))
