"""Layers of attention and feed-forward, as most architectures build them; a `Style` says how one departs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from engine.memory.compute_graph.experts import experts
from engine.memory.compute_graph.graph import Tensor
from engine.memory.compute_graph.numbers import Rope
from engine.memory.compute_graph.scheduler import HOST
from engine.memory.compute_graph.sketch import Masks, Placed, Sketch


@dataclass(frozen=True, slots=True)
class Style:
    """How an architecture's graph departs from llama's.

    `layer_norm`: norms subtract the mean, which needs a tensor of its own; with `file_decides_norm` they do where the
    file has no epsilon for the other kind; `rope`: see `Rope`;
    `qk_norm`: whether norms of queries and keys come before or after turning, "flat" is before heads are told apart;
    `parallel`: feed-forward stands beside attention and reads the layer's "input" norm, or one "apart";
    `parallel_sum`: the order in which the three terms of such a layer are added;
    `post_norm`: the norm behind attention is applied to its output, not to the sum with the residual;
    `late_rows`: wanted rows are picked after the last layer, before or behind the last norm, or in the last layer
    behind the norm of attention's output, or never; by default in the last layer right behind attention;
    `early_router`: experts are chosen by what the layer gets; `residual_first`: which sums begin with the residual;
    `input_scale`: embeddings are scaled or normalised; `scaled_q`: queries are scaled before attention;
    `scaled_sums`: what a layer adds to its input is scaled whatever the file says; `scaled_output`: so is what the
    output matrix gets;
    `late_softmax`: weights of experts are made after the choice; `weigh_first`: they are applied to the input;
    `normalise`: they are made to add up to 1, None where the file tells; `steps`: operations of an activation without
    a gate; `bare_norms`: norms have no weights; `bare_end`: none stands before the output matrix; `copies_states`:
    what a delta net's convolution keeps is copied first; `input_norm`:
    embeddings are normalised with weights of their own;
    `ignores_experts`: the graph has a dense part even where the file has experts;
    `plain_indexer`: what an indexer compares is not turned by a Hadamard matrix;
    `pinned_streams`: residual streams come before what the feed-forward part reads of them, and are made on the layer's
    device;
    `scales_unturned`: queries that are not turned are scaled by their position;
    `positions`: per token, 0 where the file tells; `position_table`: a learnt embedding of the position is added to
    the token's;
    `embeds`: what the layers make of the tokens is the result, without an output matrix;
    `reads_embedding`: the output matrix is the token embedding where that is, in host memory.
    """

    layer_norm: bool = False
    file_decides_norm: bool = False
    rope: Rope = "all"
    qk_norm: Literal["before", "after", "flat"] = "before"
    parallel: Literal["", "input", "apart"] = ""
    parallel_sum: Literal[
        "attention ffn input", "ffn attention input", "ffn input attention", "ffn (attention input)"
    ] = "attention ffn input"
    post_norm: bool = True
    late_rows: Literal["", "before_norm", "after_norm", "after_post_norm", "never"] = ""
    early_router: bool = False
    input_scale: bool = False
    late_softmax: bool = False
    normalise: bool | None = True
    residual_first: Literal["", "first", "second", "both"] = ""
    weigh_first: bool = False
    scaled_q: bool = False
    scaled_sums: bool = False
    scaled_output: bool = False
    steps: int = 1
    positions: int = 1
    position_table: bool = False
    bare_norms: bool = False
    bare_end: bool = False
    copies_states: bool = False
    input_norm: bool = False
    ignores_experts: bool = False
    plain_indexer: bool = False
    pinned_streams: bool = False
    scales_unturned: bool = False
    embeds: bool = False
    reads_embedding: bool = False


@dataclass(frozen=True, slots=True)
class Inputs:
    """What every layer reads besides its predecessor. `unused_rows`: states of sequences that are not in the batch,
    none in the worst case; `output`: memory of the output layer."""

    positions: Tensor
    embeddings: Tensor
    output_rows: Tensor
    full: Masks
    sliding: Masks | None
    indexer: Masks | None = None
    state_rows: Tensor | None = None
    unused_rows: Tensor | None = None
    q_scale: Tensor | None = None
    output: str = HOST

    def masks_of(self, layer: Placed) -> Masks:
        return self.sliding if layer.numbers.is_swa and self.sliding is not None else self.full


def attention(sketch: Sketch, style: Style, inputs: Inputs, index: int, current: Tensor) -> Tensor:
    """Return the attention of the layer at the place `index` to its normalised input."""
    graph, masks = sketch.graph, inputs.masks_of(sketch.layer)
    q, k, v = turned_projections(sketch, style, inputs, current)
    gate = graph.mul_mat(sketch.weight("attn_gate"), current) if sketch.has("attn_gate") else None
    out = None if gate is not None or sketch.has("attn_sub_norm") else "attn_output"
    if not sketch.has_cache:
        return sketch.attend_batch(masks, q, k, v, out)
    found = sketch.attend(
        masks, q, k, v, index=index, sliding=inputs.sliding is not None, sinks=sketch.maybe("attn_sinks"), out=out
    )
    if gate is not None:
        found = sketch.linear("attn_output", graph.mul(found, graph.unary(gate)))
    elif out is None:
        found = sketch.linear("attn_output", sketch.norm(found, "attn_sub_norm"))
    return found


def turned_projections(sketch: Sketch, style: Style, inputs: Inputs, current: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values as (head, heads, tokens): normalised, turned and scaled as the style says."""
    graph, numbers = sketch.graph, sketch.layer.numbers
    if style.qk_norm == "flat":
        q, k, v = sketch.projections(current, flat=True)
        q, k = _normed_pair(sketch, style, q, k)
        q = graph.reshape(q, numbers.head_k, numbers.n_head, q.ne[1])
        k = graph.reshape(k, numbers.head_k, numbers.n_head_kv, k.ne[1])
        v = graph.reshape(v, numbers.head_v, numbers.n_head_kv, v.ne[1])
    else:
        q, k, v = sketch.projections(current)
    if style.qk_norm == "before":
        q, k = _normed_pair(sketch, style, q, k)
    if numbers.has_rope:
        q, k = sketch.rope(q, inputs.positions), sketch.rope(k, inputs.positions)
    elif inputs.q_scale is not None:
        q = graph.mul(q, inputs.q_scale)
    if style.qk_norm == "after":
        q, k = _normed_pair(sketch, style, q, k)
    if style.scaled_q:
        q = graph.scale(q)
    return q, k, v


def _normed_pair(sketch: Sketch, style: Style, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys, normalised where the layer has weights for it."""
    layer_norm = style.layer_norm
    return (
        _norm_if(sketch, q, "attn_q_norm", layer_norm=layer_norm),
        _norm_if(sketch, k, "attn_k_norm", layer_norm=layer_norm),
    )


def _norm_if(sketch: Sketch, source: Tensor, stem: str, *, layer_norm: bool) -> Tensor:
    return sketch.norm(source, stem, layer_norm=layer_norm) if sketch.has(stem) else source


def feed_forward(
    sketch: Sketch, style: Style, current: Tensor, logits: Tensor | None = None, chosen: Tensor | None = None
) -> Tensor:
    """Return the feed-forward part: dense, or experts with those that every token takes; `logits`: of the router;
    `chosen`: experts that are chosen without it."""
    graph = sketch.graph
    if not sketch.has("ffn_down_exps"):
        return sketch.feed_forward(current, steps=style.steps)
    if style.ignores_experts:
        return graph.unary(current)
    normalise = sketch.numbers.normalises_experts if style.normalise is None else style.normalise
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
        late_softmax=style.late_softmax,
        normalise=normalise,
        weigh_first=style.weigh_first,
        activations=style.steps,
    )
    if sketch.has("ffn_routed_norm"):
        found = sketch.norm(found, "ffn_routed_norm")
    if sketch.has(f"ffn_{kind}_up"):
        found = graph.mul_mat(sketch.weight(f"ffn_{kind}_up"), found)
    if sketch.has("ffn_down_shexp"):
        gate = None
        if sketch.has("ffn_gate_inp_shexp"):
            gate = graph.mul_mat(sketch.weight("ffn_gate_inp_shexp", current.ne[0], 1), current)
            gate = graph.like("div", graph.unary(gate), gate)
        shared = sketch.feed_forward(current, "_shexp", steps=style.steps)
        if gate is not None:
            shared = graph.mul(shared, gate)
        found = graph.add(found, shared)
    return found


Mixer = Callable[[Sketch, Style, Inputs, int, Tensor], Tensor]
"""What mixes tokens in a layer: attention or a recurrent scan. Takes the place of the layer and its normed input."""


def decoder_layer(
    sketch: Sketch, style: Style, inputs: Inputs, index: int, previous: Tensor, mixer: Mixer = attention
) -> Tensor:
    """Return the output of one layer: `mixer`, then feed-forward if the layer has one."""
    graph = sketch.graph
    picks = sketch.layer.is_last and style.late_rows in ("", "after_post_norm")
    logits = sketch.linear("ffn_gate_inp", previous) if style.early_router else None
    residual = normed = previous
    if style.bare_norms or sketch.has("attn_norm"):
        normed = sketch.norm(previous, "attn_norm", layer_norm=style.layer_norm)
    current = normed
    if sketch.has("attn_norm_2"):
        current = sketch.norm(previous, "attn_norm_2", layer_norm=style.layer_norm)
    current = mixer(sketch, style, inputs, index, current)
    if style.late_rows == "after_post_norm":
        current = sketch.norm(current, "post_attention_norm")
    if picks:
        current = graph.get_rows(current, inputs.output_rows)
        residual = graph.get_rows(residual, inputs.output_rows)
        if style.parallel == "input":
            normed = graph.get_rows(normed, inputs.output_rows)
        if logits is not None:
            logits = graph.get_rows(logits, inputs.output_rows)
    if style.parallel:
        return _parallel_sum(sketch, style, current, normed, residual)
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
    current = feed_forward(sketch, style, current, logits)
    if sketch.has("post_ffw_norm"):
        current = sketch.norm(current, "post_ffw_norm", pin=False)
    return _sum(sketch, style.residual_first in ("second", "both"), graph.scale(current) if scales else current, joined)


def _parallel_sum(sketch: Sketch, style: Style, attended: Tensor, normed: Tensor, residual: Tensor) -> Tensor:
    graph = sketch.graph
    if style.parallel == "apart":
        normed = sketch.norm(residual, "ffn_norm", layer_norm=style.layer_norm)
    terms = {"ffn": feed_forward(sketch, style, normed), "attention": attended, "input": residual}
    if style.parallel_sum == "ffn (attention input)":
        return graph.add(terms["ffn"], graph.add(attended, residual))
    first, second, third = (terms[name] for name in style.parallel_sum.split())
    return graph.add(graph.add(first, second), third)


def _sum(sketch: Sketch, residual_first: bool, current: Tensor, residual: Tensor) -> Tensor:
    """Return the sum, whose place in memory is that of the first term if it can be."""
    return sketch.graph.add(residual, current) if residual_first else sketch.graph.add(current, residual)


def single_part_layer(
    sketch: Sketch, style: Style, inputs: Inputs, index: int, previous: Tensor, mixer: Mixer = attention
) -> Tensor:
    """Return the output of a layer that is either a mixer or a feed-forward part."""
    graph = sketch.graph
    current = sketch.norm(previous, "attn_norm", layer_norm=style.layer_norm)
    if sketch.has("attn_output") or sketch.layer.numbers.is_recurrent:
        current = mixer(sketch, style, inputs, index, current)
    else:
        current = feed_forward(sketch, style, current)
    return graph.add(current, previous)
