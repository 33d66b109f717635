"""Layers of attention and feed-forward, as most architectures build them; a `Style` says how one departs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from engine.memory.compute_graph.graph import Tensor
from engine.memory.compute_graph.numbers import Rope
from engine.memory.compute_graph.sketch import Masks, Placed, Sketch


@dataclass(frozen=True, slots=True)
class Style:
    """How an architecture's graph departs from llama's.

    `layer_norm`: norms that subtract the mean, which need a tensor of their own; `rope`: see `Rope`; `qk_norm`: where norms of queries and keys come, "flat" being before heads are told apart;
    `parallel`: feed-forward reads the layer's "input" norm beside attention, or has its "own" norm of the input;
    `post_norm`: the norm behind attention is applied to its output; `late_rows`: wanted rows are picked after the last
    layer; `input_scale`: embeddings are scaled; `gated`: attention's output is multiplied by a gate;
    `shared_gate`: the shared expert has one; `late_softmax`: weights of experts are normalised after the choice;
    `normalise`: so are they with a softmax before it, None where the file tells; `residual_first`: sums begin with the
    residual; `steps`: element-wise steps of an activation without a gate; `positions`: per token;
    `position_table`: a learnt embedding of the position is added to the token's.
    """

    layer_norm: bool = False
    rope: Rope = "all"
    qk_norm: Literal["before", "after", "flat"] = "before"
    parallel: Literal["", "input", "own"] = ""
    post_norm: bool = True
    late_rows: Literal["", "before_norm", "after_norm"] = ""
    input_scale: bool = False
    late_softmax: bool = False
    normalise: bool | None = True
    residual_first: bool = False
    weigh_first: bool = False
    scaled_q: bool = False
    steps: int = 1
    positions: int = 1
    position_table: bool = False


@dataclass(frozen=True, slots=True)
class Inputs:
    """What every layer reads besides its predecessor. `unused_rows`: states of sequences that are not in the batch,
    none in the worst case."""

    positions: Tensor
    output_rows: Tensor
    full: Masks
    sliding: Masks | None
    state_rows: Tensor | None = None
    unused_rows: Tensor | None = None

    def masks_of(self, layer: Placed) -> Masks:
        return self.sliding if layer.numbers.is_swa and self.sliding is not None else self.full


def attention(sketch: Sketch, style: Style, inputs: Inputs, index: int, current: Tensor) -> Tensor:
    """Return the attention of the layer at the place `index` to its normalised input."""
    graph, layer = sketch.graph, sketch.layer
    numbers = layer.numbers
    if style.qk_norm == "flat":
        q, k, v = sketch.projections(current, flat=True)
        q, k = _norm_if(sketch, q, "attn_q_norm"), _norm_if(sketch, k, "attn_k_norm")
        q = graph.reshape(q, numbers.head_k, numbers.n_head, q.ne[1])
        k = graph.reshape(k, numbers.head_k, numbers.n_head_kv, k.ne[1])
        v = graph.reshape(v, numbers.head_v, numbers.n_head_kv, v.ne[1])
    else:
        q, k, v = sketch.projections(current)
    gate = None
    if sketch.has("attn_gate"):
        gate = graph.mul_mat(sketch.weight("attn_gate"), current)
    if style.qk_norm == "before":
        q, k = _norm_if(sketch, q, "attn_q_norm"), _norm_if(sketch, k, "attn_k_norm")
    if numbers.has_rope:
        q, k = sketch.rope(q, inputs.positions), sketch.rope(k, inputs.positions)
    if style.qk_norm == "after":
        q, k = _norm_if(sketch, q, "attn_q_norm"), _norm_if(sketch, k, "attn_k_norm")
    if style.scaled_q:
        q = graph.scale(q)
    out = None if gate is not None else "attn_output"
    if not sketch.has_cache:
        return sketch.attend_batch(inputs.masks_of(layer), q, k, v, out)
    found = sketch.attend(
        inputs.masks_of(layer), q, k, v, index=index, sliding=inputs.sliding is not None,
        sinks=sketch.maybe("attn_sinks"), out=out,
    )  # fmt: skip
    if gate is not None:
        found = sketch.linear("attn_output", graph.mul(found, graph.unary(gate)))
    return found


def _norm_if(sketch: Sketch, source: Tensor, stem: str) -> Tensor:
    return sketch.norm(source, stem) if sketch.has(stem) else source


def feed_forward(sketch: Sketch, style: Style, current: Tensor) -> Tensor:
    """Return the feed-forward part: dense, or experts with those that every token takes."""
    graph = sketch.graph
    if not sketch.has("ffn_gate_inp"):
        return sketch.feed_forward(current, steps=style.steps)
    normalise = sketch.numbers.normalises_experts if style.normalise is None else style.normalise
    found = sketch.experts(
        current,
        late_softmax=style.late_softmax,
        normalise=normalise,
        weigh_first=style.weigh_first,
        activations=style.steps,
    )
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
    graph, layer = sketch.graph, sketch.layer
    picks = layer.is_last and not style.late_rows
    residual = previous
    normed = previous
    if sketch.has("attn_norm"):
        normed = sketch.norm(previous, "attn_norm", layer_norm=style.layer_norm)
    current = normed
    if sketch.has("attn_norm_2"):
        current = sketch.norm(previous, "attn_norm_2", layer_norm=style.layer_norm)
    current = mixer(sketch, style, inputs, index, current)
    if picks:
        current = graph.get_rows(current, inputs.output_rows)
        residual = graph.get_rows(residual, inputs.output_rows)
        if style.parallel == "input":
            normed = graph.get_rows(normed, inputs.output_rows)
    if style.parallel:
        if style.parallel == "own":
            normed = sketch.norm(residual, "ffn_norm", layer_norm=style.layer_norm)
        found = feed_forward(sketch, style, normed)
        return graph.add(graph.add(found, current), residual)
    if style.post_norm and sketch.has("post_attention_norm"):
        current = sketch.norm(current, "post_attention_norm")
    scales = sketch.numbers.scales_residuals
    joined = _sum(sketch, style, graph.scale(current) if scales else current, residual)
    if not any(sketch.has(stem) for stem in ("ffn_up", "ffn_down", "ffn_down_exps")):
        return joined
    current = joined
    stems = [stem for stem in ("ffn_norm", "attn_output_norm") if sketch.has(stem)]
    if not style.post_norm:
        stems.append("post_attention_norm")
    if stems:
        current = sketch.norm(joined, *stems, layer_norm=style.layer_norm)
    current = feed_forward(sketch, style, current)
    if sketch.has("post_ffw_norm"):
        current = sketch.norm(current, "post_ffw_norm", pin=False)
    return _sum(sketch, style, graph.scale(current) if scales else current, joined)


def _sum(sketch: Sketch, style: Style, current: Tensor, residual: Tensor) -> Tensor:
    """Return the sum, whose place in memory is that of the first term if it can be."""
    return sketch.graph.add(residual, current) if style.residual_first else sketch.graph.add(current, residual)


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
