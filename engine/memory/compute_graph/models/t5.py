"""Layers of T5: a bias by distance on attention, and in the decoder attention to what the encoder made of a text."""

from __future__ import annotations

from dataclasses import dataclass

from engine.memory.compute_graph.building.attention import attend, batch_mask, mix_values
from engine.memory.compute_graph.building.context import Masks, Sketch
from engine.memory.compute_graph.ggml.graph import Tensor


@dataclass(frozen=True, slots=True)
class _Encoded:
    """What the encoder made of a text of the longest length, and the mask of attention to it."""

    text: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class _Distances:
    """Numbers of the distances between tokens."""

    buckets: Tensor


@dataclass(frozen=True, slots=True)
class _FirstTable:
    """The first layer's biases by distance, for layers that have none of their own."""

    biases: Tensor


def open_decoder(sketch: Sketch, current: Tensor) -> Tensor:
    """Make the decoder's inputs: an encoded text of the longest length, its mask, and distances; return `current`."""
    batch, numbers, new = sketch.batch, sketch.numbers, sketch.graph.new_input
    sketch.shared.put(
        _Encoded(
            text=new("f32", numbers.n_embd, numbers.n_ctx_train),
            mask=new("f16" if batch.flash else "f32", numbers.n_ctx_train, batch.n_tokens),
        )
    )
    sketch.shared.put(_Distances(new("i32", batch.n_cells, batch.n_tokens)))
    return current


def open_encoder(sketch: Sketch, current: Tensor) -> Tensor:
    """Make the encoder's inputs: a mask of the batch against itself, and distances in it; return `current`."""
    sketch.shared.put(batch_mask(sketch))
    sketch.shared.put(_Distances(sketch.graph.new_input("i32", sketch.batch.n_tokens, sketch.batch.n_tokens)))
    return current


def t5_decoder_layer(sketch: Sketch, previous: Tensor) -> Tensor:
    """Return the output of a layer that attends to the cache, then to the encoded text."""
    graph, encoded = sketch.graph, sketch.shared.get(_Encoded)
    q, k, v = _projections(sketch, "attn", *[sketch.norm(previous, "attn_norm")] * 3)
    bias = _bias(sketch)
    found = attend(sketch, sketch.inputs.full, q, k, v, sliding=False, bias=bias, out="attn_o")
    joined = graph.add(found, previous)
    normed = sketch.norm(joined, "cross_attn_norm")
    q, k, v = _projections(sketch, "cross_attn", normed, encoded.text, encoded.text)
    for part in (q, k, v):
        graph.expand(part)
    current = sketch.linear("cross_attn_o", mix_values(sketch, q, k, v, encoded.mask))
    return _feed_forward(sketch, current, joined)


def t5_encoder_layer(sketch: Sketch, previous: Tensor) -> Tensor:
    """Return the output of a layer that attends to the batch alone."""
    graph = sketch.graph
    q, k, v = _projections(sketch, "attn", *[sketch.norm(previous, "attn_norm")] * 3)
    bias = _bias(sketch)
    for part in (q, k, v):
        graph.expand(part)
    found = mix_values(sketch, q, k, v, sketch.shared.get(Masks).mask, bias=bias)
    return _feed_forward(sketch, sketch.linear("attn_o", found), previous)


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


def _bias(sketch: Sketch) -> Tensor:
    """Return what distances add to attention, by the layer's own table or the first one's."""
    graph, buckets = sketch.graph, sketch.shared.get(_Distances).buckets
    if sketch.place == 0 or sketch.has("attn_rel_b"):
        table = sketch.weight("attn_rel_b")
        if sketch.place == 0:
            sketch.shared.put(_FirstTable(table))
    else:
        table = sketch.shared.get(_FirstTable).biases
    rows = graph.get_rows(table, graph.reshape(buckets, buckets.ne[0] * buckets.ne[1]))
    rows = graph.reshape(rows, rows.ne[0], *buckets.ne[:2])
    return graph.cont(graph.permute(rows, 2, 0, 1, 3))


def _feed_forward(sketch: Sketch, current: Tensor, residual: Tensor) -> Tensor:
    graph = sketch.graph
    if sketch.layer.is_last:
        current = graph.get_rows(current, sketch.inputs.output_rows)
        residual = graph.get_rows(residual, sketch.inputs.output_rows)
    joined = graph.add(current, residual)
    return graph.add(sketch.feed_forward(sketch.norm(joined, "ffn_norm")), joined)
