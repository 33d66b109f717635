"""Activations with a gate: one operation, or several that limit or bend what goes in."""

from __future__ import annotations

from typing import Literal

from engine.memory.compute_graph.ggml.graph import Graph, Tensor

Gating = Literal["fused", "limited", "bent", "bent_both"]
"""`limited`: gate and values are cut off; `bent`: the gate, or both, go through a hyperbolic tangent."""


def gated(graph: Graph, kind: Gating, gate: Tensor, values: Tensor) -> Tensor:
    """Return `values` behind the activated `gate`."""
    if kind == "fused":
        return graph.glu(gate, values)
    if kind == "limited":
        return graph.mul(graph.like("clamp", graph.unary(gate)), graph.like("clamp", values))
    activated = graph.mul(_bent(graph, gate), graph.unary(gate))
    return graph.mul(activated, _bent(graph, values) if kind == "bent_both" else values)


def _bent(graph: Graph, source: Tensor) -> Tensor:
    return graph.scale(graph.unary(graph.scale(source)))
