"""Gemma 3n and 4 (src/models/gemma3n.cpp, gemma4.cpp).

Both have KV caches that layers share, and embeddings for each layer. Gemma 3n has four versions of the residual stream
(AltUp) and a low-rank path parallel to attention (Laurel). Gemma 4 has experts parallel to a dense part.
"""

from __future__ import annotations

from msgspec import Struct

from engine.planning.memory.compute_graph.building.attention import build_attn
from engine.planning.memory.compute_graph.building.context import GraphContext
from engine.planning.memory.compute_graph.ggml.graph import Tensor
from engine.planning.memory.compute_graph.ggml.scheduler import HOST
from engine.planning.memory.compute_graph.models.transformer import build_moe_ffn


class _PerLayerInputs(Struct, frozen=True):
    """Token embeddings for each layer, with shape (width, tokens, layers)."""

    embeddings: Tensor


def shared_kv_attention(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the output of a layer's attention, with its own KV cache or that of an earlier layer."""
    graph, layer = ctx.graph, ctx.layer
    hparams, n_tokens = layer.hparams, current.ne[1]
    q, k, v = _flat(ctx, current)
    q = ctx.build_norm(graph.reshape(q, hparams.head_k, hparams.n_head, n_tokens), "attn_q_norm")
    q = ctx.rope(q, ctx.inputs.inp_pos, by_table=not hparams.is_swa)
    if k is not None and v is not None:
        k = ctx.build_norm(graph.reshape(k, hparams.head_k, hparams.n_head_kv, n_tokens), "attn_k_norm")
        v = ctx.raw_norm(graph.reshape(v, hparams.head_v, hparams.n_head_kv, n_tokens))
        k = ctx.rope(k, ctx.inputs.inp_pos, by_table=not hparams.is_swa)
    layer_number = None if hparams.cache_of < 0 else hparams.cache_of
    return build_attn(ctx, ctx.inp_attn, q, k, v, layer_number=layer_number, sliding=True)


def _flat(ctx: GraphContext, current: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return queries, keys and values, not yet divided into heads.

    Keys and values are None for a layer that reads the cache of another layer.
    """
    graph, hparams, n_tokens = ctx.graph, ctx.layer.hparams, current.ne[1]
    owns = hparams.cache_of < 0
    if ctx.has("attn_qkv"):
        joined = ctx.linear("attn_qkv", current)
        widths = (hparams.head_k * hparams.n_head, hparams.k_width, hparams.v_width)
        q, k, v = (graph.cont(graph.view(joined, (width, n_tokens), joined.nb)) for width in widths)
        return (q, k, v) if owns else (q, None, None)
    q = ctx.linear("attn_q", current)
    if not owns:
        return q, None, None
    k = ctx.linear("attn_k", current)
    # Layers without `attn_v` use the keys as values, before norm and RoPE are applied to the keys.
    return q, k, ctx.linear("attn_v", current) if ctx.has("attn_v") else k


def project_per_layer_inputs(ctx: GraphContext, embeddings: Tensor) -> None:
    """Make the per-layer embeddings and store them for all layers, if the file has weights for them.

    Mirrors `build_inp_per_layer` and `project_per_layer_inputs`. `embeddings`: token embeddings.
    """
    graph, outer = ctx.graph, ctx.outer
    if "per_layer_token_embd" not in outer:
        return
    buft, n_tokens = ctx.layer.buft, embeddings.ne[1]
    norm = outer["per_layer_proj_norm"]
    width = norm.ne[0]
    n_layers = outer["per_layer_token_embd"].ne[0] // width
    tokens = graph.new_input("i32", n_tokens)
    rows = graph.get_rows(ctx.outer_weight(outer["per_layer_token_embd"], HOST), tokens)
    rows = graph.build_forward_expand(graph.scale(graph.reshape(rows, width, n_layers, n_tokens)))
    projected = graph.mul_mat(ctx.outer_weight(outer["per_layer_model_proj"], buft), embeddings)
    projected = graph.reshape(graph.scale(projected), width, n_layers, n_tokens)
    projected = graph.mul(ctx.raw_norm(projected), ctx.outer_weight(norm, buft))
    found = graph.scale(graph.add(projected, rows))
    ctx.shared.put(_PerLayerInputs(graph.cont(graph.permute(found, 0, 2, 1, 3))))


def per_layer_input(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the layer's per-layer embeddings, gated by `current` and projected, to be added to the layer's output."""
    graph, per_layer = ctx.graph, ctx.shared.get(_PerLayerInputs).embeddings
    current = graph.unary(graph.mul_mat(ctx.weight("inp_gate"), current))
    current = graph.mul(current, graph.view(per_layer, per_layer.ne[:2]))
    return ctx.build_norm(graph.mul_mat(ctx.weight("proj"), current), "post_norm")


def has_per_layer_inputs(ctx: GraphContext) -> bool:
    """Return whether `project_per_layer_inputs` made per-layer embeddings, because the file has weights for them."""
    return ctx.shared.find(_PerLayerInputs) is not None


# `llama_hparams::n_altup`, a constant: no file has a key for it.
_N_ALTUP = 4


def gemma3n_layer(ctx: GraphContext, previous: Tensor) -> Tensor:
    """Return all versions of the residual stream after one layer, with shape (embedding, tokens, versions)."""
    graph = ctx.graph
    if ctx.layer_number == 0:
        project_per_layer_inputs(ctx, previous)
        previous = _altup_embed(ctx, previous)
    predicted = _altup_predict(ctx, previous)
    active = _first(ctx, predicted)
    normed = ctx.build_norm(active, "attn_norm")
    narrow = graph.mul_mat(ctx.weight("laurel_r"), graph.mul_mat(ctx.weight("laurel_l"), normed))
    laurel = graph.add(ctx.build_norm(narrow, "laurel_post_norm"), normed)
    current = ctx.mixed(normed)
    current = graph.add(ctx.build_norm(current, "post_attention_norm"), active)
    joined = graph.scale(graph.add(current, laurel))
    current = _feed_forward(ctx, ctx.build_norm(joined, "ffn_norm"))
    current = graph.add(ctx.build_norm(current, "post_ffw_norm", pin=False), joined)
    corrected = _altup_correct(ctx, predicted, current)
    first = graph.mul(_first(ctx, corrected), ctx.weight("altup_correct_scale"))
    rest = graph.add(_rest(ctx, corrected), per_layer_input(ctx, first))
    return graph.concat(_first(ctx, corrected), rest, 2)


def altup_unembed(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return all versions of the residual stream merged into one, for tokens with logits (`altup_unembd_proj`)."""
    graph = ctx.graph
    size = _calc_magnitude(ctx, _first(ctx, current))
    others = _resized(ctx, "altup_unembd_proj", ctx.inputs.output, _rest(ctx, current), size)
    total = _first(ctx, current)
    # The views of all versions look alike here, because tensors of this graph have no offsets.
    for _ in range(_N_ALTUP - 1):
        total = graph.add(total, _first(ctx, others))
    return graph.get_rows(graph.scale(total), ctx.inputs.inp_out_ids)


def _altup_embed(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the input embeddings as all versions of the residual stream (`altup_proj`)."""
    graph, (n_embd, n_tokens) = ctx.graph, current.ne[:2]
    size = _calc_magnitude(ctx, current)
    repeated = graph.repeat(current, n_embd, n_tokens, _N_ALTUP - 1)
    return graph.concat(current, _resized(ctx, "altup_proj", ctx.inputs.output, repeated, size), 2)


def _resized(ctx: GraphContext, name: str, output: str, current: Tensor, size: Tensor) -> Tensor:
    """Return `current` multiplied by the weight `name`, scaled to the magnitude `size`.

    `output`: buffer type of the weight.
    """
    graph = ctx.graph
    found = graph.mul_mat(ctx.outer_weight(ctx.outer[name], output), current)
    return graph.like("div", graph.mul(found, size), _calc_magnitude(ctx, found))


def _calc_magnitude(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the square root of the sum of squares of each row (`calc_magnitude`)."""
    graph = ctx.graph
    return graph.like("sqrt", graph.sum_rows(graph.like("sqr", current)))


def _first(ctx: GraphContext, versions: Tensor) -> Tensor:
    """Return a view of the active version of the residual stream (`gemma3n_view_2d_slice`)."""
    return ctx.graph.view(versions, versions.ne[:2])


def _rest(ctx: GraphContext, versions: Tensor) -> Tensor:
    """Return a view of all versions of the residual stream except the active one, which is the first."""
    return ctx.graph.view(versions, (*versions.ne[:2], _N_ALTUP - 1))


def _altup_compute_router_modalities(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the weights by which versions of the residual stream are mixed (`altup_compute_router_modalities`)."""
    graph = ctx.graph
    routed = graph.scale(ctx.build_norm(current, "altup_router_norm"))
    return graph.unary(graph.mul_mat(ctx.weight("altup_router"), routed))


def _altup_predict(ctx: GraphContext, versions: Tensor) -> Tensor:
    """Return the versions of the residual stream that are predicted before the layer (`altup_predict`)."""
    graph, n_tokens = ctx.graph, versions.ne[1]
    modalities = _altup_compute_router_modalities(ctx, _first(ctx, versions))
    mixes = graph.mul_mat(ctx.weight("altup_predict_coef"), modalities)
    mixes = graph.reshape(mixes, _N_ALTUP, _N_ALTUP, n_tokens)
    found = graph.mul_mat(graph.cont(graph.permute(versions, 1, 2, 0, 3)), mixes)
    return graph.add(graph.cont(graph.permute(found, 0, 2, 1, 3)), versions)


def _altup_correct(ctx: GraphContext, predicted: Tensor, current: Tensor) -> Tensor:
    """Return the predicted versions of the residual stream corrected by the layer's output (`altup_correct`)."""
    graph, (n_embd, n_tokens) = ctx.graph, current.ne[:2]
    modalities = _altup_compute_router_modalities(ctx, current)
    change = graph.like("sub", current, _first(ctx, predicted))
    mixes = graph.scale(graph.mul_mat(ctx.weight("altup_correct_coef"), modalities))
    mixes = graph.cont(graph.transpose(mixes), 1, n_tokens, _N_ALTUP)
    change = graph.repeat(change, n_embd, n_tokens, _N_ALTUP)
    return graph.add(graph.mul(change, mixes), predicted)


def _feed_forward(ctx: GraphContext, current: Tensor) -> Tensor:
    graph = ctx.graph
    up, gate = graph.mul_mat(ctx.weight("ffn_up"), current), graph.mul_mat(ctx.weight("ffn_gate"), current)
    if ctx.layer.hparams.keeps_largest:
        gate = _gaussian_topk(ctx, gate)
    return graph.mul_mat(ctx.weight("ffn_down"), graph.mul(up, graph.unary(gate)))


def _gaussian_topk(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return `current` with only those values that are far above the mean; the others are 0 (`gaussian_topk`)."""
    graph = ctx.graph
    mean = graph.new("mean", (1, *current.ne[1:]), current)
    spread = graph.sum_rows(graph.like("sqr", graph.like("sub", current, mean)))
    spread = graph.like("sqrt", graph.scale(spread))
    cut = graph.add(mean, graph.scale(spread))
    return graph.unary(graph.like("sub", current, cut))


def gemma4_layer(ctx: GraphContext, previous: Tensor) -> Tensor:
    """Return the output of one layer (src/models/gemma4.cpp)."""
    graph = ctx.graph
    if ctx.layer_number == 0:
        project_per_layer_inputs(ctx, previous)
    attended = ctx.mixed(ctx.build_norm(previous, "attn_norm"))
    joined = graph.add(ctx.build_norm(attended, "post_attention_norm"), previous)
    current = ctx.build_ffn(ctx.build_norm(joined, "ffn_norm"))
    if ctx.has("ffn_gate_inp"):
        current = graph.add(ctx.build_norm(current, "post_ffw_norm_1"), _routed(ctx, joined))
    current = graph.add(ctx.build_norm(current, "post_ffw_norm", pin=False), joined)
    if has_per_layer_inputs(ctx):
        current = graph.add(current, per_layer_input(ctx, current))
    if ctx.has("layer_output_scale"):
        current = graph.mul(current, ctx.weight("layer_output_scale"))
    return current


def _routed(ctx: GraphContext, joined: Tensor) -> Tensor:
    """Return the output of the experts of Gemma 4, whose router has its own norm and scale.

    `joined`: sum of the layer's input and the output of attention.
    """
    graph = ctx.graph
    narrow = ctx.build_norm(joined, "pre_ffw_norm_2")
    routed = graph.mul(graph.scale(ctx.raw_norm(joined)), ctx.weight("ffn_gate_inp.scale"))
    logits = graph.mul_mat(ctx.weight("ffn_gate_inp"), routed)
    return ctx.build_norm(build_moe_ffn(ctx, narrow, logits=logits, normalise=True), "post_ffw_norm_2")
