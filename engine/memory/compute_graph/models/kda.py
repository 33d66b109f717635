"""Layers whose state a delta rule updates, with a decay for each element of a key (Kimi's delta attention)."""

from __future__ import annotations

from collections.abc import Sequence

from engine.memory.compute_graph.building.sketch import Sketch
from engine.memory.compute_graph.ggml.graph import Tensor
from engine.memory.compute_graph.models.recurrent import States


def delta_attention(sketch: Sketch, current: Tensor) -> Tensor:
    """Return what the rule reads from its state, behind a gate."""
    graph, batch, size = sketch.graph, sketch.batch, sketch.numbers.state
    tokens, sequences = batch.sequence_tokens, batch.n_sequences
    inner = size.rolling_width // (3 * size.kept)
    head = size.recurrent_width // inner
    each = (head, inner // head, tokens, sequences)
    states = States(sketch)
    seen = states.read(states.rolling)
    q, k, v = (
        graph.reshape(_convolved(sketch, states, seen, source, f"ssm_conv1d_{letter}"), *each)
        for source, letter in zip(_sources(sketch, current, inner), "qkv", strict=True)
    )
    decay = graph.reshape(_decay(sketch, current, *each[:2]), *each)
    beta = graph.unary(graph.reshape(_through(sketch, current, "ssm_beta"), 1, *each[1:]))
    state = graph.reshape(states.read(states.recurrent), head, head, each[1], sequences)
    q, k = (graph.scale(sketch.raw_norm(part)) for part in (q, k))
    found = graph.new("delta_net", (inner, (tokens + head) * sequences), q, k, v, decay, beta, state)
    states.write(states.recurrent, graph.view(found, (head, head, each[1], sequences)))
    y = graph.reshape(graph.cont(graph.view(found, each)), *each[:2], batch.n_tokens)
    gate = graph.reshape(_through(sketch, current, "ssm_g", "ssm_g_a", "ssm_g_b"), *each[:2], batch.n_tokens)
    y = graph.mul(sketch.norm(y, "ssm_norm"), graph.unary(gate))
    return graph.mul_mat(sketch.weight("attn_output"), graph.cont(y, inner, batch.n_tokens))


def early_delta_attention(sketch: Sketch, current: Tensor) -> Tensor:
    """Return the same, with the layer's input computed before its state is read."""
    return delta_attention(sketch, sketch.graph.expand(current))


def _decay(sketch: Sketch, current: Tensor, head: int, heads: int) -> Tensor:
    """Return what each element of a key is to lose."""
    graph, shape = sketch.graph, (head, heads, sketch.batch.n_tokens)
    found = graph.add(_through(sketch, current, "ssm_f_a", "ssm_f_b"), sketch.weight("ssm_dt.bias"))
    factors = graph.reshape(sketch.weight("ssm_a"), 1, heads)
    if not sketch.numbers.state.bounds_decay:
        return graph.mul(graph.reshape(graph.unary(found), *shape), factors)
    found = graph.mul(graph.reshape(found, *shape), factors)
    # Bailing's, which is made of one weight, has the sign in its factors.
    found = graph.scale(found) if sketch.has("ssm_f_b") else found
    return graph.scale(graph.unary(found))


def _through(sketch: Sketch, source: Tensor, *stems: str) -> Tensor:
    """Return `source` multiplied with those of the weights that the layer has, one after the other."""
    for stem in stems:
        if sketch.has(stem):
            source = sketch.graph.mul_mat(sketch.weight(stem), source)
    return source


def _sources(sketch: Sketch, current: Tensor, inner: int) -> Sequence[Tensor]:
    """Return queries, keys and values before their convolutions."""
    graph = sketch.graph
    if not sketch.has("attn_qkv"):
        return [_through(sketch, current, stem) for stem in ("attn_q", "attn_k", "attn_v")]
    joined = _through(sketch, current, "attn_qkv")
    return [graph.cont(graph.view(joined, (inner, joined.ne[1]), (0, joined.nb[1]))) for _ in range(3)]


def _convolved(sketch: Sketch, states: States, seen: Tensor, source: Tensor, stem: str) -> Tensor:
    """Return `source` behind a convolution over the last tokens, which the state `seen` keeps."""
    graph, batch, kept = sketch.graph, sketch.batch, sketch.numbers.state.kept
    tokens, sequences, inner = batch.sequence_tokens, batch.n_sequences, source.ne[0]
    rolling = graph.view(seen, (kept, inner, sequences), (0, 4 * kept, seen.nb[1]))
    window = graph.concat(rolling, graph.transpose(graph.reshape(source, inner, tokens, sequences)), 0)
    states.write(states.rolling, graph.view(window, (kept, inner, sequences), window.nb))
    weight = graph.reshape(sketch.weight(stem), kept + 1, inner)
    found = graph.new("ssm_conv", (inner, tokens, sequences), window, weight)
    return graph.unary(graph.reshape(found, inner, batch.n_tokens))
