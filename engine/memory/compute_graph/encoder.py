"""Layers of BERT and its kin: norms come behind the sums with the residual."""

from __future__ import annotations

from engine.memory.compute_graph.graph import Tensor
from engine.memory.compute_graph.sketch import Sketch
from engine.memory.compute_graph.transformer import Inputs, Mixer, Style, attention, feed_forward


def post_norm_layer(
    sketch: Sketch, style: Style, inputs: Inputs, index: int, previous: Tensor, mixer: Mixer = attention
) -> Tensor:
    """Return the output of one layer."""
    graph = sketch.graph
    current, residual = mixer(sketch, style, inputs, index, previous), previous
    if sketch.layer.is_last:
        current = graph.get_rows(current, inputs.output_rows)
        residual = graph.get_rows(residual, inputs.output_rows)
    current = sketch.norm(graph.add(current, residual), "attn_output_norm", layer_norm=style.layer_norm)
    if sketch.has("attn_norm_2"):
        current = sketch.norm(graph.add(current, residual), "attn_norm_2", layer_norm=style.layer_norm)
    joined = graph.add(feed_forward(sketch, style, current), current)
    return sketch.norm(joined, "layer_output_norm", layer_norm=style.layer_norm)
