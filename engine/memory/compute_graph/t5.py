"""Layers of T5: a bias by distance on attention, and in the decoder attention to what the encoder made of a text."""

from __future__ import annotations

from engine.memory.compute_graph.graph import Tensor
from engine.memory.compute_graph.sketch import Sketch
from engine.memory.compute_graph.transformer import Inputs, Mixer, Style, attention

_ENCODED, _CROSS_MASK, _BUCKETS, _BIAS = "encoded", "cross mask", "buckets", "bias"


def open_decoder(sketch: Sketch, inputs: Inputs, current: Tensor) -> Tensor:
    """Make the decoder's inputs: an encoded text of the longest length, its mask, and distances; return `current`."""
    batch, numbers, new = sketch.batch, sketch.numbers, sketch.graph.new_input
    sketch.shared[_ENCODED] = new("f32", numbers.n_embd, numbers.n_ctx_train)
    sketch.shared[_CROSS_MASK] = new("f16" if batch.flash else "f32", numbers.n_ctx_train, batch.n_tokens)
    sketch.shared[_BUCKETS] = new("i32", batch.n_cells, batch.n_tokens)
    return current


def open_encoder(sketch: Sketch, inputs: Inputs, current: Tensor) -> Tensor:
    """Make the encoder's inputs: a mask of the batch against itself, and distances in it; return `current`."""
    sketch.shared[_CROSS_MASK] = sketch.batch_mask().mask
    sketch.shared[_BUCKETS] = sketch.graph.new_input("i32", sketch.batch.n_tokens, sketch.batch.n_tokens)
    return current


def t5_decoder_layer(
    sketch: Sketch, style: Style, inputs: Inputs, index: int, previous: Tensor, mixer: Mixer = attention
) -> Tensor:
    """Return the output of a layer that attends to the cache, then to the encoded text."""
    graph, encoded = sketch.graph, sketch.shared[_ENCODED]
    q, k, v = _projections(sketch, "attn", *[sketch.norm(previous, "attn_norm")] * 3)
    bias = _bias(sketch, index)
    found = sketch.attend(inputs.full, q, k, v, index=index, sliding=False, bias=bias, out="attn_o")
    joined = graph.add(found, previous)
    normed = sketch.norm(joined, "cross_attn_norm")
    q, k, v = _projections(sketch, "cross_attn", normed, encoded, encoded)
    for part in (q, k, v):
        graph.expand(part)
    current = sketch.linear("cross_attn_o", sketch.mix(q, k, v, sketch.shared[_CROSS_MASK]))
    return _feed_forward(sketch, inputs, current, joined)


def t5_encoder_layer(
    sketch: Sketch, style: Style, inputs: Inputs, index: int, previous: Tensor, mixer: Mixer = attention
) -> Tensor:
    """Return the output of a layer that attends to the batch alone."""
    graph = sketch.graph
    q, k, v = _projections(sketch, "attn", *[sketch.norm(previous, "attn_norm")] * 3)
    bias = _bias(sketch, index)
    for part in (q, k, v):
        graph.expand(part)
    found = sketch.mix(q, k, v, sketch.shared[_CROSS_MASK], bias=bias)
    return _feed_forward(sketch, inputs, sketch.linear("attn_o", found), previous)


def _projections(sketch: Sketch, name: str, *sources: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of one source each."""
    graph, numbers = sketch.graph, sketch.layer.numbers
    heads = ((numbers.head_k, numbers.n_head), (numbers.head_k, numbers.n_head_kv), (numbers.head_v, numbers.n_head_kv))
    parts = []
    for letter, (head, count), source in zip("qkv", heads, sources, strict=True):
        part = graph.mul_mat(sketch.weight(f"{name}_{letter}"), source)
        if part.ne[0] != head * count:
            raise ValueError(f"{name}_{letter} has {part.ne[0]} rows for {count} heads of {head}")
        parts.append(graph.reshape(part, head, count, source.ne[1]))
    return parts[0], parts[1], parts[2]


def _bias(sketch: Sketch, index: int) -> Tensor:
    """Return what distances add to attention, by the layer's own table or the first one's."""
    graph, buckets = sketch.graph, sketch.shared[_BUCKETS]
    if index == 0 or sketch.has("attn_rel_b"):
        table = sketch.weight("attn_rel_b")
        if index == 0:
            sketch.shared[_BIAS] = table
    else:
        table = sketch.shared[_BIAS]
    rows = graph.get_rows(table, graph.reshape(buckets, buckets.ne[0] * buckets.ne[1]))
    rows = graph.reshape(rows, rows.ne[0], *buckets.ne[:2])
    return graph.cont(graph.permute(rows, 2, 0, 1, 3))


def _feed_forward(sketch: Sketch, inputs: Inputs, current: Tensor, residual: Tensor) -> Tensor:
    graph = sketch.graph
    if sketch.layer.is_last:
        current = graph.get_rows(current, inputs.output_rows)
        residual = graph.get_rows(residual, inputs.output_rows)
    joined = graph.add(current, residual)
    return graph.add(sketch.feed_forward(sketch.norm(joined, "ffn_norm")), joined)
