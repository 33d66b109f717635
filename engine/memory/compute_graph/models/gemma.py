"""Layers of Gemma 3n and 4 (src/models/gemma3n.cpp, gemma4.cpp): KV caches shared between layers, embeddings for each
layer, experts next to a dense part (4), and for 3n four versions of the residual stream (AltUp) with a low-rank path
next to attention (Laurel).
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.memory.compute_graph.building.attention import attend
from engine.memory.compute_graph.building.context import Sketch
from engine.memory.compute_graph.ggml.graph import Tensor
from engine.memory.compute_graph.ggml.scheduler import HOST
from engine.memory.compute_graph.models.transformer import experts


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


_VERSIONS = 4


def gemma3n_layer(sketch: Sketch, previous: Tensor) -> Tensor:
    """Return all versions of the stream behind one layer: (embedding, tokens, versions)."""
    graph = sketch.graph
    if sketch.place == 0:
        make_layer_inputs(sketch, previous)
        previous = _all_versions(sketch, previous)
    predicted = _predict(sketch, previous)
    active = _first(sketch, predicted)
    normed = sketch.norm(active, "attn_norm")
    narrow = graph.mul_mat(sketch.weight("laurel_r"), graph.mul_mat(sketch.weight("laurel_l"), normed))
    beside = graph.add(sketch.norm(narrow, "laurel_post_norm"), normed)
    current = sketch.mixed(normed)
    current = graph.add(sketch.norm(current, "post_attention_norm"), active)
    joined = graph.scale(graph.add(current, beside))
    current = _feed_forward(sketch, sketch.norm(joined, "ffn_norm"))
    current = graph.add(sketch.norm(current, "post_ffw_norm", pin=False), joined)
    corrected = _correct(sketch, predicted, current)
    first = graph.mul(_first(sketch, corrected), sketch.weight("altup_correct_scale"))
    rest = graph.add(_rest(sketch, corrected), gated_layer_input(sketch, first))
    return graph.concat(_first(sketch, corrected), rest, 2)


def merge_versions(sketch: Sketch, current: Tensor) -> Tensor:
    """Return the wanted rows of all versions as one."""
    graph = sketch.graph
    size = _magnitude(sketch, _first(sketch, current))
    others = _resized(sketch, "altup_unembd_proj", sketch.inputs.output, _rest(sketch, current), size)
    total = _first(sketch, current)
    for _ in range(_VERSIONS - 1):
        total = graph.add(total, _first(sketch, others))
    return graph.get_rows(graph.scale(total), sketch.inputs.output_rows)


def _all_versions(sketch: Sketch, current: Tensor) -> Tensor:
    graph, (n_embd, n_tokens) = sketch.graph, current.ne[:2]
    size = _magnitude(sketch, current)
    repeated = graph.repeat(current, n_embd, n_tokens, _VERSIONS - 1)
    return graph.concat(current, _resized(sketch, "altup_proj", sketch.inputs.output, repeated, size), 2)


def _resized(sketch: Sketch, name: str, output: str, current: Tensor, size: Tensor) -> Tensor:
    """Return a projection of `current`, made as large as `size`."""
    graph = sketch.graph
    found = graph.mul_mat(sketch.outer_weight(sketch.outer[name], output), current)
    return graph.like("div", graph.mul(found, size), _magnitude(sketch, found))


def _magnitude(sketch: Sketch, current: Tensor) -> Tensor:
    graph = sketch.graph
    return graph.like("sqrt", graph.sum_rows(graph.like("sqr", current)))


def _first(sketch: Sketch, versions: Tensor) -> Tensor:
    return sketch.graph.view(versions, versions.ne[:2])


def _rest(sketch: Sketch, versions: Tensor) -> Tensor:
    return sketch.graph.view(versions, (*versions.ne[:2], _VERSIONS - 1))


def _modalities(sketch: Sketch, current: Tensor) -> Tensor:
    graph = sketch.graph
    routed = graph.scale(sketch.norm(current, "altup_router_norm"))
    return graph.unary(graph.mul_mat(sketch.weight("altup_router"), routed))


def _predict(sketch: Sketch, versions: Tensor) -> Tensor:
    graph, n_tokens = sketch.graph, versions.ne[1]
    modalities = _modalities(sketch, _first(sketch, versions))
    mixes = graph.mul_mat(sketch.weight("altup_predict_coef"), modalities)
    mixes = graph.reshape(mixes, _VERSIONS, _VERSIONS, n_tokens)
    found = graph.mul_mat(graph.cont(graph.permute(versions, 1, 2, 0, 3)), mixes)
    return graph.add(graph.cont(graph.permute(found, 0, 2, 1, 3)), versions)


def _correct(sketch: Sketch, predicted: Tensor, current: Tensor) -> Tensor:
    graph, (n_embd, n_tokens) = sketch.graph, current.ne[:2]
    modalities = _modalities(sketch, current)
    change = graph.like("sub", current, _first(sketch, predicted))
    mixes = graph.scale(graph.mul_mat(sketch.weight("altup_correct_coef"), modalities))
    mixes = graph.cont(graph.transpose(mixes), 1, n_tokens, _VERSIONS)
    change = graph.repeat(change, n_embd, n_tokens, _VERSIONS)
    return graph.add(graph.mul(change, mixes), predicted)


def _feed_forward(sketch: Sketch, current: Tensor) -> Tensor:
    graph = sketch.graph
    up, gate = graph.mul_mat(sketch.weight("ffn_up"), current), graph.mul_mat(sketch.weight("ffn_gate"), current)
    if sketch.layer.numbers.keeps_largest:
        gate = _largest(sketch, gate)
    return graph.mul_mat(sketch.weight("ffn_down"), graph.mul(up, graph.unary(gate)))


def _largest(sketch: Sketch, current: Tensor) -> Tensor:
    """Return `current` without what is not far above its mean."""
    graph = sketch.graph
    mean = graph.new("mean", (1, *current.ne[1:]), current)
    spread = graph.sum_rows(graph.like("sqr", graph.like("sub", current, mean)))
    spread = graph.like("sqrt", graph.scale(spread))
    cut = graph.add(mean, graph.scale(spread))
    return graph.unary(graph.like("sub", current, cut))


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
