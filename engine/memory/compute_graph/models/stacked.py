"""Layers of two stacks that run in turns (HRM Text)."""

from __future__ import annotations

from dataclasses import dataclass

from engine.memory.compute_graph.building.sketch import Sketch
from engine.memory.compute_graph.ggml.graph import Tensor
from engine.memory.compute_graph.models.transformer import decoder_layer


@dataclass(frozen=True, slots=True)
class _Made:
    """What a stack made last."""

    output: Tensor


def stacked_layer(sketch: Sketch, previous: Tensor) -> Tensor:
    """Return the output of a layer: the first of a stack reads the sum of what both stacks made last."""
    graph, stacks = sketch.graph, sketch.numbers.stacks
    assert stacks is not None
    is_high, place = stacks.place(sketch.layer.index)
    if place == 0:
        low, high = (sketch.shared.find(_Made, of) for of in ("low", "high"))
        start = sketch.outer_weight(sketch.outer["hrm.z_l_init"], sketch.layer.memory) if low is None else low.output
        previous = graph.add(sketch.inputs.embeddings if high is None else high.output, start)
    current = decoder_layer(sketch, previous)
    if place == stacks.layers - 1:
        current = sketch.raw_norm(current)
        sketch.shared.put(_Made(current), of="high" if is_high else "low")
    return graph.get_rows(current, sketch.inputs.output_rows) if sketch.layer.is_last else current
