"""Layers with linear attention that decays by position (MiniMax 01)."""

from __future__ import annotations

from engine.memory.compute_graph.building.sketch import Sketch
from engine.memory.compute_graph.ggml.graph import Tensor
from engine.memory.compute_graph.models.recurrent import States
from engine.memory.compute_graph.models.transformer import feed_forward


def lightning_layer(sketch: Sketch, previous: Tensor) -> Tensor:
    """Return the output of a layer whose residuals are its scaled norms."""
    graph = sketch.graph
    normed = sketch.norm(previous, "attn_norm")
    current = sketch.mixed(normed)
    if sketch.layer.is_last:
        current, normed = (graph.get_rows(tensor, sketch.inputs.output_rows) for tensor in (current, normed))
    normed = sketch.norm(graph.add(current, graph.scale(normed)), "ffn_norm")
    return graph.add(feed_forward(sketch, normed), graph.scale(normed))


def lightning_attention(sketch: Sketch, current: Tensor) -> Tensor:
    """Return linear attention: to the tokens of the batch by their distance, to those before by a state."""
    graph, batch, numbers = sketch.graph, sketch.batch, sketch.layer.numbers
    tokens, sequences = batch.sequence_tokens, batch.n_sequences
    heads, head = numbers.n_head, numbers.head_k
    slopes = sketch.shared_input("slopes", heads)
    states = States(sketch)
    states.read(states.rolling)  # It has no size, and the engine reads it all the same.
    current = graph.reshape(current, current.ne[0], tokens, 1, sequences)
    joined = graph.unary(sketch.linear("attn_qkv", current))
    joined = graph.reshape(joined, 3 * head, heads, tokens, sequences)
    q, k, v = (graph.view(joined, (head, heads, tokens, sequences), joined.nb) for _ in range(3))
    before = graph.reshape(states.read(states.recurrent), head, head, heads, sequences)

    by_position = (1, heads, tokens, sequences)
    distant = graph.mul(q, _decay(sketch, "q_decay", *by_position))
    distant = graph.mul_mat(before, graph.permute(distant, 0, 2, 1, 3))
    near = graph.mul_mat(graph.permute(k, 0, 2, 1, 3), graph.permute(q, 0, 2, 1, 3))
    near = graph.mul(near, _decay(sketch, "distance_decay", tokens, tokens, heads, sequences))
    v = graph.cont(graph.permute(v, 1, 2, 0, 3))
    found = graph.expand(graph.add(distant, graph.mul_mat(v, near)))

    block_decay = graph.unary(graph.scale(graph.scale(slopes)))
    before = graph.mul(before, graph.reshape(block_decay, 1, 1, heads))
    k = graph.mul(k, _decay(sketch, "k_decay", *by_position))
    added = graph.mul_mat(graph.cont(graph.permute(k, 1, 2, 0, 3)), v)
    states.write(states.recurrent, graph.add(before, added))

    found = graph.cont(graph.permute(found, 0, 2, 1, 3))
    found = sketch.norm(graph.reshape(found, head * heads, tokens, 1, sequences), "attn_norm_2")
    found = graph.mul(graph.unary(sketch.linear("attn_gate", current)), found)
    found = sketch.linear("attn_output", found)
    return graph.reshape(found, found.ne[0], batch.n_tokens)


def _decay(sketch: Sketch, name: str, *ne: int) -> Tensor:
    """Return factors that each layer makes of an input."""
    return sketch.graph.unary(sketch.graph.scale(sketch.shared_input(name, *ne)))
