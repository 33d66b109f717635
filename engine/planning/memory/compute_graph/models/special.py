"""Layers of single architectures that no style describes, each function named after its file in src/models."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.planning.memory.compute_graph.building.attention import build_attn, build_qkv
from engine.planning.memory.compute_graph.building.context import GraphContext
from engine.planning.memory.compute_graph.building.graph import Tokens, outer_norm
from engine.planning.memory.compute_graph.ggml.graph import Tensor
from engine.planning.memory.compute_graph.ggml.scheduler import HOST
from engine.planning.memory.compute_graph.models.transformer import attention, decoder_layer, feed_forward


def _pick(ctx: GraphContext, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the wanted rows of tensors in the last layer, the tensors themselves in others."""
    if not ctx.layer.is_last:
        return tensors
    return tuple(ctx.graph.get_rows(tensor, ctx.inputs.inp_out_ids) for tensor in tensors)


def grok_layer(ctx: GraphContext, previous: Tensor) -> Tensor:
    """Return a layer whose experts stand beside a dense part, all with norms behind them."""
    graph = ctx.graph
    current = ctx.mixed(ctx.build_norm(previous, "attn_norm"))
    current, residual = _pick(ctx, current, previous)
    joined = graph.add(ctx.build_norm(current, "attn_output_norm"), residual)
    normed = ctx.build_norm(joined, "ffn_norm")
    current = feed_forward(ctx, normed)
    if ctx.has("ffn_up"):
        current = graph.scale(graph.add(ctx.build_ffn(normed), current))
    return graph.add(ctx.build_norm(current, "post_ffw_norm", "layer_output_norm"), joined)


def arctic_layer(ctx: GraphContext, previous: Tensor) -> Tensor:
    """Return a layer whose experts read the layer's input, beside a dense part behind attention."""
    graph = ctx.graph
    current = ctx.mixed(ctx.build_norm(previous, "attn_norm"))
    current, residual = _pick(ctx, current, previous)
    joined = graph.add(current, residual)
    dense = graph.add(ctx.build_ffn(ctx.build_norm(joined, "ffn_norm")), joined)
    return graph.add(feed_forward(ctx, ctx.build_norm(residual, "ffn_norm_exps")), dense)


def parallel_hybrid_layer(ctx: GraphContext, previous: Tensor) -> Tensor:
    """Return a layer with attention and a recurrent scan side by side (Falcon H1)."""
    graph = ctx.graph
    attended = attention(ctx, ctx.build_norm(previous, "attn_norm"))
    scanned = ctx.mixed(ctx.build_norm(previous, "attn_norm"))
    joined = graph.add(graph.add(attended, scanned), previous)
    (joined,) = _pick(ctx, joined)
    return graph.add(ctx.build_ffn(ctx.build_norm(joined, "ffn_norm")), joined)


def skipping_layer(ctx: GraphContext, previous: Tensor) -> Tensor:
    """Return a layer that adds the scaled embeddings to its output (Talkie)."""
    graph = ctx.graph
    current = ctx.mixed(ctx.raw_norm(previous))
    current, residual, embeddings = _pick(ctx, current, previous, ctx.inputs.embeddings)
    joined = graph.add(current, residual)
    current = graph.add(ctx.build_ffn(ctx.raw_norm(joined)), joined)
    return graph.add(current, graph.mul(embeddings, ctx.weight("layer_output_scale")))


def uneven_layer(ctx: GraphContext, previous: Tensor) -> Tensor:
    """Return a layer whose attention may be a matrix or nothing at all (Nemotron 51B and its like). One without a
    feed-forward part hands on what it got: the engine leaves its attention out of the sum."""
    graph, numbers = ctx.graph, ctx.layer.numbers
    current = previous
    if numbers.n_head:
        current = ctx.build_norm(previous, "attn_norm")
        attends = numbers.n_head_kv > 0
        current = ctx.mixed(current) if attends else graph.mul_mat(ctx.weight("attn_output"), current)
    if not ctx.has("ffn_down"):
        return previous
    current, residual = _pick(ctx, current, previous)
    joined = graph.add(current, residual) if numbers.n_head else current
    return graph.add(ctx.build_ffn(ctx.build_norm(joined, "ffn_norm")), joined)


def input_adding_layer(ctx: GraphContext, previous: Tensor) -> Tensor:
    """Return a layer that may add a part of the embeddings, meant for images, to its output (Qwen 3 VL)."""
    graph = ctx.graph
    current = decoder_layer(ctx, previous)
    if not ctx.layer.numbers.adds_input:
        return current
    stacked = ctx.inputs.embeddings
    return graph.add(current, graph.view(stacked, stacked.ne[:2], stacked.nb[:2]))


_IMAGE_TOKENS = 8192
"""How many tokens stand for parts of images: those from 4 to 8195."""


def head_norm_attention(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return attention whose queries and keys are normalised around their mean."""
    q, k, v = build_qkv(ctx, current)
    if ctx.has("attn_q_norm"):
        q = ctx.build_norm(q, "attn_q_norm", layer_norm=True)
    if ctx.has("attn_k_norm"):
        k = ctx.build_norm(k, "attn_k_norm", layer_norm=True)
    q, k = ctx.rope(q, ctx.inputs.positions), ctx.rope(k, ctx.inputs.positions)
    return build_attn(ctx, ctx.inputs.full, q, k, v, sliding=False)


def chameleon_layer(ctx: GraphContext, previous: Tensor) -> Tensor:
    """Return the output of a layer whose norms stand before its two parts or behind them."""
    graph, behind = ctx.graph, ctx.style.norms_after
    current, residual = ctx.mixed(previous if behind else ctx.build_norm(previous, "attn_norm")), previous
    if ctx.layer.is_last:
        current, residual = (graph.get_rows(tensor, ctx.inputs.inp_out_ids) for tensor in (current, previous))
    if behind:
        current = ctx.build_norm(current, "attn_norm")
    joined = graph.add(current, residual)
    # Where norms stand behind, the feed-forward part reads what attention made, without the residual.
    current = feed_forward(ctx, current if behind else ctx.build_norm(joined, "ffn_norm"))
    if behind:
        current = ctx.build_norm(current, "ffn_norm")
    return graph.add(current, joined)


def without_images(ctx: GraphContext, logits: Tensor) -> Tensor:
    """Return a copy of the logits in which image tokens are out of reach."""
    graph = ctx.graph
    out_of_reach = graph.write("clamp", graph.scratch("f32", _IMAGE_TOKENS))
    return graph.like("set", logits, out_of_reach)


def looped_layer(ctx: GraphContext, previous: Tensor) -> Tensor:
    """Return the output of a layer; between two runs the norm of the output comes behind the last layer."""
    current = decoder_layer(ctx, previous)
    ends_run = (ctx.layer.index + 1) % ctx.numbers.n_blocks == 0
    if not ends_run or ctx.layer.is_last or ctx.style.bare_runs:
        return current
    return outer_norm(ctx, "output_norm", ctx.inputs.output, current, ctx.layer.backend)


@dataclass(frozen=True, slots=True)
class _Made:
    """What a stack made last."""

    output: Tensor


def stacked_layer(ctx: GraphContext, previous: Tensor) -> Tensor:
    """Return the output of a layer: the first of a stack reads the sum of what both stacks made last."""
    graph, stacks = ctx.graph, ctx.numbers.stacks
    assert stacks is not None
    is_high, place = stacks.place(ctx.layer.index)
    if place == 0:
        low, high = (ctx.shared.find(_Made, of) for of in ("low", "high"))
        start = ctx.outer_weight(ctx.outer["hrm.z_l_init"], ctx.layer.memory) if low is None else low.output
        previous = graph.add(ctx.inputs.embeddings if high is None else high.output, start)
    current = decoder_layer(ctx, previous)
    if place == stacks.layers - 1:
        current = ctx.raw_norm(current)
        ctx.shared.put(_Made(current), of="high" if is_high else "low")
    return graph.get_rows(current, ctx.inputs.inp_out_ids) if ctx.layer.is_last else current


_ROUTER = -1
"""Place of the router's cache among those of the layers."""


@dataclass(frozen=True, slots=True)
class _Picked:
    """The adapter of each token."""

    ids: Tensor


def embed_substitutes(ctx: GraphContext) -> Tensor:
    """Return the embeddings of tokens in which those that turn an adapter on have been replaced by others."""
    graph = ctx.graph
    tokens = Tokens(graph.new_input("i32", ctx.batch.n_tokens))
    current = graph.get_rows(ctx.outer_weight(ctx.outer["token_embd"], HOST), tokens.ids)
    return graph.scale(current) if ctx.numbers.scales_embeddings else current


def route(ctx: GraphContext, current: Tensor) -> Tensor:
    """Pick an adapter for each token by attention with one head, whose cache lies behind the last layer's; return
    `current`."""
    graph, last, n_tokens = ctx.graph, ctx.inputs.last, ctx.batch.n_tokens
    numbers = replace(last.numbers, n_head=1, n_head_kv=1)
    ctx.enter(_ROUTER, replace(last, numbers=numbers, weights={}, is_last=False), _nothing)

    def lane(head: int) -> Tensor:
        signal = graph.reshape(graph.new_input("f32", n_tokens), 1, 1, n_tokens)
        return graph.new("pad", (head, 1, n_tokens), signal)

    k, v, q = lane(numbers.head_k), lane(numbers.head_v), lane(numbers.head_k)
    found = build_attn(ctx, ctx.inputs.full, q, k, v, sliding=False, out=None)
    found = graph.cont(graph.view(found, (1, n_tokens), (0, found.nb[1])))
    found = graph.unary(graph.like("clamp", graph.reshape(found, n_tokens)))
    ctx.shared.put(_Picked(graph.cast(found, "i32")))
    return current


def _nothing(ctx: GraphContext, current: Tensor) -> Tensor:
    """Stand for the mixer of the router, which is no layer that tokens pass through."""
    return current


def switched_attention(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return attention whose projections are changed by each token's adapter."""
    graph, numbers, n_tokens = ctx.graph, ctx.layer.numbers, current.ne[1]
    joined = graph.mul_mat(ctx.weight("attn_qkv"), current)
    heads = ((numbers.head_k, numbers.n_head), (numbers.head_k, numbers.n_head_kv), (numbers.head_v, numbers.n_head_kv))
    parts = [graph.cont(graph.view(joined, (head * count, n_tokens), (0, joined.nb[1]))) for head, count in heads]
    q, k, v = (
        graph.reshape(graph.add(part, _change(ctx, f"attn_{letter}", current)), head, count, n_tokens)
        for part, letter, (head, count) in zip(parts, "qkv", heads, strict=True)
    )
    if numbers.has_rope:
        q, k = ctx.rope(q, ctx.inputs.positions), ctx.rope(k, ctx.inputs.positions)
    found = build_attn(ctx, ctx.inputs.full, q, k, v, sliding=False, out=None)
    return _switched(ctx, "attn_output", found)


def switched_layer(ctx: GraphContext, previous: Tensor) -> Tensor:
    """Return the output of a layer all of whose matrices are changed by each token's adapter."""
    graph, scales = ctx.graph, ctx.numbers.scales_residuals
    current, residual = ctx.mixed(ctx.build_norm(previous, "attn_norm")), previous
    if ctx.layer.is_last:
        rows = ctx.inputs.inp_out_ids
        current, residual = graph.get_rows(current, rows), graph.get_rows(residual, rows)
        ids = ctx.shared.get(_Picked).ids
        wanted = graph.get_rows(graph.reshape(ids, 1, ids.ne[0]), rows)
        ctx.shared.put(_Picked(graph.reshape(wanted, rows.ne[0])))
    joined = graph.add(graph.scale(current) if scales else current, residual)
    normed = ctx.build_norm(joined, "ffn_norm")
    gate, up = _switched(ctx, "ffn_gate", normed), _switched(ctx, "ffn_up", normed)
    current = _switched(ctx, "ffn_down", graph.mul(graph.unary(gate), up))
    return graph.add(graph.scale(current) if scales else current, joined)


def _switched(ctx: GraphContext, stem: str, source: Tensor) -> Tensor:
    """Return `source` multiplied with a weight and with each token's change to it."""
    graph = ctx.graph
    return graph.add(graph.mul_mat(ctx.weight(stem), source), _change(ctx, stem, source))


def _change(ctx: GraphContext, stem: str, source: Tensor) -> Tensor:
    graph, (width, n_tokens) = ctx.graph, source.ne[:2]
    ids = graph.reshape(ctx.shared.get(_Picked).ids, 1, n_tokens)
    narrow = graph.mul_mat_id(ctx.weight(f"{stem}.lora_a"), graph.reshape(source, width, 1, n_tokens), ids)
    found = graph.mul_mat_id(ctx.weight(f"{stem}.lora_b"), narrow, ids)
    return graph.reshape(found, found.ne[0], n_tokens)
