"""Attention that may read an earlier layer's cache, and embeddings that each layer has for itself (Gemma 3n, 4)."""

from __future__ import annotations

from dataclasses import dataclass

from engine.memory.compute_graph.building.attend import attend
from engine.memory.compute_graph.building.sketch import Sketch
from engine.memory.compute_graph.ggml.graph import Tensor
from engine.memory.compute_graph.ggml.scheduler import HOST


@dataclass(frozen=True, slots=True)
class _LayerInputs:
    """Embeddings of the tokens for each layer: (width, tokens, layers)."""

    embeddings: Tensor


def sharing_attention(sketch: Sketch, current: Tensor) -> Tensor:
    """Return the attention of a layer to its normalised input, with its own keys and values or an earlier layer's."""
    graph, layer = sketch.graph, sketch.layer
    numbers, n_tokens = layer.numbers, current.ne[1]
    q, k, v = _flat(sketch, current)
    q = sketch.norm(graph.reshape(q, numbers.head_k, numbers.n_head, n_tokens), "attn_q_norm")
    q = sketch.rope(q, sketch.inputs.positions, by_table=not numbers.is_swa)
    if k is not None and v is not None:
        k = sketch.norm(graph.reshape(k, numbers.head_k, numbers.n_head_kv, n_tokens), "attn_k_norm")
        v = sketch.raw_norm(graph.reshape(v, numbers.head_v, numbers.n_head_kv, n_tokens))
        k = sketch.rope(k, sketch.inputs.positions, by_table=not numbers.is_swa)
    place = None if numbers.cache_of < 0 else numbers.cache_of
    return attend(sketch, sketch.masks, q, k, v, place=place, sliding=True)


def _flat(sketch: Sketch, current: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return queries, keys and values before heads are told apart; no keys and values where another layer has them."""
    graph, numbers, n_tokens = sketch.graph, sketch.layer.numbers, current.ne[1]
    owns = numbers.cache_of < 0
    if sketch.has("attn_qkv"):
        joined = sketch.linear("attn_qkv", current)
        widths = (numbers.head_k * numbers.n_head, numbers.k_width, numbers.v_width)
        q, k, v = (graph.cont(graph.view(joined, (width, n_tokens), joined.nb)) for width in widths)
        return (q, k, v) if owns else (q, None, None)
    q = sketch.linear("attn_q", current)
    if not owns:
        return q, None, None
    k = sketch.linear("attn_k", current)
    return q, k, sketch.linear("attn_v", current) if sketch.has("attn_v") else k


def make_layer_inputs(sketch: Sketch, embeddings: Tensor) -> None:
    """Keep what every layer gets of the tokens beside its predecessor's output, if the file has such embeddings."""
    graph, outer = sketch.graph, sketch.outer
    if "per_layer_token_embd" not in outer:
        return
    memory, n_tokens = sketch.layer.memory, embeddings.ne[1]
    norm = outer["per_layer_proj_norm"]
    width = norm.ne[0]
    n_layers = outer["per_layer_token_embd"].ne[0] // width
    tokens = graph.new_input("i32", n_tokens)
    rows = graph.get_rows(sketch.outer_weight(outer["per_layer_token_embd"], HOST), tokens)
    rows = graph.expand(graph.scale(graph.reshape(rows, width, n_layers, n_tokens)))
    projected = graph.mul_mat(sketch.outer_weight(outer["per_layer_model_proj"], memory), embeddings)
    projected = graph.reshape(graph.scale(projected), width, n_layers, n_tokens)
    projected = graph.mul(sketch.raw_norm(projected), sketch.outer_weight(norm, memory))
    found = graph.scale(graph.add(projected, rows))
    sketch.shared.put(_LayerInputs(graph.cont(graph.permute(found, 0, 2, 1, 3))))


def gated_layer_input(sketch: Sketch, current: Tensor) -> Tensor:
    """Return what the layer makes of `current` and its part of the embeddings."""
    graph, per_layer = sketch.graph, sketch.shared.get(_LayerInputs).embeddings
    current = graph.unary(graph.mul_mat(sketch.weight("inp_gate"), current))
    current = graph.mul(current, graph.view(per_layer, per_layer.ne[:2]))
    return sketch.norm(graph.mul_mat(sketch.weight("proj"), current), "post_norm")


def has_layer_inputs(sketch: Sketch) -> bool:
    """Return whether layers get embeddings of their own."""
    return sketch.shared.find(_LayerInputs) is not None
