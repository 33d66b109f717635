"""Layers whose state a gated delta rule updates (Qwen 3.5)."""

from __future__ import annotations

from engine.memory.compute_graph.graph import Tensor
from engine.memory.compute_graph.recurrent import States
from engine.memory.compute_graph.sketch import Sketch
from engine.memory.compute_graph.transformer import Inputs, Style


def delta_net(sketch: Sketch, style: Style, inputs: Inputs, index: int, current: Tensor) -> Tensor:
    """Return a gated delta net whose rule is one operation."""
    graph, batch, size = sketch.graph, sketch.batch, sketch.numbers.state
    tokens, sequences = batch.sequence_tokens, batch.n_sequences
    heads, head = size.dt_rank, size.inner // size.dt_rank
    wide = size.inner + 2 * size.n_groups * size.state
    graph.expand(current)
    states = States(sketch, inputs)
    mixed = sketch.linear("attn_qkv", current)
    mixed = graph.reshape(mixed, mixed.ne[0], tokens, sequences)
    z = sketch.linear("attn_gate", current)
    beta = graph.unary(graph.reshape(sketch.linear("ssm_beta", current), 1, heads, tokens, sequences))
    alpha = graph.reshape(sketch.linear("ssm_alpha", current), heads, tokens, sequences)
    alpha = graph.unary(graph.add(alpha, sketch.weight("ssm_dt.bias")))
    decay = graph.reshape(graph.mul(alpha, sketch.weight("ssm_a")), 1, heads, tokens, sequences)
    rolling = graph.reshape(states.read(states.rolling), size.conv - 1, wide, sequences)
    window = graph.concat(rolling, graph.transpose(mixed), 0)
    states.write(states.rolling, graph.view(window, (size.conv - 1, wide, sequences), window.nb))
    state = graph.reshape(states.read(states.recurrent), head, head, heads, sequences)
    mixed = graph.unary(graph.new("ssm_conv", (wide, tokens, sequences), window, sketch.weight("ssm_conv1d")))
    row = 4 * wide
    key, nb = (size.state, size.n_groups, tokens, sequences), (0, 4 * size.state, row, row * tokens)
    q, k = (graph.scale(sketch.raw_norm(graph.view(mixed, key, nb))) for _ in range(2))
    v = graph.view(mixed, (head, heads, tokens, sequences), (0, 4 * head, row, row * tokens))
    n_rows = (tokens + head) * sequences
    found = graph.new("delta_net", (head * heads, n_rows), q, k, v, decay, beta, state)
    y = graph.view(found, (head, heads, tokens, sequences))
    states.write(states.recurrent, graph.view(found, (head, head, heads, sequences)))
    y = sketch.norm(y, "ssm_norm")
    y = graph.mul(y, graph.unary(graph.reshape(z, head, heads, tokens, sequences)))
    y = sketch.linear("ssm_out", graph.reshape(y, head * heads, tokens, sequences))
    return graph.reshape(y, y.ne[0], batch.n_tokens)


def gated_attention(sketch: Sketch, style: Style, inputs: Inputs, index: int, current: Tensor) -> Tensor:
    """Return attention whose query projection makes the gate of its output as well."""
    graph, numbers = sketch.graph, sketch.layer.numbers
    n_tokens, heads, head = current.ne[1], numbers.n_head, numbers.head_k
    joined = sketch.linear("attn_q", graph.expand(current))
    k = sketch.linear("attn_k", current)
    v = sketch.linear("attn_v", current)
    half, nb = (head, heads, n_tokens), (0, 8 * head, 8 * head * heads)
    q = sketch.norm(graph.view(joined, half, nb), "attn_q_norm")
    k = sketch.norm(graph.reshape(k, head, numbers.n_head_kv, n_tokens), "attn_k_norm")
    gate = graph.cont(graph.view(joined, half, nb), head * heads, n_tokens)
    v = graph.reshape(v, numbers.head_v, numbers.n_head_kv, n_tokens)
    q, k = sketch.rope(q, inputs.positions), sketch.rope(k, inputs.positions)
    found = sketch.attend(inputs.full, q, k, v, index=index, sliding=False, out=None)
    return sketch.linear("attn_output", graph.mul(found, graph.unary(gate)))
