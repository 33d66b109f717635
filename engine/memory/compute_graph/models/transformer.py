"""Layers of attention and feed-forward, as most architectures build them; a style says how one departs."""

from __future__ import annotations

from engine.memory.compute_graph.building.attend import attend, attend_batch, projections
from engine.memory.compute_graph.building.sketch import Sketch
from engine.memory.compute_graph.ggml.graph import Tensor
from engine.memory.compute_graph.models.experts import experts


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
