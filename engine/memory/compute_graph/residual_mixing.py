"""Layers that read a mixture of the residuals of earlier ones (Kimi K3)."""

from __future__ import annotations

from engine.memory.compute_graph.graph import Tensor
from engine.memory.compute_graph.latent import latent_attention
from engine.memory.compute_graph.sketch import Sketch
from engine.memory.compute_graph.transformer import Inputs, Mixer, Style, feed_forward

_KEPT = "residuals"
"""Name of the kept residuals among what layers hand on."""


def residual_mixing_layer(
    sketch: Sketch, style: Style, inputs: Inputs, index: int, previous: Tensor, mixer: Mixer = latent_attention
) -> Tensor:
    """Return the output of a layer; every few layers the residual is kept and begins anew."""
    graph, period = sketch.graph, sketch.numbers.residual_period
    current = _mixed(sketch, previous, "attn_res_score")
    keeps = period > 0 and sketch.layer.index % period == 0
    if keeps:
        _keep(sketch, previous)
    current = mixer(sketch, style, inputs, index, graph.expand(sketch.norm(current, "attn_norm")))
    residual = current if keeps else graph.add(previous, current)
    current = sketch.norm(_mixed(sketch, residual, "ffn_res_score"), "ffn_norm")
    return graph.add(residual, feed_forward(sketch, style, current))


def mixed_rows(sketch: Sketch, inputs: Inputs, output: str, current: Tensor) -> Tensor:
    """Return the wanted rows of the last mixture."""
    if "output_res_score" in sketch.outer:
        current = _mixture(sketch, current, sketch.outer_weight(sketch.outer["output_res_score"], output))
    return sketch.graph.get_rows(current, inputs.output_rows)


def _keep(sketch: Sketch, residual: Tensor) -> None:
    graph, kept = sketch.graph, sketch.carried.get(_KEPT)
    residual = graph.reshape(residual, residual.ne[0], 1, residual.ne[1])
    sketch.carried[_KEPT] = residual if kept is None else graph.concat(kept, residual, 1)


def _mixed(sketch: Sketch, current: Tensor, stem: str) -> Tensor:
    return _mixture(sketch, current, sketch.weight(stem)) if _KEPT in sketch.carried else current


def _mixture(sketch: Sketch, current: Tensor, weight: Tensor) -> Tensor:
    """Return the sum of kept residuals and `current`, weighted by what `weight` makes of them."""
    graph, kept, (n_embd, n_tokens) = sketch.graph, sketch.carried[_KEPT], current.ne[:2]
    count = kept.ne[1]
    scores, own = (graph.sum_rows(graph.mul(sketch.raw_norm(part), weight)) for part in (kept, current))
    odds = graph.like("soft_max", graph.concat(graph.reshape(scores, count, n_tokens), own, 0))
    of_kept, of_own = (graph.cont(graph.view(odds, (width, n_tokens), odds.nb)) for width in (count, 1))
    found = graph.new("weighted_sum", (n_embd, n_tokens), kept, of_kept)
    return graph.add(found, graph.mul(current, of_own))
