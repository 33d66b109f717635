"""Layers of attention and feed-forward, as most architectures have them, with variations described by a `Style`.

Mirrors `build_attn`, `build_ffn` and `build_moe_ffn` of llama-graph.cpp, and the graphs of src/models/llama.cpp,
bert.cpp and grovemoe.cpp.
"""

from __future__ import annotations

from typing import Literal

from engine.planning.memory.compute_graph.building.attention import build_attn, build_attn_no_cache, build_qkv
from engine.planning.memory.compute_graph.building.context import GraphContext, gated
from engine.planning.memory.compute_graph.ggml.graph import Tensor


def build_moe_ffn(
    ctx: GraphContext,
    source: Tensor,
    *,
    logits: Tensor | None = None,
    chosen: Tensor | None = None,
    weighting: Literal["", "after_choice", "on_input"] = "",
    normalise: bool = False,
    activations: int = 1,
) -> Tensor:
    """Return the weighted sum of the outputs of the experts that the router selects
    (`llm_graph_context::build_moe_ffn`).

    `logits`: output of the router; None to compute it.
    `chosen`: experts that were selected in another way; None for the router's.
    `weighting`: when expert weights are computed, and to what they are applied (`Style.weighting`).
    `normalise`: whether the weights are divided by their sum.
    `activations`: number of nodes of the activation if there is no gate.
    """
    graph, hparams = ctx.graph, ctx.hparams
    late_softmax, weigh_first = weighting == "after_choice", weighting == "on_input"
    n_used, (n_embd, n_tokens) = ctx.layer.hparams.n_experts_used, source.ne[:2]
    n_experts = ctx.layer.weights["ffn_down_exps"].ne[2]
    logits = ctx.linear("ffn_gate_inp", source) if logits is None else logits
    sigmoid = hparams.sigmoid_router or weigh_first
    # With softmax after the choice (`SOFTMAX_WEIGHT`) experts are chosen by the logits themselves.
    probs = logits if late_softmax else graph.unary(logits) if sigmoid else graph.like("soft_max", logits)
    bias = ctx.maybe("exp_probs_b.bias") or ctx.maybe("exp_probs_b")
    # The bias (DeepSeek V3) only affects the choice. `probs` stays without it, since it weighs the experts.
    choice = probs if bias is None else graph.add(probs, bias)
    if weigh_first:
        # llama4 has no `exp_probs_b`, and applies the sigmoid only after top-k.
        choice = logits
    if hparams.n_expert_groups > 1:
        choice = _best_groups(ctx, choice, n_experts)
    if chosen is None:
        chosen = graph.argsort_top_k(choice, n_used)
    rows = graph.get_rows(graph.reshape(probs, 1, n_experts, n_tokens), chosen)
    if late_softmax:
        rows = graph.like("soft_max", graph.reshape(rows, n_used, n_tokens))
        rows = graph.reshape(rows, 1, n_used, n_tokens)
    if normalise:
        rows = normalised(ctx, rows)
    if hparams.scales_experts:
        rows = graph.scale(rows)
    graph.build_forward_expand(rows)
    current = graph.reshape(source, n_embd, 1, n_tokens)
    if weigh_first:
        # llama4 weighs the input of the experts and not their output (`weight_before_ffn`).
        current = graph.mul(graph.repeat(current, n_embd, n_used, n_tokens), rows)
    return weighted_sum(ctx, current, chosen, None if weigh_first else rows, activations=activations)


def normalised(ctx: GraphContext, rows: Tensor) -> Tensor:
    """Return `rows`, the weights of the selected experts, divided by their sum (`norm_w` in `build_moe_ffn`)."""
    graph, (_, n_used, n_tokens, _) = ctx.graph, rows.ne
    flat = graph.reshape(rows, n_used, n_tokens)
    # The sum is clamped to the smallest number of F16, so that the division is not by zero.
    flat = graph.like("div", flat, graph.like("clamp", graph.sum_rows(flat)))
    return graph.reshape(flat, 1, n_used, n_tokens)


def weighted_sum(
    ctx: GraphContext, source: Tensor, chosen: Tensor, rows: Tensor | None, *, kind: str = "exps", activations: int = 1
) -> Tensor:
    """Return the weighted sum of the outputs of the experts `chosen`.

    `source`: input of the experts.
    `rows`: weight of each chosen expert; None for a sum without weights.
    `kind`: suffix of the names of the experts' tensors.
    `activations`: number of graph nodes of the activation, for experts without a gate tensor.
    """
    graph = ctx.graph
    current = _activations(ctx, source, chosen, kind, activations)
    current = _linear(ctx, f"ffn_down_{kind}", current, chosen)
    if rows is not None:
        current = graph.mul(current, rows)
    graph.build_forward_expand(current)
    n_embd, n_used, n_tokens, _ = current.ne
    views = [
        graph.build_forward_expand(graph.view(current, (n_embd, n_tokens), (0, current.nb[2]))) for _ in range(n_used)
    ]
    # All views are expanded before the first sum, as in `build_moe_ffn`.
    total = views[0]
    for view in views[1:]:
        total = graph.build_forward_expand(graph.add(total, view))
    # A single view would not be contiguous, and there is no sum to copy it.
    return graph.cont(total) if n_used == 1 else total


def _linear(ctx: GraphContext, stem: str, source: Tensor, chosen: Tensor) -> Tensor:
    """Return `source` multiplied by the matrices of the chosen experts, with scale and bias (`build_lora_mm_id`).

    `stem`: name of the weight without layer and suffix, such as "ffn_up_exps".
    `chosen`: ids of the experts that each token uses.
    """
    found = ctx.graph.mul_mat_id(ctx.weight(stem), source, chosen)
    found.is_precise = ctx.style.precise_experts and stem.startswith("ffn_down")
    if "experts" in ctx.hparams.scaled and ctx.has(f"{stem}.scale"):
        found = ctx.graph.mul(found, _scales(ctx, f"{stem}.scale", chosen))
    bias = ctx.maybe(f"{stem}.bias")
    return found if bias is None else ctx.graph.like("add_id", found, bias, chosen)


def _scales(ctx: GraphContext, stem: str, chosen: Tensor) -> Tensor:
    """Return the scale of each expert in `chosen` (the ids of each token's experts).

    `stem`: name of the tensor of scales, such as "ffn_up_exps.scale".
    """
    graph, weight = ctx.graph, ctx.weight(stem)
    scales = graph.repeat(graph.reshape(weight, 1, weight.ne[0], 1), 1, weight.ne[0], chosen.ne[1])
    return graph.get_rows(scales, chosen)


def _activations(ctx: GraphContext, source: Tensor, chosen: Tensor, kind: str, activations: int) -> Tensor:
    graph = ctx.graph
    if ctx.has(f"ffn_gate_up_{kind}"):
        joined = _linear(ctx, f"ffn_gate_up_{kind}", source, chosen)
        ne = (joined.ne[0] // 2, *joined.ne[1:])
        return graph.glu_split(graph.view(joined, ne, joined.nb), graph.view(joined, ne, joined.nb))
    up = _linear(ctx, f"ffn_up_{kind}", source, chosen)
    if ctx.has(f"ffn_gate_{kind}"):
        gate = _linear(ctx, f"ffn_gate_{kind}", source, chosen)
        return gated(graph, ctx.layer.hparams.expert_gating, gate, up)
    for _ in range(activations):
        up = graph.unary(up)
    return up


def _best_groups(ctx: GraphContext, probs: Tensor, n_experts: int) -> Tensor:
    """Return `probs`, the router's scores, with all groups of experts masked except the best ones (`build_moe_ffn`)."""
    graph, groups, n_tokens = ctx.graph, ctx.hparams.n_expert_groups, probs.ne[1]
    each = n_experts // groups
    grouped = graph.reshape(probs, each, groups, n_tokens)
    # The score of a group is the sum of its two best experts, as in DeepSeek V3.
    best = graph.argsort_top_k(grouped, 2)
    best = graph.get_rows(graph.reshape(grouped, 1, each, groups, n_tokens), best)
    scores = graph.sum_rows(graph.reshape(best, best.ne[1], best.ne[2], best.ne[3]))
    chosen = graph.argsort_top_k(graph.reshape(scores, scores.ne[1], scores.ne[2]), ctx.hparams.n_group_used)
    inside = graph.get_rows(grouped, chosen)
    # All groups get minus infinity, then `ggml_set_rows` writes the chosen ones back.
    target = graph.like("fill", grouped)
    written = Tensor("set_rows", "f32", target.ne, target.nb, [inside, chosen, target], target)
    return graph.reshape(written, n_experts, n_tokens)


def attention(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the output of a layer's attention for its normalised input."""
    graph, inp_attn = ctx.graph, ctx.inp_attn
    q, k, v = roped_qkv(ctx, current)
    gate = graph.mul_mat(ctx.weight("attn_gate"), current) if ctx.has("attn_gate") else None
    out = None if gate is not None or ctx.has("attn_sub_norm") else "attn_output"
    if not ctx.has_cache:
        return build_attn_no_cache(ctx, inp_attn, q, k, v, out)
    found = build_attn(
        ctx, inp_attn, q, k, v, sliding=ctx.inputs.inp_attn_swa is not None, sinks=ctx.maybe("attn_sinks"), out=out
    )
    if gate is not None:
        found = ctx.linear("attn_output", _gated(ctx, found, graph.unary(gate)))
    elif out is None:
        found = ctx.linear("attn_output", ctx.build_norm(found, "attn_sub_norm"))
    return graph.scale(found) if ctx.style.scaled_attention else found


def _gated(ctx: GraphContext, found: Tensor, gate: Tensor) -> Tensor:
    """Return `found`, the output of attention, times a gate for each element or each head."""
    graph, hparams, (width, n_tokens) = ctx.graph, ctx.layer.hparams, found.ne[:2]
    if gate.ne[0] == width:
        return graph.mul(found, gate)
    by_head = graph.reshape(found, hparams.head_v, hparams.n_head, n_tokens)
    product = graph.mul(by_head, graph.reshape(gate, 1, hparams.n_head, n_tokens))
    return graph.reshape(product, width, n_tokens)


def roped_qkv(ctx: GraphContext, current: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, normalised, rotated (RoPE) and scaled as `ctx.style` says.

    Shape of each: (elements of a head, heads, tokens).
    """
    graph, hparams, style = ctx.graph, ctx.layer.hparams, ctx.style
    if style.qk_norm == "flat":
        q, k, v = build_qkv(ctx, current, flat=True)
        q, k = _normed_pair(ctx, q, k)
        q = graph.reshape(q, hparams.head_k, hparams.n_head, q.ne[1])
        k = graph.reshape(k, hparams.head_k, hparams.n_head_kv, k.ne[1])
        v = graph.reshape(v, hparams.head_v, hparams.n_head_kv, v.ne[1])
    else:
        q, k, v = build_qkv(ctx, current)
    if style.qk_norm == "before":
        q, k = _normed_pair(ctx, q, k)
    if hparams.has_rope:
        q, k = ctx.rope(q, ctx.inputs.inp_pos), ctx.rope(k, ctx.inputs.inp_pos)
    elif ctx.inputs.q_scale is not None:
        q = graph.mul(q, ctx.inputs.q_scale)
    if style.qk_norm == "after":
        q, k = _normed_pair(ctx, q, k)
    if style.scaled_q:
        q = graph.scale(q)
    return q, k, v


def _normed_pair(ctx: GraphContext, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys, each normalised if the layer has a norm for it."""
    layer_norm = ctx.style.layer_norm
    return (
        _norm_if(ctx, q, "attn_q_norm", layer_norm=layer_norm),
        _norm_if(ctx, k, "attn_k_norm", layer_norm=layer_norm),
    )


def _norm_if(ctx: GraphContext, source: Tensor, stem: str, *, layer_norm: bool) -> Tensor:
    return ctx.build_norm(source, stem, layer_norm=layer_norm) if ctx.has(stem) else source


def feed_forward(
    ctx: GraphContext, current: Tensor, logits: Tensor | None = None, chosen: Tensor | None = None
) -> Tensor:
    """Return the output of the feed-forward part: dense, or experts with a shared expert.

    `logits`: output of the router; None to compute it.
    `chosen`: experts that were selected in another way; None for the router's.
    """
    graph, style = ctx.graph, ctx.style
    if not ctx.has("ffn_down_exps"):
        return ctx.build_ffn(current, activations=style.activations)
    if style.ignores_experts:
        return graph.unary(current)
    normalise = ctx.hparams.normalises_experts if style.normalises is None else style.normalises
    narrow = current
    kind = "routed" if ctx.has("ffn_routed_down") else "latent"
    if ctx.has(f"ffn_{kind}_down"):
        logits = ctx.linear("ffn_gate_inp", current)
        narrow = graph.mul_mat(ctx.weight(f"ffn_{kind}_down"), current)
    found = build_moe_ffn(
        ctx,
        narrow,
        logits=logits,
        chosen=chosen,
        weighting=style.weighting,
        normalise=normalise,
        activations=style.activations,
    )
    if ctx.has("ffn_routed_norm"):
        found = ctx.build_norm(found, "ffn_routed_norm")
    if ctx.has(f"ffn_{kind}_up"):
        found = graph.mul_mat(ctx.weight(f"ffn_{kind}_up"), found)
    if ctx.has("ffn_down_shexp"):
        gate = None
        if ctx.has("ffn_gate_inp_shexp"):
            gate = graph.mul_mat(ctx.weight("ffn_gate_inp_shexp", current.ne[0], 1), current)
            activated = graph.unary(gate)
            # qwen2moe.cpp computes the sigmoid as silu(x) / x.
            gate = graph.like("div", activated, gate) if style.divided_gate else activated
        shared = ctx.build_ffn(current, "_shexp", activations=style.activations)
        if gate is not None:
            shared = graph.mul(shared, gate)
        found = graph.add(found, shared)
    return found


def decoder_layer(ctx: GraphContext, previous: Tensor) -> Tensor:
    """Return the output of a layer: attention or recurrent scan, then feed-forward if it has one.

    Mirrors the loop in src/models/llama.cpp.
    """
    graph, style = ctx.graph, ctx.style
    picks = ctx.layer.is_last and style.out_ids in ("", "after_post_norm")
    logits = ctx.linear("ffn_gate_inp", previous) if style.early_router else None
    residual = normed = previous
    if style.bare_norms or ctx.has("attn_norm"):
        normed = ctx.build_norm(previous, "attn_norm", layer_norm=style.layer_norm)
    current = normed
    if ctx.has("attn_norm_2"):
        current = ctx.build_norm(previous, "attn_norm_2", layer_norm=style.layer_norm)
    current = ctx.mixed(current)
    if style.out_ids == "after_post_norm":
        current = ctx.build_norm(current, "post_attention_norm")
    # Tokens without logits are dropped in the last layer, after attention: later steps need only the output rows.
    if picks:
        current = graph.get_rows(current, ctx.inputs.inp_out_ids)
        residual = graph.get_rows(residual, ctx.inputs.inp_out_ids)
        if style.parallel == "input":
            normed = graph.get_rows(normed, ctx.inputs.inp_out_ids)
        if logits is not None:
            logits = graph.get_rows(logits, ctx.inputs.inp_out_ids)
    if style.parallel:
        return _parallel_sum(ctx, current, normed, residual)
    if style.post_norm and style.out_ids != "after_post_norm" and ctx.has("post_attention_norm"):
        current = ctx.build_norm(current, "post_attention_norm")
    scales = ctx.hparams.scales_residuals or style.scaled_sums
    joined = _sum(ctx, style.residual_first in ("first", "both"), graph.scale(current) if scales else current, residual)
    if not any(ctx.has(stem) for stem in ("ffn_up", "ffn_down", "ffn_down_exps")):
        return joined
    current = joined
    stems = [stem for stem in ("ffn_norm", "attn_output_norm") if ctx.has(stem)]
    if not style.post_norm:
        stems.append("post_attention_norm")
    if stems or style.bare_norms:
        current = ctx.build_norm(joined, *(stems or ["ffn_norm"]), layer_norm=style.layer_norm)
    current = feed_forward(ctx, current, logits)
    if ctx.has("post_ffw_norm"):
        current = ctx.build_norm(current, "post_ffw_norm", pin=False)
    return _sum(ctx, style.residual_first in ("second", "both"), graph.scale(current) if scales else current, joined)


def _parallel_sum(ctx: GraphContext, attended: Tensor, normed: Tensor, residual: Tensor) -> Tensor:
    graph, style = ctx.graph, ctx.style
    if style.parallel == "apart":
        normed = ctx.build_norm(residual, "ffn_norm", layer_norm=style.layer_norm)
    terms = {"ffn": feed_forward(ctx, normed), "attention": attended, "input": residual}
    if style.parallel_sum == "ffn (attention input)":
        return graph.add(terms["ffn"], graph.add(attended, residual))
    first, second, third = (terms[name] for name in style.parallel_sum.split())
    return graph.add(graph.add(first, second), third)


def _sum(ctx: GraphContext, residual_first: bool, current: Tensor, residual: Tensor) -> Tensor:
    """Return the sum of `current` and `residual`. `residual_first`: whether the residual is the first operand.

    The order matters, because the result may reuse the memory of the first operand.
    """
    return ctx.graph.add(residual, current) if residual_first else ctx.graph.add(current, residual)


def single_part_layer(ctx: GraphContext, previous: Tensor) -> Tensor:
    """Return the output of a layer with one part: attention, scan or feed-forward (src/models/nemotron-h.cpp)."""
    graph = ctx.graph
    current = ctx.build_norm(previous, "attn_norm", layer_norm=ctx.style.layer_norm)
    if ctx.has("attn_output") or ctx.layer.hparams.is_recurrent:
        current = ctx.mixed(current)
    else:
        current = feed_forward(ctx, current)
    return graph.add(current, previous)


def post_norm_layer(ctx: GraphContext, previous: Tensor) -> Tensor:
    """Return the output of a layer with norms after attention and after feed-forward (src/models/bert.cpp)."""
    graph = ctx.graph
    current, residual = ctx.mixed(previous), previous
    if ctx.layer.is_last:
        current = graph.get_rows(current, ctx.inputs.inp_out_ids)
        residual = graph.get_rows(residual, ctx.inputs.inp_out_ids)
    current = ctx.build_norm(graph.add(current, residual), "attn_output_norm", layer_norm=ctx.style.layer_norm)
    if ctx.has("attn_norm_2"):
        current = ctx.build_norm(graph.add(current, residual), "attn_norm_2", layer_norm=ctx.style.layer_norm)
    joined = graph.add(feed_forward(ctx, current), current)
    return ctx.build_norm(joined, "layer_output_norm", layer_norm=ctx.style.layer_norm)


def grouped_experts_layer(ctx: GraphContext, previous: Tensor) -> Tensor:
    """Return the output of a layer with groups of experts, each with one further expert (src/models/grovemoe.cpp).

    A token that uses an expert also uses the further expert (`chexps`) of its group.
    """
    graph = ctx.graph
    current = ctx.mixed(ctx.build_norm(previous, "attn_norm"))
    residual = previous
    if ctx.layer.is_last:
        current, residual = (graph.get_rows(tensor, ctx.inputs.inp_out_ids) for tensor in (current, previous))
    joined = graph.add(current, residual)
    normed = ctx.build_norm(joined, "ffn_norm")
    logits = ctx.linear("ffn_gate_inp", normed)
    found = _group_experts(ctx, normed, logits, "exps")
    companions = _group_experts(ctx, found, logits, "chexps")
    return graph.add(graph.add(found, graph.scale(companions)), joined)


def _group_experts(ctx: GraphContext, source: Tensor, logits: Tensor, kind: str) -> Tensor:
    graph, (n_all, n_tokens) = ctx.graph, logits.ne[:2]
    n_experts = ctx.layer.weights[f"ffn_down_{kind}"].ne[2]
    probs = graph.like("soft_max", logits)
    chosen = graph.argsort_top_k(graph.unary(logits), min(ctx.layer.hparams.n_experts_used, n_experts))
    if n_experts != n_all:
        # The index of the companion is the index of the expert divided by `n_group_experts`, in F32.
        chosen = graph.cast(graph.scale(graph.cast(chosen, "f32")), "i32")
    rows = normalised(ctx, graph.get_rows(graph.reshape(probs, 1, n_all, n_tokens), chosen))
    if ctx.hparams.scales_experts:
        rows = graph.scale(rows)
    graph.build_forward_expand(rows)
    return weighted_sum(ctx, graph.reshape(source, source.ne[0], 1, n_tokens), chosen, rows, kind=kind)
