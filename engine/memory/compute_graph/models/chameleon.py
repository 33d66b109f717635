"""Layers of Chameleon: queries and keys with norms of their own for each head, and no image tokens in its answers."""

from __future__ import annotations

from engine.memory.compute_graph.building.attend import attend, projections
from engine.memory.compute_graph.building.sketch import Sketch
from engine.memory.compute_graph.ggml.graph import Tensor
from engine.memory.compute_graph.models.transformer import feed_forward

_IMAGE_TOKENS = 8192
"""How many tokens stand for parts of images: those from 4 to 8195."""


def head_norm_attention(sketch: Sketch, current: Tensor) -> Tensor:
    """Return attention whose queries and keys are normalised around their mean."""
    q, k, v = projections(sketch, current)
    if sketch.has("attn_q_norm"):
        q = sketch.norm(q, "attn_q_norm", layer_norm=True)
    if sketch.has("attn_k_norm"):
        k = sketch.norm(k, "attn_k_norm", layer_norm=True)
    q, k = sketch.rope(q, sketch.inputs.positions), sketch.rope(k, sketch.inputs.positions)
    return attend(sketch, sketch.inputs.full, q, k, v, sliding=False)


def chameleon_layer(sketch: Sketch, previous: Tensor) -> Tensor:
    """Return the output of a layer whose norms stand before its two parts or behind them."""
    graph, behind = sketch.graph, sketch.style.norms_behind
    current, residual = sketch.mixed(previous if behind else sketch.norm(previous, "attn_norm")), previous
    if sketch.layer.is_last:
        current, residual = (graph.get_rows(tensor, sketch.inputs.output_rows) for tensor in (current, previous))
    if behind:
        current = sketch.norm(current, "attn_norm")
    joined = graph.add(current, residual)
    # Where norms stand behind, the feed-forward part reads what attention made, without the residual.
    current = feed_forward(sketch, current if behind else sketch.norm(joined, "ffn_norm"))
    if behind:
        current = sketch.norm(current, "ffn_norm")
    return graph.add(current, joined)


def without_images(sketch: Sketch, logits: Tensor) -> Tensor:
    """Return a copy of the logits in which image tokens are out of reach."""
    graph = sketch.graph
    out_of_reach = graph.write("clamp", graph.scratch("f32", _IMAGE_TOKENS))
    return graph.like("set", logits, out_of_reach)
