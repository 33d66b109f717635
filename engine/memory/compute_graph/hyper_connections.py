"""Layers between several residual streams, which each part reads as one and is given back to (hyper-connections)."""

from __future__ import annotations

from engine.memory.compute_graph.graph import Tensor
from engine.memory.compute_graph.sketch import Sketch
from engine.memory.compute_graph.transformer import Inputs, Mixer, Style, attention, feed_forward


def open_streams(sketch: Sketch, current: Tensor) -> Tensor:
    """Return the embeddings once for each stream: (embedding, streams, tokens)."""
    graph, (n_embd, n_tokens) = sketch.graph, current.ne[:2]
    return graph.repeat(graph.reshape(current, n_embd, 1, n_tokens), n_embd, sketch.numbers.n_streams, n_tokens)


def close_streams(sketch: Sketch, inputs: Inputs, output: str, streams: Tensor) -> Tensor:
    """Return the wanted rows of all streams as one."""
    graph, (n_embd, count, n_tokens, _) = sketch.graph, streams.ne
    flat = graph.get_rows(graph.reshape(streams, n_embd * count, n_tokens), inputs.output_rows)
    streams = graph.reshape(flat, n_embd, count, flat.ne[1])
    function, scale, base = (
        sketch.outer_weight(sketch.outer[f"output_hc_{stem}"], output) for stem in ("fn", "scale", "base")
    )
    shares = graph.mul_mat(function, sketch.raw_norm(flat))
    shares = graph.scale(graph.unary(graph.add(graph.mul(shares, scale), base)))
    return _mixed(sketch, streams, shares)


def connected_layer(
    sketch: Sketch, style: Style, inputs: Inputs, index: int, previous: Tensor, mixer: Mixer = attention
) -> Tensor:
    """Return the streams behind a layer, whose two parts are read and given back one after the other (Hunyuan 4)."""
    current, shares = _one_of(sketch, previous, "attn")
    current = mixer(sketch, style, inputs, index, sketch.norm(current, "attn_norm"))
    joined = _given_back(sketch, current, previous, shares)
    current, shares = _one_of(sketch, joined, "ffn")
    current = feed_forward(sketch, style, sketch.norm(current, "ffn_norm"))
    return _given_back(sketch, current, joined, shares)


def _one_of(sketch: Sketch, streams: Tensor, part: str) -> tuple[Tensor, Tensor]:
    """Return the mean of the streams that a part of the layer reads, and the shares that they get of its result."""
    graph, (n_embd, count, n_tokens, _) = sketch.graph, streams.ne
    flat = graph.reshape(streams, n_embd * count, n_tokens)
    mixes = graph.mul_mat(sketch.weight(f"hc_{part}_fn"), sketch.raw_norm(flat))
    scale, base = sketch.weight(f"hc_{part}_scale"), sketch.weight(f"hc_{part}_base")

    def gate() -> Tensor:
        found = graph.mul(graph.view(mixes, (count, n_tokens), mixes.nb), graph.view(scale, (1,)))
        return graph.scale(graph.unary(graph.add(found, graph.view(base, (count,)))))

    shares = graph.scale(gate())
    return _mixed(sketch, streams, gate()), shares


def _mixed(sketch: Sketch, streams: Tensor, shares: Tensor) -> Tensor:
    """Return the sum of the streams, each weighted with its share."""
    graph, (n_embd, count, n_tokens, _) = sketch.graph, streams.ne
    copy = graph.cast(streams, "f32")
    total: Tensor | None = None
    for _ in range(count):
        stream = graph.view(copy, (n_embd, n_tokens), (0, copy.nb[2]))
        weighted = graph.mul(stream, graph.view(shares, (1, n_tokens), shares.nb))
        total = weighted if total is None else graph.add(total, weighted)
    assert total is not None
    return graph.cast(total, "f32")


def _given_back(sketch: Sketch, current: Tensor, streams: Tensor, shares: Tensor) -> Tensor:
    """Return the streams with their shares of `current` added."""
    graph, (n_embd, count, n_tokens, _) = sketch.graph, streams.ne
    current, shares, streams = (graph.cast(source, "f32") for source in (current, shares, streams))
    joined: Tensor | None = None
    for _ in range(count):
        stream = graph.view(streams, (n_embd, n_tokens), (0, streams.nb[2]))
        share = graph.mul(current, graph.view(shares, (1, n_tokens), shares.nb))
        total = graph.reshape(graph.add(stream, share), n_embd, 1, n_tokens)
        joined = total if joined is None else graph.concat(joined, total, 1)
    assert joined is not None
    return graph.cast(joined, "f32")
