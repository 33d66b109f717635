"""Layers of single architectures that no combination of `Style` fields describes.

Each function is named after its file in src/models.
"""

from __future__ import annotations

from msgspec import Struct

from engine.base.values import replace
from engine.planning.memory.compute_graph.building.attention import build_attn, build_qkv
from engine.planning.memory.compute_graph.building.context import GraphContext
from engine.planning.memory.compute_graph.building.graph import Tokens, outer_norm
from engine.planning.memory.compute_graph.ggml.graph import Tensor
from engine.planning.memory.compute_graph.ggml.scheduler import HOST
from engine.planning.memory.compute_graph.models.transformer import attention, decoder_layer, feed_forward


def _select_out_ids(ctx: GraphContext, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the rows of the tokens with logits if this is the last layer, else the tensors unchanged."""
    if not ctx.layer.is_last:
        return tensors
    return tuple(ctx.graph.get_rows(tensor, ctx.inputs.inp_out_ids) for tensor in tensors)


def grok_layer(ctx: GraphContext, previous: Tensor) -> Tensor:
    """Return the output of a layer with experts parallel to a dense part, with norms after both
    (src/models/grok.cpp).
    """
    graph = ctx.graph
    current = ctx.mixed(ctx.build_norm(previous, "attn_norm"))
    current, residual = _select_out_ids(ctx, current, previous)
    joined = graph.add(ctx.build_norm(current, "attn_output_norm"), residual)
    normed = ctx.build_norm(joined, "ffn_norm")
    current = feed_forward(ctx, normed)
    if ctx.has("ffn_up"):
        current = graph.scale(graph.add(ctx.build_ffn(normed), current))
    return graph.add(ctx.build_norm(current, "post_ffw_norm", "layer_output_norm"), joined)


def arctic_layer(ctx: GraphContext, previous: Tensor) -> Tensor:
    """Return the output of a layer whose experts read the layer's input, parallel to attention and a dense part.

    Mirrors src/models/arctic.cpp.
    """
    graph = ctx.graph
    current = ctx.mixed(ctx.build_norm(previous, "attn_norm"))
    current, residual = _select_out_ids(ctx, current, previous)
    joined = graph.add(current, residual)
    dense = graph.add(ctx.build_ffn(ctx.build_norm(joined, "ffn_norm")), joined)
    return graph.add(feed_forward(ctx, ctx.build_norm(residual, "ffn_norm_exps")), dense)


def falcon_h1_layer(ctx: GraphContext, previous: Tensor) -> Tensor:
    """Return the output of a layer with attention parallel to a Mamba scan (src/models/falcon-h1.cpp)."""
    graph = ctx.graph
    attended = attention(ctx, ctx.build_norm(previous, "attn_norm"))
    scanned = ctx.mixed(ctx.build_norm(previous, "attn_norm"))
    joined = graph.add(graph.add(attended, scanned), previous)
    (joined,) = _select_out_ids(ctx, joined)
    return graph.add(ctx.build_ffn(ctx.build_norm(joined, "ffn_norm")), joined)


def talkie_layer(ctx: GraphContext, previous: Tensor) -> Tensor:
    """Return the output of a layer, with the scaled embeddings added to it (src/models/talkie.cpp)."""
    graph = ctx.graph
    current = ctx.mixed(ctx.raw_norm(previous))
    current, residual, embeddings = _select_out_ids(ctx, current, previous, ctx.inputs.inp_embd)
    joined = graph.add(current, residual)
    current = graph.add(ctx.build_ffn(ctx.raw_norm(joined)), joined)
    return graph.add(current, graph.mul(embeddings, ctx.weight("layer_output_scale")))


def deci_layer(ctx: GraphContext, previous: Tensor) -> Tensor:
    """Return the output of a layer whose attention may be a single matrix, or missing (src/models/deci.cpp).

    A layer with no feed-forward part returns its input, because llama.cpp skips such a layer completely.
    """
    graph, hparams = ctx.graph, ctx.layer.hparams
    current = previous
    if hparams.n_head:
        current = ctx.build_norm(previous, "attn_norm")
        attends = hparams.n_head_kv > 0
        current = ctx.mixed(current) if attends else graph.mul_mat(ctx.weight("attn_output"), current)
    if not ctx.has("ffn_down"):
        return previous
    current, residual = _select_out_ids(ctx, current, previous)
    joined = graph.add(current, residual) if hparams.n_head else current
    return graph.add(ctx.build_ffn(ctx.build_norm(joined, "ffn_norm")), joined)


def deepstack_layer(ctx: GraphContext, previous: Tensor) -> Tensor:
    """Return the output of a layer; in the first layers, image embeddings are added to it (src/models/qwen3vl.cpp)."""
    graph = ctx.graph
    current = decoder_layer(ctx, previous)
    if not ctx.layer.hparams.adds_input:
        return current
    stacked = ctx.inputs.inp_embd
    return graph.add(current, graph.view(stacked, stacked.ne[:2], stacked.nb[:2]))


_IMAGE_TOKENS = 8192
"""Number of tokens in Chameleon's vocabulary that stand for image parts; their ids are 4 to 8195."""


def chameleon_attention(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the output of attention with layer norms on queries and keys (src/models/chameleon.cpp)."""
    q, k, v = build_qkv(ctx, current)
    if ctx.has("attn_q_norm"):
        q = ctx.build_norm(q, "attn_q_norm", layer_norm=True)
    if ctx.has("attn_k_norm"):
        k = ctx.build_norm(k, "attn_k_norm", layer_norm=True)
    q, k = ctx.rope(q, ctx.inputs.inp_pos), ctx.rope(k, ctx.inputs.inp_pos)
    return build_attn(ctx, ctx.inputs.inp_attn, q, k, v, sliding=False)


def chameleon_layer(ctx: GraphContext, previous: Tensor) -> Tensor:
    """Return the output of a layer with norms before or, with `swin_norm`, after attention and feed-forward.

    Mirrors src/models/chameleon.cpp.
    """
    graph, norms_after = ctx.graph, ctx.style.norms_after
    current, residual = ctx.mixed(previous if norms_after else ctx.build_norm(previous, "attn_norm")), previous
    if ctx.layer.is_last:
        current, residual = (graph.get_rows(tensor, ctx.inputs.inp_out_ids) for tensor in (current, previous))
    if norms_after:
        current = ctx.build_norm(current, "attn_norm")
    joined = graph.add(current, residual)
    # With `swin_norm` the feed-forward part reads the output of attention without the residual.
    current = feed_forward(ctx, current if norms_after else ctx.build_norm(joined, "ffn_norm"))
    if norms_after:
        current = ctx.build_norm(current, "ffn_norm")
    return graph.add(current, joined)


def mask_image_tokens(ctx: GraphContext, logits: Tensor) -> Tensor:
    """Return a copy of the logits in which those of image tokens are set to a minimum (src/models/chameleon.cpp)."""
    graph = ctx.graph
    out_of_reach = graph.write("clamp", graph.scratch("f32", _IMAGE_TOKENS))
    return graph.like("set", logits, out_of_reach)


def looped_layer(ctx: GraphContext, previous: Tensor) -> Tensor:
    """Return the output of a layer in a model that runs all its layers several times (src/models/nanbeige.cpp).

    The last layer of each repetition, except the final one, applies the output norm, unless `Style.bare_runs` is set.
    """
    current = decoder_layer(ctx, previous)
    ends_run = (ctx.layer.index + 1) % ctx.hparams.n_blocks == 0
    if not ends_run or ctx.layer.is_last or ctx.style.bare_runs:
        return current
    return outer_norm(ctx, "output_norm", ctx.inputs.output, current, ctx.layer.backend)


class _StackOutput(Struct, frozen=True):
    """Latest output of one of the two stacks of layers of a hierarchical reasoning model."""

    output: Tensor


def hrm_layer(ctx: GraphContext, previous: Tensor) -> Tensor:
    """Return the output of a layer of a hierarchical reasoning model (src/models/hrm-text.cpp).

    The first layer of a stack reads the sum of both stacks' outputs.
    """
    graph, stacks = ctx.graph, ctx.hparams.stacks
    assert stacks is not None
    is_high, position = stacks.position(ctx.layer.index)
    if position == 0:
        low, high = (ctx.shared.find(_StackOutput, of) for of in ("low", "high"))
        start = ctx.outer_weight(ctx.outer["hrm.z_l_init"], ctx.layer.buft) if low is None else low.output
        previous = graph.add(ctx.inputs.inp_embd if high is None else high.output, start)
    current = decoder_layer(ctx, previous)
    if position == stacks.layers - 1:
        current = ctx.raw_norm(current)
        ctx.shared.put(_StackOutput(current), of="high" if is_high else "low")
    return graph.get_rows(current, ctx.inputs.inp_out_ids) if ctx.layer.is_last else current


_ROUTER = -1
"""Key in `GraphContext.caches` for the KV cache of Granite Switch's router, which selects LoRA adapters.

The keys of other caches are numbers of layers.
"""


class _AdapterIds(Struct, frozen=True):
    """Index of the LoRA adapter of each token."""

    ids: Tensor


def granite_switch_embd(ctx: GraphContext) -> Tensor:
    """Return the input embeddings.

    Tokens that select an adapter are replaced by other tokens (src/models/granite-switch.cpp).
    """
    graph = ctx.graph
    tokens = Tokens(graph.new_input("i32", ctx.batch.n_tokens))
    current = graph.get_rows(ctx.outer_weight(ctx.outer["token_embd"], HOST), tokens.ids)
    return graph.scale(current) if ctx.hparams.scales_embeddings else current


def granite_switch_router(ctx: GraphContext, current: Tensor) -> Tensor:
    """Select a LoRA adapter for each token by attention with one head, and return `current` unchanged.

    The router's KV cache is in an extra layer (`router_layer`), which is on the device of the last layer.
    """
    graph, last, n_tokens = ctx.graph, ctx.inputs.last, ctx.batch.n_tokens
    hparams = replace(last.hparams, n_head=1, n_head_kv=1)
    ctx.enter(_ROUTER, replace(last, hparams=hparams, weights={}, is_last=False), _nothing)

    def lane(head: int) -> Tensor:
        signal = graph.reshape(graph.new_input("f32", n_tokens), 1, 1, n_tokens)
        return graph.new("pad", (head, 1, n_tokens), signal)

    k, v, q = lane(hparams.head_k), lane(hparams.head_v), lane(hparams.head_k)
    found = build_attn(ctx, ctx.inputs.inp_attn, q, k, v, sliding=False, out=None)
    found = graph.cont(graph.view(found, (1, n_tokens), (0, found.nb[1])))
    found = graph.unary(graph.like("clamp", graph.reshape(found, n_tokens)))
    ctx.shared.put(_AdapterIds(graph.cast(found, "i32")))
    return current


def _nothing(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return `current`: stands in for the attention of the layer that selects a LoRA adapter for each token.

    That layer (`granite_switch_router`) computes attention itself and never calls this function.
    """
    return current


def granite_switch_attention(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the output of attention with each token's LoRA adapter on its projections (`build_attention_layer`)."""
    graph, hparams, n_tokens = ctx.graph, ctx.layer.hparams, current.ne[1]
    joined = graph.mul_mat(ctx.weight("attn_qkv"), current)
    heads = ((hparams.head_k, hparams.n_head), (hparams.head_k, hparams.n_head_kv), (hparams.head_v, hparams.n_head_kv))
    parts = [graph.cont(graph.view(joined, (head * count, n_tokens), (0, joined.nb[1]))) for head, count in heads]
    q, k, v = (
        graph.reshape(
            graph.add(part, _build_switched_lora_delta(ctx, f"attn_{letter}", current)), head, count, n_tokens
        )
        for part, letter, (head, count) in zip(parts, "qkv", heads, strict=True)
    )
    if hparams.has_rope:
        q, k = ctx.rope(q, ctx.inputs.inp_pos), ctx.rope(k, ctx.inputs.inp_pos)
    found = build_attn(ctx, ctx.inputs.inp_attn, q, k, v, sliding=False, out=None)
    return _build_switched_lora_mm(ctx, "attn_output", found)


def granite_switch_layer(ctx: GraphContext, previous: Tensor) -> Tensor:
    """Return the output of a layer in which each token's LoRA adapter is applied to all weight matrices."""
    graph, scales = ctx.graph, ctx.hparams.scales_residuals
    current, residual = ctx.mixed(ctx.build_norm(previous, "attn_norm")), previous
    if ctx.layer.is_last:
        rows = ctx.inputs.inp_out_ids
        current, residual = graph.get_rows(current, rows), graph.get_rows(residual, rows)
        # The last layer goes on with the output rows only, so the adapters of all other tokens are dropped too.
        ids = ctx.shared.get(_AdapterIds).ids
        wanted = graph.get_rows(graph.reshape(ids, 1, ids.ne[0]), rows)
        ctx.shared.put(_AdapterIds(graph.reshape(wanted, rows.ne[0])))
    joined = graph.add(graph.scale(current) if scales else current, residual)
    normed = ctx.build_norm(joined, "ffn_norm")
    gate, up = _build_switched_lora_mm(ctx, "ffn_gate", normed), _build_switched_lora_mm(ctx, "ffn_up", normed)
    current = _build_switched_lora_mm(ctx, "ffn_down", graph.mul(graph.unary(gate), up))
    return graph.add(graph.scale(current) if scales else current, joined)


def _build_switched_lora_mm(ctx: GraphContext, stem: str, source: Tensor) -> Tensor:
    """Return `source` multiplied by the weight `stem`, with each token's LoRA adapter (`build_switched_lora_mm`)."""
    graph = ctx.graph
    return graph.add(graph.mul_mat(ctx.weight(stem), source), _build_switched_lora_delta(ctx, stem, source))


def _build_switched_lora_delta(ctx: GraphContext, stem: str, source: Tensor) -> Tensor:
    """Return what each token's LoRA adapter adds to the product of `source` and the weight `stem`
    (`build_switched_lora_delta`).
    """
    graph, (width, n_tokens) = ctx.graph, source.ne[:2]
    ids = graph.reshape(ctx.shared.get(_AdapterIds).ids, 1, n_tokens)
    narrow = graph.mul_mat_id(ctx.weight(f"{stem}.lora_a"), graph.reshape(source, width, 1, n_tokens), ids)
    found = graph.mul_mat_id(ctx.weight(f"{stem}.lora_b"), narrow, ids)
    return graph.reshape(found, found.ne[0], n_tokens)
