"""Layers between residual streams with gates of low rank, and embeddings of token sequences (Qwen 4)."""

from __future__ import annotations

from dataclasses import dataclass

from engine.memory.compute_graph.building.sketch import Sketch
from engine.memory.compute_graph.ggml.graph import Tensor
from engine.memory.compute_graph.ggml.scheduler import HOST
from engine.memory.compute_graph.models.hyper_connections import open_streams
from engine.memory.compute_graph.models.recurrent import States
from engine.memory.compute_graph.models.transformer import feed_forward


@dataclass(frozen=True, slots=True)
class _Hashed:
    """Embeddings of hashed sequences."""

    embeddings: Tensor


def open_hashed(sketch: Sketch, current: Tensor) -> Tensor:
    """Return the embeddings once for each stream; those of hashed sequences are for layers that want them."""
    if "per_layer_token_embd" in sketch.outer:
        graph, n_tokens = sketch.graph, current.ne[1]
        table = sketch.outer_weight(sketch.outer["per_layer_token_embd"], HOST)
        rows = graph.new_input("i32", sketch.numbers.hashes * n_tokens)
        found = graph.get_rows(table, rows)
        joined = graph.reshape(found, found.ne[0] * sketch.numbers.hashes, n_tokens)
        sketch.shared.put(_Hashed(graph.expand(joined)))
    return open_streams(sketch, current)


def wide_layer(sketch: Sketch, previous: Tensor) -> Tensor:
    """Return the streams behind a layer, whose two parts read their gated mean and give back to each."""
    graph, streams = sketch.graph, previous
    if sketch.has("ple_key"):
        streams = _with_hashed(sketch, streams)
    one, gives = _read(sketch, streams, "attn")
    current = sketch.mixed(graph.expand(one))
    if sketch.layer.is_last:
        n_embd, count, n_tokens, _ = streams.ne
        current, gives = (graph.get_rows(part, sketch.inputs.output_rows) for part in (current, gives))
        flat = graph.get_rows(graph.reshape(streams, n_embd * count, n_tokens), sketch.inputs.output_rows)
        streams = graph.reshape(flat, n_embd, count, flat.ne[1])
    streams = _given_back(sketch, streams, current, gives)
    one, gives = _read(sketch, streams, "ffn")
    streams = _given_back(sketch, streams, feed_forward(sketch, one), gives)
    streams.backend = sketch.layer.backend
    return streams


def gated_end(sketch: Sketch, streams: Tensor) -> Tensor:
    """Return the gated mean of the streams."""
    norm, down, up = (
        sketch.outer_weight(sketch.outer[f"output_hc_{part}"], sketch.inputs.output) for part in ("norm", "down", "up")
    )
    flat, gate = _gate(sketch, streams, norm, down, up)
    return _mean(sketch, streams, flat, gate)


def _gate(sketch: Sketch, streams: Tensor, norm: Tensor, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    graph = sketch.graph
    normed = graph.mul(sketch.raw_norm(streams), norm)
    flat = graph.reshape(normed, streams.ne[0] * streams.ne[1], streams.ne[2])
    return flat, graph.mul_mat(up, graph.unary(graph.scale(graph.mul_mat(down, flat))))


def _mean(sketch: Sketch, streams: Tensor, flat: Tensor, gate: Tensor) -> Tensor:
    graph, (n_embd, count, n_tokens, _) = sketch.graph, streams.ne
    behind = graph.reshape(graph.mul(flat, graph.unary(gate)), n_embd, count, n_tokens)
    total = graph.cont(graph.view(behind, (n_embd, n_tokens), (0, behind.nb[2])))
    for _ in range(1, count):
        total = graph.add(total, graph.view(behind, (n_embd, n_tokens), (0, behind.nb[2])))
    return graph.scale(total)


def _read(sketch: Sketch, streams: Tensor, part: str) -> tuple[Tensor, Tensor]:
    """Return what a part of a layer reads, and what each stream gets of its result."""
    graph, (n_embd, count, n_tokens, _) = sketch.graph, streams.ne
    flat, gate = _gate(sketch, streams, *(sketch.weight(f"hc_{part}_{stem}") for stem in ("norm", "down", "up")))
    if sketch.fuses("hc_pre"):
        both = (graph.reshape(each, n_embd, count, n_tokens) for each in (flat, gate))
        one = sketch.fused("hc_pre", (n_embd, n_tokens), *both)
    else:
        one = _mean(sketch, streams, flat, gate)
    return one, graph.mul_mat(sketch.weight(f"hc_{part}_inject"), flat)


def _given_back(sketch: Sketch, streams: Tensor, current: Tensor, gives: Tensor) -> Tensor:
    graph, (n_embd, count, n_tokens, _) = sketch.graph, streams.ne
    shares = graph.scale(graph.unary(graph.scale(gives)))
    if sketch.fuses("hc_post"):
        return sketch.fused("hc_post", streams.ne, current, streams, shares)
    repeated = graph.repeat(graph.reshape(current, n_embd, 1, n_tokens), n_embd, count, n_tokens)
    return graph.add(streams, graph.mul(repeated, graph.reshape(shares, 1, count, n_tokens)))


def _with_hashed(sketch: Sketch, streams: Tensor) -> Tensor:
    """Return the streams with what the layer makes of the hashed embeddings: gated, and convolved over tokens."""
    graph, (n_embd, count, n_tokens, _) = sketch.graph, streams.ne
    hashed = sketch.shared.get(_Hashed).embeddings
    key, value = (graph.mul_mat(sketch.weight(stem), hashed) for stem in ("ple_key", "ple_value"))
    key = _normed(sketch, graph.reshape(key, *streams.ne[:3]), "key")
    score = graph.scale(graph.sum_rows(graph.mul(key, _normed(sketch, streams, "query"))))
    size = graph.like("sqrt", graph.like("clamp", graph.unary(score)))
    gate = graph.unary(graph.mul(graph.unary(score), size))
    repeated = graph.repeat(graph.reshape(value, n_embd, 1, n_tokens), n_embd, count, n_tokens)
    gated = graph.mul(repeated, gate)
    convolved = graph.unary(_convolved(sketch, graph.reshape(gated, n_embd * count, n_tokens), streams))
    convolved = graph.reshape(graph.cont(convolved), *streams.ne[:3])
    return graph.add(streams, graph.add(gated, convolved))


def _normed(sketch: Sketch, streams: Tensor, stem: str) -> Tensor:
    return sketch.graph.mul(sketch.raw_norm(streams), sketch.weight(f"ple_norm_{stem}"))


def _convolved(sketch: Sketch, source: Tensor, streams: Tensor) -> Tensor:
    """Return a convolution over tokens some way apart, as a sum of shifted copies."""
    graph, batch = sketch.graph, sketch.batch
    tokens, sequences, (wide, n_tokens) = batch.sequence_tokens, batch.n_sequences, source.ne[:2]
    normed = _normed(sketch, graph.reshape(source, *streams.ne[:3]), "conv")
    normed = graph.reshape(graph.reshape(normed, wide, n_tokens), wide, tokens, sequences)
    taps = sketch.layer.weights["ple_conv1d"].ne[0]
    kept = (taps - 1) * sketch.numbers.hashed_tokens
    states = States(sketch)
    hashed = states.of_width(kept * wide)
    window = graph.concat(graph.reshape(states.read(hashed), kept, wide, sequences), graph.transpose(normed), 0)
    states.write(hashed, graph.cont(graph.view(window, (kept, wide, sequences), window.nb)))
    total = None
    for _ in range(taps):
        shifted = graph.cont(graph.transpose(graph.view(window, (tokens, wide, sequences), window.nb)))
        term = graph.mul(shifted, _tap(sketch, wide))
        total = term if total is None else graph.add(total, term)
    assert total is not None
    return total


def _tap(sketch: Sketch, wide: int) -> Tensor:
    """Return one factor for each channel, as floating point numbers of full size."""
    graph, half = sketch.graph, sketch.layer.weights["ple_conv1d"].type_name != "F32"
    column = graph.view(sketch.weight("ple_conv1d"), (1, wide))
    column = graph.reshape(graph.new("cont", column.ne, column, type_name="f16" if half else "f32"), wide)
    return graph.cast(column, "f32") if half else column
