"""Layers that read a mixture of the residuals of earlier ones (Kimi K3)."""

from __future__ import annotations

from dataclasses import dataclass

from engine.memory.compute_graph.building.sketch import Sketch
from engine.memory.compute_graph.ggml.graph import Tensor
from engine.memory.compute_graph.models.transformer import feed_forward


@dataclass(frozen=True, slots=True)
class _Kept:
    """Residuals of earlier layers, side by side."""

    residuals: Tensor


def residual_mixing_layer(sketch: Sketch, previous: Tensor) -> Tensor:
    """Return the output of a layer; every few layers the residual is kept and begins anew."""
    graph, period = sketch.graph, sketch.numbers.residual_period
    current = _mixed(sketch, previous, "attn_res_score")
    keeps = period > 0 and sketch.layer.index % period == 0
    if keeps:
        _keep(sketch, previous)
    current = sketch.mixed(graph.expand(sketch.norm(current, "attn_norm")))
    residual = current if keeps else graph.add(previous, current)
    current = sketch.norm(_mixed(sketch, residual, "ffn_res_score"), "ffn_norm")
    return graph.add(residual, feed_forward(sketch, current))


def mixed_rows(sketch: Sketch, current: Tensor) -> Tensor:
    """Return the wanted rows of the last mixture."""
    if "output_res_score" in sketch.outer:
        weight = sketch.outer_weight(sketch.outer["output_res_score"], sketch.inputs.output)
        current = _mixture(sketch, current, weight)
    return sketch.graph.get_rows(current, sketch.inputs.output_rows)


def _keep(sketch: Sketch, residual: Tensor) -> None:
    graph, kept = sketch.graph, sketch.shared.find(_Kept)
    residual = graph.reshape(residual, residual.ne[0], 1, residual.ne[1])
    sketch.shared.put(_Kept(residual if kept is None else graph.concat(kept.residuals, residual, 1)))


def _mixed(sketch: Sketch, current: Tensor, stem: str) -> Tensor:
    return current if sketch.shared.find(_Kept) is None else _mixture(sketch, current, sketch.weight(stem))


def _mixture(sketch: Sketch, current: Tensor, weight: Tensor) -> Tensor:
    """Return the sum of kept residuals and `current`, weighted by what `weight` makes of them."""
    graph, kept, (n_embd, n_tokens) = sketch.graph, sketch.shared.get(_Kept).residuals, current.ne[:2]
    count = kept.ne[1]
    scores, own = (graph.sum_rows(graph.mul(sketch.raw_norm(part), weight)) for part in (kept, current))
    odds = graph.like("soft_max", graph.concat(graph.reshape(scores, count, n_tokens), own, 0))
    of_kept, of_own = (graph.cont(graph.view(odds, (width, n_tokens), odds.nb)) for width in (count, 1))
    found = graph.new("weighted_sum", (n_embd, n_tokens), kept, of_kept)
    return graph.add(found, graph.mul(current, of_own))
