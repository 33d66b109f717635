"""Layers of attention and feed-forward, as most architectures build them; a style says how one departs.

Mirrors `build_attn`, `build_ffn` and `build_moe_ffn` of llama-graph.cpp and the graphs of src/models/llama.cpp,
bert.cpp and grovemoe.cpp.
"""

from __future__ import annotations

from typing import Literal

from engine.memory.compute_graph.building.attention import attend, attend_batch, projections
from engine.memory.compute_graph.building.context import Sketch, gated
from engine.memory.compute_graph.ggml.graph import Tensor


def experts(
    sketch: Sketch,
    source: Tensor,
    *,
    logits: Tensor | None = None,
    chosen: Tensor | None = None,
    weighting: Literal["", "after_choice", "on_input"] = "",
    normalise: bool = False,
    activations: int = 1,
) -> Tensor:
    """Return the sum of the experts that the router picks for each token, or of those that are `chosen` already.

    `weighting`: see `Style`; `activations`: operations of an activation without a gate.
    """
    graph, numbers = sketch.graph, sketch.numbers
    late_softmax, weigh_first = weighting == "after_choice", weighting == "on_input"
    n_used, (n_embd, n_tokens) = sketch.layer.numbers.n_experts_used, source.ne[:2]
    n_experts = sketch.layer.weights["ffn_down_exps"].ne[2]
    logits = sketch.linear("ffn_gate_inp", source) if logits is None else logits
    bends = numbers.bends_experts or weigh_first
    odds = logits if late_softmax else graph.unary(logits) if bends else graph.like("soft_max", logits)
    bias = sketch.maybe("exp_probs_b.bias") or sketch.maybe("exp_probs_b")
    choice = odds if bias is None else graph.add(odds, bias)
    if weigh_first:
        choice = logits
    if numbers.n_expert_groups > 1:
        choice = _best_groups(sketch, choice, n_experts)
    if chosen is None:
        chosen = graph.top_k(choice, n_used)
    rows = graph.get_rows(graph.reshape(odds, 1, n_experts, n_tokens), chosen)
    if late_softmax:
        rows = graph.like("soft_max", graph.reshape(rows, n_used, n_tokens))
        rows = graph.reshape(rows, 1, n_used, n_tokens)
    if normalise:
        rows = normalised(sketch, rows)
    if numbers.scales_experts:
        rows = graph.scale(rows)
    graph.expand(rows)
    current = graph.reshape(source, n_embd, 1, n_tokens)
    if weigh_first:
        current = graph.mul(graph.repeat(current, n_embd, n_used, n_tokens), rows)
    return weighted_sum(sketch, current, chosen, None if weigh_first else rows, activations=activations)


def normalised(sketch: Sketch, rows: Tensor) -> Tensor:
    """Return the weights of the chosen experts, made to add up to 1."""
    graph, (_, n_used, n_tokens, _) = sketch.graph, rows.ne
    flat = graph.reshape(rows, n_used, n_tokens)
    flat = graph.like("div", flat, graph.like("clamp", graph.sum_rows(flat)))
    return graph.reshape(flat, 1, n_used, n_tokens)


def weighted_sum(
    sketch: Sketch, source: Tensor, chosen: Tensor, rows: Tensor | None, *, kind: str = "exps", activations: int = 1
) -> Tensor:
    """Return what the `chosen` experts make of `source`, added up: weighted with `rows` if they are not yet.

    `kind`: the end of the names of their weights; `activations`: operations of an activation without a gate.
    """
    graph = sketch.graph
    current = _activations(sketch, source, chosen, kind, activations)
    current = _linear(sketch, f"ffn_down_{kind}", current, chosen)
    if rows is not None:
        current = graph.mul(current, rows)
    graph.expand(current)
    n_embd, n_used, n_tokens, _ = current.ne
    views = [graph.expand(graph.view(current, (n_embd, n_tokens), (0, current.nb[2]))) for _ in range(n_used)]
    total = views[0]
    for view in views[1:]:
        total = graph.expand(graph.add(total, view))
    return graph.cont(total) if n_used == 1 else total


def _linear(sketch: Sketch, stem: str, source: Tensor, chosen: Tensor) -> Tensor:
    found = sketch.graph.mul_mat_id(sketch.weight(stem), source, chosen)
    found.is_precise = sketch.style.precise_experts and stem.startswith("ffn_down")
    if "experts" in sketch.numbers.scaled and sketch.has(f"{stem}.scale"):
        found = sketch.graph.mul(found, _scales(sketch, f"{stem}.scale", chosen))
    bias = sketch.maybe(f"{stem}.bias")
    return found if bias is None else sketch.graph.like("add_id", found, bias, chosen)


def _scales(sketch: Sketch, stem: str, chosen: Tensor) -> Tensor:
    """Return the scale of each of the `chosen` experts."""
    graph, weight = sketch.graph, sketch.weight(stem)
    scales = graph.repeat(graph.reshape(weight, 1, weight.ne[0], 1), 1, weight.ne[0], chosen.ne[1])
    return graph.get_rows(scales, chosen)


def _activations(sketch: Sketch, source: Tensor, chosen: Tensor, kind: str, activations: int) -> Tensor:
    graph = sketch.graph
    if sketch.has(f"ffn_gate_up_{kind}"):
        joined = _linear(sketch, f"ffn_gate_up_{kind}", source, chosen)
        ne = (joined.ne[0] // 2, *joined.ne[1:])
        return graph.glu(graph.view(joined, ne, joined.nb), graph.view(joined, ne, joined.nb))
    up = _linear(sketch, f"ffn_up_{kind}", source, chosen)
    if sketch.has(f"ffn_gate_{kind}"):
        gate = _linear(sketch, f"ffn_gate_{kind}", source, chosen)
        return gated(graph, sketch.layer.numbers.expert_gating, gate, up)
    for _ in range(activations):
        up = graph.unary(up)
    return up


def _best_groups(sketch: Sketch, odds: Tensor, n_experts: int) -> Tensor:
    """Return the odds with those of the less likely groups of experts put out of reach."""
    graph, groups, n_tokens = sketch.graph, sketch.numbers.n_expert_groups, odds.ne[1]
    each = n_experts // groups
    grouped = graph.reshape(odds, each, groups, n_tokens)
    best = graph.top_k(grouped, 2)
    best = graph.get_rows(graph.reshape(grouped, 1, each, groups, n_tokens), best)
    scores = graph.sum_rows(graph.reshape(best, best.ne[1], best.ne[2], best.ne[3]))
    chosen = graph.top_k(graph.reshape(scores, scores.ne[1], scores.ne[2]), sketch.numbers.n_groups_used)
    inside = graph.get_rows(grouped, chosen)
    target = graph.like("fill", grouped)
    written = Tensor("set_rows", "f32", target.ne, target.nb, [inside, chosen, target], target)
    return graph.reshape(written, n_experts, n_tokens)


def attention(sketch: Sketch, current: Tensor) -> Tensor:
    """Return the attention of a layer to its normalised input."""
    graph, masks = sketch.graph, sketch.masks
    q, k, v = turned_projections(sketch, current)
    gate = graph.mul_mat(sketch.weight("attn_gate"), current) if sketch.has("attn_gate") else None
    out = None if gate is not None or sketch.has("attn_sub_norm") else "attn_output"
    if not sketch.has_cache:
        return attend_batch(sketch, masks, q, k, v, out)
    found = attend(
        sketch, masks, q, k, v, sliding=sketch.inputs.sliding is not None, sinks=sketch.maybe("attn_sinks"), out=out
    )
    if gate is not None:
        found = sketch.linear("attn_output", _gated(sketch, found, graph.unary(gate)))
    elif out is None:
        found = sketch.linear("attn_output", sketch.norm(found, "attn_sub_norm"))
    return graph.scale(found) if sketch.style.scaled_attention else found


def _gated(sketch: Sketch, found: Tensor, gate: Tensor) -> Tensor:
    """Return what attention found, times a gate of each element, or of each head."""
    graph, numbers, (width, n_tokens) = sketch.graph, sketch.layer.numbers, found.ne[:2]
    if gate.ne[0] == width:
        return graph.mul(found, gate)
    by_head = graph.reshape(found, numbers.head_v, numbers.n_head, n_tokens)
    product = graph.mul(by_head, graph.reshape(gate, 1, numbers.n_head, n_tokens))
    return graph.reshape(product, width, n_tokens)


def turned_projections(sketch: Sketch, current: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values as (head, heads, tokens): normalised, turned and scaled as the style says."""
    graph, numbers, style = sketch.graph, sketch.layer.numbers, sketch.style
    if style.qk_norm == "flat":
        q, k, v = projections(sketch, current, flat=True)
        q, k = _normed_pair(sketch, q, k)
        q = graph.reshape(q, numbers.head_k, numbers.n_head, q.ne[1])
        k = graph.reshape(k, numbers.head_k, numbers.n_head_kv, k.ne[1])
        v = graph.reshape(v, numbers.head_v, numbers.n_head_kv, v.ne[1])
    else:
        q, k, v = projections(sketch, current)
    if style.qk_norm == "before":
        q, k = _normed_pair(sketch, q, k)
    if numbers.has_rope:
        q, k = sketch.rope(q, sketch.inputs.positions), sketch.rope(k, sketch.inputs.positions)
    elif sketch.inputs.q_scale is not None:
        q = graph.mul(q, sketch.inputs.q_scale)
    if style.qk_norm == "after":
        q, k = _normed_pair(sketch, q, k)
    if style.scaled_q:
        q = graph.scale(q)
    return q, k, v


def _normed_pair(sketch: Sketch, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys, normalised where the layer has weights for it."""
    layer_norm = sketch.style.layer_norm
    return (
        _norm_if(sketch, q, "attn_q_norm", layer_norm=layer_norm),
        _norm_if(sketch, k, "attn_k_norm", layer_norm=layer_norm),
    )


def _norm_if(sketch: Sketch, source: Tensor, stem: str, *, layer_norm: bool) -> Tensor:
    return sketch.norm(source, stem, layer_norm=layer_norm) if sketch.has(stem) else source


def feed_forward(sketch: Sketch, current: Tensor, logits: Tensor | None = None, chosen: Tensor | None = None) -> Tensor:
    """Return the feed-forward part: dense, or experts with those that every token takes; `logits`: of the router;
    `chosen`: experts that are chosen without it."""
    graph, style = sketch.graph, sketch.style
    if not sketch.has("ffn_down_exps"):
        return sketch.feed_forward(current, activations=style.activations)
    if style.ignores_experts:
        return graph.unary(current)
    normalise = sketch.numbers.normalises_experts if style.normalises is None else style.normalises
    narrow = current
    kind = "routed" if sketch.has("ffn_routed_down") else "latent"
    if sketch.has(f"ffn_{kind}_down"):
        logits = sketch.linear("ffn_gate_inp", current)
        narrow = graph.mul_mat(sketch.weight(f"ffn_{kind}_down"), current)
    found = experts(
        sketch,
        narrow,
        logits=logits,
        chosen=chosen,
        weighting=style.weighting,
        normalise=normalise,
        activations=style.activations,
    )
    if sketch.has("ffn_routed_norm"):
        found = sketch.norm(found, "ffn_routed_norm")
    if sketch.has(f"ffn_{kind}_up"):
        found = graph.mul_mat(sketch.weight(f"ffn_{kind}_up"), found)
    if sketch.has("ffn_down_shexp"):
        gate = None
        if sketch.has("ffn_gate_inp_shexp"):
            gate = graph.mul_mat(sketch.weight("ffn_gate_inp_shexp", current.ne[0], 1), current)
            activated = graph.unary(gate)
            gate = graph.like("div", activated, gate) if style.divided_gate else activated
        shared = sketch.feed_forward(current, "_shexp", activations=style.activations)
        if gate is not None:
            shared = graph.mul(shared, gate)
        found = graph.add(found, shared)
    return found


def decoder_layer(sketch: Sketch, previous: Tensor) -> Tensor:
    """Return the output of one layer: its mixer, then feed-forward if the layer has one."""
    graph, style = sketch.graph, sketch.style
    picks = sketch.layer.is_last and style.late_rows in ("", "after_post_norm")
    logits = sketch.linear("ffn_gate_inp", previous) if style.early_router else None
    residual = normed = previous
    if style.bare_norms or sketch.has("attn_norm"):
        normed = sketch.norm(previous, "attn_norm", layer_norm=style.layer_norm)
    current = normed
    if sketch.has("attn_norm_2"):
        current = sketch.norm(previous, "attn_norm_2", layer_norm=style.layer_norm)
    current = sketch.mixed(current)
    if style.late_rows == "after_post_norm":
        current = sketch.norm(current, "post_attention_norm")
    if picks:
        current = graph.get_rows(current, sketch.inputs.output_rows)
        residual = graph.get_rows(residual, sketch.inputs.output_rows)
        if style.parallel == "input":
            normed = graph.get_rows(normed, sketch.inputs.output_rows)
        if logits is not None:
            logits = graph.get_rows(logits, sketch.inputs.output_rows)
    if style.parallel:
        return _parallel_sum(sketch, current, normed, residual)
    if style.post_norm and style.late_rows != "after_post_norm" and sketch.has("post_attention_norm"):
        current = sketch.norm(current, "post_attention_norm")
    scales = sketch.numbers.scales_residuals or style.scaled_sums
    joined = _sum(
        sketch, style.residual_first in ("first", "both"), graph.scale(current) if scales else current, residual
    )
    if not any(sketch.has(stem) for stem in ("ffn_up", "ffn_down", "ffn_down_exps")):
        return joined
    current = joined
    stems = [stem for stem in ("ffn_norm", "attn_output_norm") if sketch.has(stem)]
    if not style.post_norm:
        stems.append("post_attention_norm")
    if stems or style.bare_norms:
        current = sketch.norm(joined, *(stems or ["ffn_norm"]), layer_norm=style.layer_norm)
    current = feed_forward(sketch, current, logits)
    if sketch.has("post_ffw_norm"):
        current = sketch.norm(current, "post_ffw_norm", pin=False)
    return _sum(sketch, style.residual_first in ("second", "both"), graph.scale(current) if scales else current, joined)


def _parallel_sum(sketch: Sketch, attended: Tensor, normed: Tensor, residual: Tensor) -> Tensor:
    graph, style = sketch.graph, sketch.style
    if style.parallel == "apart":
        normed = sketch.norm(residual, "ffn_norm", layer_norm=style.layer_norm)
    terms = {"ffn": feed_forward(sketch, normed), "attention": attended, "input": residual}
    if style.parallel_sum == "ffn (attention input)":
        return graph.add(terms["ffn"], graph.add(attended, residual))
    first, second, third = (terms[name] for name in style.parallel_sum.split())
    return graph.add(graph.add(first, second), third)


def _sum(sketch: Sketch, residual_first: bool, current: Tensor, residual: Tensor) -> Tensor:
    """Return the sum, whose place in memory is that of the first term if it can be."""
    return sketch.graph.add(residual, current) if residual_first else sketch.graph.add(current, residual)


def single_part_layer(sketch: Sketch, previous: Tensor) -> Tensor:
    """Return the output of a layer that is either its mixer or a feed-forward part."""
    graph = sketch.graph
    current = sketch.norm(previous, "attn_norm", layer_norm=sketch.style.layer_norm)
    if sketch.has("attn_output") or sketch.layer.numbers.is_recurrent:
        current = sketch.mixed(current)
    else:
        current = feed_forward(sketch, current)
    return graph.add(current, previous)


def post_norm_layer(sketch: Sketch, previous: Tensor) -> Tensor:
    """Return the output of one layer."""
    graph = sketch.graph
    current, residual = sketch.mixed(previous), previous
    if sketch.layer.is_last:
        current = graph.get_rows(current, sketch.inputs.output_rows)
        residual = graph.get_rows(residual, sketch.inputs.output_rows)
    current = sketch.norm(graph.add(current, residual), "attn_output_norm", layer_norm=sketch.style.layer_norm)
    if sketch.has("attn_norm_2"):
        current = sketch.norm(graph.add(current, residual), "attn_norm_2", layer_norm=sketch.style.layer_norm)
    joined = graph.add(feed_forward(sketch, current), current)
    return sketch.norm(joined, "layer_output_norm", layer_norm=sketch.style.layer_norm)


def grouped_experts_layer(sketch: Sketch, previous: Tensor) -> Tensor:
    """Return attention, then experts and, of each chosen one's group, the companion."""
    graph = sketch.graph
    current = sketch.mixed(sketch.norm(previous, "attn_norm"))
    residual = previous
    if sketch.layer.is_last:
        current, residual = (graph.get_rows(tensor, sketch.inputs.output_rows) for tensor in (current, previous))
    joined = graph.add(current, residual)
    normed = sketch.norm(joined, "ffn_norm")
    logits = sketch.linear("ffn_gate_inp", normed)
    found = _group_experts(sketch, normed, logits, "exps")
    companions = _group_experts(sketch, found, logits, "chexps")
    return graph.add(graph.add(found, graph.scale(companions)), joined)


def _group_experts(sketch: Sketch, source: Tensor, logits: Tensor, kind: str) -> Tensor:
    graph, (n_all, n_tokens) = sketch.graph, logits.ne[:2]
    n_experts = sketch.layer.weights[f"ffn_down_{kind}"].ne[2]
    odds = graph.like("soft_max", logits)
    chosen = graph.top_k(graph.unary(logits), min(sketch.layer.numbers.n_experts_used, n_experts))
    if n_experts != n_all:
        # The number of an expert becomes that of its group, by way of a division of floating point numbers.
        chosen = graph.cast(graph.scale(graph.cast(chosen, "f32")), "i32")
    rows = normalised(sketch, graph.get_rows(graph.reshape(odds, 1, n_all, n_tokens), chosen))
    if sketch.numbers.scales_experts:
        rows = graph.scale(rows)
    graph.expand(rows)
    return weighted_sum(sketch, graph.reshape(source, source.ne[0], 1, n_tokens), chosen, rows, kind=kind)
