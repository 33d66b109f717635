"""Layers of Gemma 4: shared caches, embeddings for each layer, experts beside a dense part."""

from __future__ import annotations

from engine.memory.compute_graph.building.sketch import Sketch
from engine.memory.compute_graph.ggml.graph import Tensor
from engine.memory.compute_graph.models.experts import experts
from engine.memory.compute_graph.models.shared_cache import (
    gated_layer_input,
    has_layer_inputs,
    make_layer_inputs,
)


def gemma4_layer(sketch: Sketch, previous: Tensor) -> Tensor:
    """Return the output of one layer."""
    graph = sketch.graph
    if sketch.place == 0:
        make_layer_inputs(sketch, previous)
    attended = sketch.mixed(sketch.norm(previous, "attn_norm"))
    joined = graph.add(sketch.norm(attended, "post_attention_norm"), previous)
    current = sketch.feed_forward(sketch.norm(joined, "ffn_norm"))
    if sketch.has("ffn_gate_inp"):
        current = graph.add(sketch.norm(current, "post_ffw_norm_1"), _routed(sketch, joined))
    current = graph.add(sketch.norm(current, "post_ffw_norm", pin=False), joined)
    if has_layer_inputs(sketch):
        current = graph.add(current, gated_layer_input(sketch, current))
    if sketch.has("layer_output_scale"):
        current = graph.mul(current, sketch.weight("layer_output_scale"))
    return current


def _routed(sketch: Sketch, joined: Tensor) -> Tensor:
    """Return what the experts make of attention's output, which the router sees with a norm and scale of its own."""
    graph = sketch.graph
    narrow = sketch.norm(joined, "pre_ffw_norm_2")
    routed = graph.mul(graph.scale(sketch.raw_norm(joined)), sketch.weight("ffn_gate_inp.scale"))
    logits = graph.mul_mat(sketch.weight("ffn_gate_inp"), routed)
    return sketch.norm(experts(sketch, narrow, logits=logits, normalise=True), "post_ffw_norm_2")
