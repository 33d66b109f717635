"""Layers between several residual streams, which each part reads as one and is given back to (hyper-connections)."""

from __future__ import annotations

from dataclasses import dataclass

from engine.memory.compute_graph.building.ends import Tokens
from engine.memory.compute_graph.building.sketch import Sketch
from engine.memory.compute_graph.ggml.graph import Tensor
from engine.memory.compute_graph.models.transformer import feed_forward


@dataclass(frozen=True, slots=True)
class Read:
    """What a part of a layer reads of all `streams`; what each `gives` it gets of the result, and how they are mixed
    on the way back, None where they are not."""

    streams: Tensor
    one: Tensor
    gives: Tensor
    mixing: Tensor | None


def open_streams(sketch: Sketch, current: Tensor) -> Tensor:
    """Return the embeddings once for each stream: (embedding, streams, tokens)."""
    graph, (n_embd, n_tokens) = sketch.graph, current.ne[:2]
    return graph.repeat(graph.reshape(current, n_embd, 1, n_tokens), n_embd, sketch.numbers.n_streams, n_tokens)


def weighted_end(sketch: Sketch, streams: Tensor) -> Tensor:
    """Return the wanted rows of all streams as one, each weighted with a share of its own."""
    return _weighted(sketch, *_shares_of_wanted(sketch, streams))


def copied_end(sketch: Sketch, streams: Tensor) -> Tensor:
    """Return the same, added up in a copy."""
    return _weighted_copy(sketch, *_shares_of_wanted(sketch, streams))


def mean_end(sketch: Sketch, streams: Tensor) -> Tensor:
    """Return the mean of the wanted rows of all streams."""
    graph, streams = sketch.graph, _wanted(sketch, streams)
    views = [_stream(sketch, streams) for _ in range(streams.ne[1])]
    total = views[0]
    for view in views[1:]:
        total = graph.add(total, view)
    return graph.scale(total)


def connected_layer(sketch: Sketch, previous: Tensor) -> Tensor:
    """Return the streams behind a layer, whose two parts are read and given back one after the other."""
    return _connected_layer(sketch, previous, pins=False)


def pinned_layer(sketch: Sketch, previous: Tensor) -> Tensor:
    """Return the same; the streams come before what the feed-forward part reads of them, and are made on the layer's
    device."""
    return _connected_layer(sketch, previous, pins=True)


def _connected_layer(sketch: Sketch, previous: Tensor, *, pins: bool) -> Tensor:
    read = _read(sketch, previous, "attn")
    joined = _given_back(sketch, read, sketch.mixed(sketch.norm(read.one, "attn_norm")))
    read = _read(sketch, joined, "ffn")
    if pins and read.mixing is not None:
        for part in (joined, read.gives, read.mixing):
            sketch.graph.expand(part)
    chosen = None
    if sketch.has("ffn_gate_tid2eid"):
        chosen = sketch.graph.get_rows(sketch.weight("ffn_gate_tid2eid"), sketch.shared.get(Tokens).ids)
    found = feed_forward(sketch, sketch.norm(read.one, "ffn_norm"), chosen=chosen)
    found = _given_back(sketch, read, found)
    if pins:
        found.backend = sketch.layer.backend
    return found


def _wanted(sketch: Sketch, streams: Tensor) -> Tensor:
    graph, (n_embd, count, n_tokens, _) = sketch.graph, streams.ne
    flat = graph.get_rows(graph.reshape(streams, n_embd * count, n_tokens), sketch.inputs.output_rows)
    return graph.reshape(flat, n_embd, count, flat.ne[1])


def _shares_of_wanted(sketch: Sketch, streams: Tensor) -> tuple[Tensor, Tensor]:
    graph, streams = sketch.graph, _wanted(sketch, streams)
    function, scale, base = (
        sketch.outer_weight(sketch.outer[f"output_hc_{stem}"], sketch.inputs.output) for stem in ("fn", "scale", "base")
    )
    shares = graph.mul_mat(function, sketch.raw_norm(_flat(sketch, streams)))
    return streams, graph.scale(graph.unary(graph.add(graph.mul(shares, scale), base)))


def _flat(sketch: Sketch, streams: Tensor) -> Tensor:
    return sketch.graph.reshape(streams, streams.ne[0] * streams.ne[1], streams.ne[2])


def _read(sketch: Sketch, streams: Tensor, part: str) -> Read:
    """Return the sum of the streams that a part of the layer reads, and what its result is given back with.

    Where the layer has weights for it the streams are mixed with each other on the way back.
    """
    graph, (_, count, n_tokens, _) = sketch.graph, streams.ne
    mixes = graph.mul_mat(sketch.weight(f"hc_{part}_fn"), sketch.raw_norm(_flat(sketch, streams)))
    scale, base = sketch.weight(f"hc_{part}_scale"), sketch.weight(f"hc_{part}_base")
    reads, gives = (
        graph.scale(graph.unary(_affine(sketch, graph.view(mixes, (count, n_tokens), mixes.nb), scale, base)))
        for _ in range(2)
    )
    if mixes.ne[0] == 2 * count:
        return Read(streams, _weighted_copy(sketch, streams, reads), graph.scale(gives), None)
    mixing = _mixing(sketch, mixes, scale, base, count)
    if sketch.fuses("hc_pre"):
        one = sketch.fused("hc_pre", (streams.ne[0], n_tokens), streams, reads)
    else:
        one = _weighted(sketch, streams, reads)
    return Read(streams, one, gives, mixing)


def _given_back(sketch: Sketch, read: Read, current: Tensor) -> Tensor:
    if read.mixing is None:
        return _added(sketch, current, read.streams, read.gives)
    return _mixed(sketch, current, read.streams, read.gives, read.mixing)


def _affine(sketch: Sketch, source: Tensor, scale: Tensor, base: Tensor) -> Tensor:
    graph = sketch.graph
    return graph.add(graph.mul(source, graph.view(scale, (1,))), graph.view(base, (source.ne[0],)))


def _stream(sketch: Sketch, streams: Tensor) -> Tensor:
    return sketch.graph.view(streams, (streams.ne[0], streams.ne[2]), (0, streams.nb[2]))


def _share(sketch: Sketch, shares: Tensor) -> Tensor:
    """Return the share of one stream for each token."""
    return sketch.graph.view(shares, (1, shares.ne[1]), shares.nb)


def _weighted(sketch: Sketch, streams: Tensor, shares: Tensor) -> Tensor:
    """Return the sum of the streams, each weighted with its share."""
    graph, count = sketch.graph, streams.ne[1]
    total = graph.mul(_stream(sketch, streams), _share(sketch, shares))
    for _ in range(1, count):
        total = graph.add(total, graph.mul(_stream(sketch, streams), _share(sketch, shares)))
    return total


def _weighted_copy(sketch: Sketch, streams: Tensor, shares: Tensor) -> Tensor:
    graph = sketch.graph
    return graph.cast(_weighted(sketch, graph.cast(streams, "f32"), shares), "f32")


def _added(sketch: Sketch, current: Tensor, streams: Tensor, shares: Tensor) -> Tensor:
    """Return the streams with their shares of `current` added."""
    graph, count = sketch.graph, streams.ne[1]
    current, shares, streams = (graph.cast(source, "f32") for source in (current, shares, streams))
    sums = [graph.add(_stream(sketch, streams), graph.mul(current, _share(sketch, shares))) for _ in range(count)]
    return graph.cast(_side_by_side(sketch, sums), "f32")


def _side_by_side(sketch: Sketch, parts: list[Tensor]) -> Tensor:
    """Return streams as one tensor."""
    graph = sketch.graph
    apart = [graph.reshape(part, part.ne[0], 1, part.ne[1]) for part in parts]
    joined = apart[0]
    for part in apart[1:]:
        joined = graph.concat(joined, part, 1)
    return joined


def _mixing(sketch: Sketch, mixes: Tensor, scale: Tensor, base: Tensor, count: int) -> Tensor:
    """Return how much of each stream goes to each other, with rows and columns that add up to 1."""
    graph, n_tokens = sketch.graph, mixes.ne[1]
    if sketch.fuses("hc_comb"):
        return sketch.fused("hc_comb", (count, count, n_tokens), mixes, scale, base)
    found = _affine(sketch, graph.view(mixes, (count * count, n_tokens), mixes.nb), scale, base)
    found = graph.like("soft_max", graph.reshape(found, count, count, n_tokens))
    least = graph.like("fill", graph.scratch("f32", 1))
    found = graph.add(found, least)
    for step in range(sketch.numbers.mixing_steps):
        if step:
            found = graph.like("div", found, graph.add(graph.sum_rows(found), least))
        columns = graph.sum_rows(graph.cont(graph.permute(found, 1, 0, 2, 3)))
        found = graph.like("div", found, graph.permute(graph.add(columns, least), 1, 0, 2, 3))
    return found


def _mixed(sketch: Sketch, current: Tensor, streams: Tensor, shares: Tensor, mixing: Tensor) -> Tensor:
    """Return the streams mixed with each other, with their shares of `current` added."""
    graph, count = sketch.graph, streams.ne[1]
    if sketch.fuses("hc_post"):
        return sketch.fused("hc_post", streams.ne, current, streams, shares, mixing)
    parts = []
    for _ in range(count):
        total = graph.mul(current, _share(sketch, shares))
        for _ in range(count):
            part = graph.view(mixing, (1, mixing.ne[2]), (0, mixing.nb[2]))
            total = graph.add(total, graph.mul(_stream(sketch, streams), part))
        parts.append(total)
    return _side_by_side(sketch, parts)
