"""Layers with adapters inside, of which a router picks one for each token (Granite Switch)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.memory.compute_graph.building.attend import attend
from engine.memory.compute_graph.building.ends import Tokens
from engine.memory.compute_graph.building.sketch import Sketch
from engine.memory.compute_graph.ggml.graph import Tensor
from engine.memory.compute_graph.ggml.scheduler import HOST

_ROUTER = -1
"""Place of the router's cache among those of the layers."""


@dataclass(frozen=True, slots=True)
class _Picked:
    """The adapter of each token."""

    ids: Tensor


def embed_substitutes(sketch: Sketch) -> Tensor:
    """Return the embeddings of tokens in which those that turn an adapter on have been replaced by others."""
    graph = sketch.graph
    tokens = Tokens(graph.new_input("i32", sketch.batch.n_tokens))
    current = graph.get_rows(sketch.outer_weight(sketch.outer["token_embd"], HOST), tokens.ids)
    return graph.scale(current) if sketch.numbers.scales_embeddings else current


def route(sketch: Sketch, current: Tensor) -> Tensor:
    """Pick an adapter for each token by attention with one head, whose cache lies behind the last layer's; return
    `current`."""
    graph, last, n_tokens = sketch.graph, sketch.inputs.last, sketch.batch.n_tokens
    numbers = replace(last.numbers, n_head=1, n_head_kv=1)
    sketch.enter(_ROUTER, replace(last, numbers=numbers, weights={}, is_last=False), _nothing)

    def lane(head: int) -> Tensor:
        signal = graph.reshape(graph.new_input("f32", n_tokens), 1, 1, n_tokens)
        return graph.new("pad", (head, 1, n_tokens), signal)

    k, v, q = lane(numbers.head_k), lane(numbers.head_v), lane(numbers.head_k)
    found = attend(sketch, sketch.inputs.full, q, k, v, sliding=False, out=None)
    found = graph.cont(graph.view(found, (1, n_tokens), (0, found.nb[1])))
    found = graph.unary(graph.like("clamp", graph.reshape(found, n_tokens)))
    sketch.shared.put(_Picked(graph.cast(found, "i32")))
    return current


def _nothing(sketch: Sketch, current: Tensor) -> Tensor:
    """Stand for the mixer of the router, which is no layer that tokens pass through."""
    return current


def switched_attention(sketch: Sketch, current: Tensor) -> Tensor:
    """Return attention whose projections are changed by each token's adapter."""
    graph, numbers, n_tokens = sketch.graph, sketch.layer.numbers, current.ne[1]
    joined = graph.mul_mat(sketch.weight("attn_qkv"), current)
    heads = ((numbers.head_k, numbers.n_head), (numbers.head_k, numbers.n_head_kv), (numbers.head_v, numbers.n_head_kv))
    parts = [graph.cont(graph.view(joined, (head * count, n_tokens), (0, joined.nb[1]))) for head, count in heads]
    q, k, v = (
        graph.reshape(graph.add(part, _change(sketch, f"attn_{letter}", current)), head, count, n_tokens)
        for part, letter, (head, count) in zip(parts, "qkv", heads, strict=True)
    )
    if numbers.has_rope:
        q, k = sketch.rope(q, sketch.inputs.positions), sketch.rope(k, sketch.inputs.positions)
    found = attend(sketch, sketch.inputs.full, q, k, v, sliding=False, out=None)
    return _switched(sketch, "attn_output", found)


def switched_layer(sketch: Sketch, previous: Tensor) -> Tensor:
    """Return the output of a layer all of whose matrices are changed by each token's adapter."""
    graph, scales = sketch.graph, sketch.numbers.scales_residuals
    current, residual = sketch.mixed(sketch.norm(previous, "attn_norm")), previous
    if sketch.layer.is_last:
        rows = sketch.inputs.output_rows
        current, residual = graph.get_rows(current, rows), graph.get_rows(residual, rows)
        ids = sketch.shared.get(_Picked).ids
        wanted = graph.get_rows(graph.reshape(ids, 1, ids.ne[0]), rows)
        sketch.shared.put(_Picked(graph.reshape(wanted, rows.ne[0])))
    joined = graph.add(graph.scale(current) if scales else current, residual)
    normed = sketch.norm(joined, "ffn_norm")
    gate, up = _switched(sketch, "ffn_gate", normed), _switched(sketch, "ffn_up", normed)
    current = _switched(sketch, "ffn_down", graph.mul(graph.unary(gate), up))
    return graph.add(graph.scale(current) if scales else current, joined)


def _switched(sketch: Sketch, stem: str, source: Tensor) -> Tensor:
    """Return `source` multiplied with a weight and with each token's change to it."""
    graph = sketch.graph
    return graph.add(graph.mul_mat(sketch.weight(stem), source), _change(sketch, stem, source))


def _change(sketch: Sketch, stem: str, source: Tensor) -> Tensor:
    graph, (width, n_tokens) = sketch.graph, source.ne[:2]
    ids = graph.reshape(sketch.shared.get(_Picked).ids, 1, n_tokens)
    narrow = graph.mul_mat_id(sketch.weight(f"{stem}.lora_a"), graph.reshape(source, width, 1, n_tokens), ids)
    found = graph.mul_mat_id(sketch.weight(f"{stem}.lora_b"), narrow, ids)
    return graph.reshape(found, found.ne[0], n_tokens)
