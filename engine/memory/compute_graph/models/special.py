"""Layers of single architectures that no style describes, each function named after its file in src/models."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.memory.compute_graph.building.attention import attend, projections
from engine.memory.compute_graph.building.context import Sketch
from engine.memory.compute_graph.building.graph import Tokens, outer_norm
from engine.memory.compute_graph.ggml.graph import Tensor
from engine.memory.compute_graph.ggml.scheduler import HOST
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


_IMAGE_TOKENS = 8192
"""How many tokens stand for parts of images: those from 4 to 8195."""


def head_norm_attention(sketch: Sketch, current: Tensor) -> Tensor:
    """Return attention whose queries and keys are normalised around their mean."""
    q, k, v = projections(sketch, current)
    if sketch.has("attn_q_norm"):
        q = sketch.norm(q, "attn_q_norm", layer_norm=True)
    if sketch.has("attn_k_norm"):
        k = sketch.norm(k, "attn_k_norm", layer_norm=True)
    q, k = sketch.rope(q, sketch.inputs.positions), sketch.rope(k, sketch.inputs.positions)
    return attend(sketch, sketch.inputs.full, q, k, v, sliding=False)


def chameleon_layer(sketch: Sketch, previous: Tensor) -> Tensor:
    """Return the output of a layer whose norms stand before its two parts or behind them."""
    graph, behind = sketch.graph, sketch.style.norms_behind
    current, residual = sketch.mixed(previous if behind else sketch.norm(previous, "attn_norm")), previous
    if sketch.layer.is_last:
        current, residual = (graph.get_rows(tensor, sketch.inputs.output_rows) for tensor in (current, previous))
    if behind:
        current = sketch.norm(current, "attn_norm")
    joined = graph.add(current, residual)
    # Where norms stand behind, the feed-forward part reads what attention made, without the residual.
    current = feed_forward(sketch, current if behind else sketch.norm(joined, "ffn_norm"))
    if behind:
        current = sketch.norm(current, "ffn_norm")
    return graph.add(current, joined)


def without_images(sketch: Sketch, logits: Tensor) -> Tensor:
    """Return a copy of the logits in which image tokens are out of reach."""
    graph = sketch.graph
    out_of_reach = graph.write("clamp", graph.scratch("f32", _IMAGE_TOKENS))
    return graph.like("set", logits, out_of_reach)


def looped_layer(sketch: Sketch, previous: Tensor) -> Tensor:
    """Return the output of a layer; between two runs the norm of the output comes behind the last layer."""
    current = decoder_layer(sketch, previous)
    ends_run = (sketch.layer.index + 1) % sketch.numbers.n_blocks == 0
    if not ends_run or sketch.layer.is_last or sketch.style.bare_runs:
        return current
    return outer_norm(sketch, "output_norm", sketch.inputs.output, current, sketch.layer.backend)


@dataclass(frozen=True, slots=True)
class _Made:
    """What a stack made last."""

    output: Tensor


def stacked_layer(sketch: Sketch, previous: Tensor) -> Tensor:
    """Return the output of a layer: the first of a stack reads the sum of what both stacks made last."""
    graph, stacks = sketch.graph, sketch.numbers.stacks
    assert stacks is not None
    is_high, place = stacks.place(sketch.layer.index)
    if place == 0:
        low, high = (sketch.shared.find(_Made, of) for of in ("low", "high"))
        start = sketch.outer_weight(sketch.outer["hrm.z_l_init"], sketch.layer.memory) if low is None else low.output
        previous = graph.add(sketch.inputs.embeddings if high is None else high.output, start)
    current = decoder_layer(sketch, previous)
    if place == stacks.layers - 1:
        current = sketch.raw_norm(current)
        sketch.shared.put(_Made(current), of="high" if is_high else "low")
    return graph.get_rows(current, sketch.inputs.output_rows) if sketch.layer.is_last else current


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
