"""Layers of single architectures that no style describes."""

from __future__ import annotations

from engine.memory.compute_graph.building.sketch import Sketch
from engine.memory.compute_graph.ggml.graph import Tensor
from engine.memory.compute_graph.models.transformer import attention, decoder_layer, feed_forward


def _pick(sketch: Sketch, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the wanted rows of tensors in the last layer, the tensors themselves in others."""
    if not sketch.layer.is_last:
        return tensors
    return tuple(sketch.graph.get_rows(tensor, sketch.inputs.output_rows) for tensor in tensors)


def grok_layer(sketch: Sketch, previous: Tensor) -> Tensor:
    """Return a layer whose experts stand beside a dense part, all with norms behind them."""
    graph = sketch.graph
    current = sketch.mixed(sketch.norm(previous, "attn_norm"))
    current, residual = _pick(sketch, current, previous)
    joined = graph.add(sketch.norm(current, "attn_output_norm"), residual)
    normed = sketch.norm(joined, "ffn_norm")
    current = feed_forward(sketch, normed)
    if sketch.has("ffn_up"):
        current = graph.scale(graph.add(sketch.feed_forward(normed), current))
    return graph.add(sketch.norm(current, "post_ffw_norm", "layer_output_norm"), joined)


def arctic_layer(sketch: Sketch, previous: Tensor) -> Tensor:
    """Return a layer whose experts read the layer's input, beside a dense part behind attention."""
    graph = sketch.graph
    current = sketch.mixed(sketch.norm(previous, "attn_norm"))
    current, residual = _pick(sketch, current, previous)
    joined = graph.add(current, residual)
    dense = graph.add(sketch.feed_forward(sketch.norm(joined, "ffn_norm")), joined)
    return graph.add(feed_forward(sketch, sketch.norm(residual, "ffn_norm_exps")), dense)


def parallel_hybrid_layer(sketch: Sketch, previous: Tensor) -> Tensor:
    """Return a layer with attention and a recurrent scan side by side (Falcon H1)."""
    graph = sketch.graph
    attended = attention(sketch, sketch.norm(previous, "attn_norm"))
    scanned = sketch.mixed(sketch.norm(previous, "attn_norm"))
    joined = graph.add(graph.add(attended, scanned), previous)
    (joined,) = _pick(sketch, joined)
    return graph.add(sketch.feed_forward(sketch.norm(joined, "ffn_norm")), joined)


def skipping_layer(sketch: Sketch, previous: Tensor) -> Tensor:
    """Return a layer that adds the scaled embeddings to its output (Talkie)."""
    graph = sketch.graph
    current = sketch.mixed(sketch.raw_norm(previous))
    current, residual, embeddings = _pick(sketch, current, previous, sketch.inputs.embeddings)
    joined = graph.add(current, residual)
    current = graph.add(sketch.feed_forward(sketch.raw_norm(joined)), joined)
    return graph.add(current, graph.mul(embeddings, sketch.weight("layer_output_scale")))


def uneven_layer(sketch: Sketch, previous: Tensor) -> Tensor:
    """Return a layer whose attention may be a matrix or nothing at all (Nemotron 51B and its like). One without a
    feed-forward part hands on what it got: the engine leaves its attention out of the sum."""
    graph, numbers = sketch.graph, sketch.layer.numbers
    current = previous
    if numbers.n_head:
        current = sketch.norm(previous, "attn_norm")
        attends = numbers.n_head_kv > 0
        current = sketch.mixed(current) if attends else graph.mul_mat(sketch.weight("attn_output"), current)
    if not sketch.has("ffn_down"):
        return previous
    current, residual = _pick(sketch, current, previous)
    joined = graph.add(current, residual) if numbers.n_head else current
    return graph.add(sketch.feed_forward(sketch.norm(joined, "ffn_norm")), joined)


def input_adding_layer(sketch: Sketch, previous: Tensor) -> Tensor:
    """Return a layer that may add a part of the embeddings, meant for images, to its output (Qwen 3 VL)."""
    graph = sketch.graph
    current = decoder_layer(sketch, previous)
    if not sketch.layer.numbers.adds_input:
        return current
    stacked = sketch.inputs.embeddings
    return graph.add(current, graph.view(stacked, stacked.ne[:2], stacked.nb[:2]))
