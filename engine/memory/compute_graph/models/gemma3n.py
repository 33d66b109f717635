"""Layers of Gemma 3n: four versions of the residual stream, of which one goes through the layer (AltUp), a low-rank
path beside attention (Laurel), and embeddings for each layer."""

from __future__ import annotations

from engine.memory.compute_graph.building.sketch import Sketch
from engine.memory.compute_graph.ggml.graph import Tensor
from engine.memory.compute_graph.models.shared_cache import gated_layer_input, make_layer_inputs

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
