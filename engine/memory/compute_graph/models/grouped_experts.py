"""Experts whose small companions in each group work on what they return (GroveMoE)."""

from __future__ import annotations

from engine.memory.compute_graph.building.sketch import Sketch
from engine.memory.compute_graph.ggml.graph import Tensor
from engine.memory.compute_graph.models.experts import normalised, weighted_sum


def grouped_experts_layer(sketch: Sketch, previous: Tensor) -> Tensor:
    """Return attention, then experts and, of each chosen one's group, the companion."""
    graph = sketch.graph
    current = sketch.mixed(sketch.norm(previous, "attn_norm"))
    residual = previous
    if sketch.layer.is_last:
        current, residual = (graph.get_rows(tensor, sketch.inputs.output_rows) for tensor in (current, previous))
    joined = graph.add(current, residual)
    normed = sketch.norm(joined, "ffn_norm")
    logits = sketch.linear("ffn_gate_inp", normed)
    found = _experts(sketch, normed, logits, "exps")
    companions = _experts(sketch, found, logits, "chexps")
    return graph.add(graph.add(found, graph.scale(companions)), joined)


def _experts(sketch: Sketch, source: Tensor, logits: Tensor, kind: str) -> Tensor:
    graph, (n_all, n_tokens) = sketch.graph, logits.ne[:2]
    n_experts = sketch.layer.weights[f"ffn_down_{kind}"].ne[2]
    odds = graph.like("soft_max", logits)
    chosen = graph.top_k(graph.unary(logits), min(sketch.layer.numbers.n_experts_used, n_experts))
    if n_experts != n_all:
        # The number of an expert becomes that of its group, by way of a division of floating point numbers.
        chosen = graph.cast(graph.scale(graph.cast(chosen, "f32")), "i32")
    rows = normalised(sketch, graph.get_rows(graph.reshape(odds, 1, n_all, n_tokens), chosen))
    if sketch.numbers.scales_experts:
        rows = graph.scale(rows)
    graph.expand(rows)
    return weighted_sum(sketch, graph.reshape(source, source.ne[0], 1, n_tokens), chosen, rows, kind=kind)
