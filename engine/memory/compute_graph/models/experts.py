"""Experts: which ones the router picks for each token, and the sum of what they return."""

from __future__ import annotations

from typing import Literal

from engine.memory.compute_graph.building.gating import gated
from engine.memory.compute_graph.building.sketch import Sketch
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
