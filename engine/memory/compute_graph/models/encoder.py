"""Layers of BERT and its kin: norms come behind the sums with the residual."""

from __future__ import annotations

from engine.memory.compute_graph.building.sketch import Sketch
from engine.memory.compute_graph.ggml.graph import Tensor
from engine.memory.compute_graph.models.transformer import feed_forward


def post_norm_layer(sketch: Sketch, previous: Tensor) -> Tensor:
    """Return the output of one layer."""
    graph = sketch.graph
    current, residual = sketch.mixed(previous), previous
    if sketch.layer.is_last:
        current = graph.get_rows(current, sketch.inputs.output_rows)
        residual = graph.get_rows(residual, sketch.inputs.output_rows)
    current = sketch.norm(graph.add(current, residual), "attn_output_norm", layer_norm=sketch.style.layer_norm)
    if sketch.has("attn_norm_2"):
        current = sketch.norm(graph.add(current, residual), "attn_norm_2", layer_norm=sketch.style.layer_norm)
    joined = graph.add(feed_forward(sketch, current), current)
    return sketch.norm(joined, "layer_output_norm", layer_norm=sketch.style.layer_norm)
