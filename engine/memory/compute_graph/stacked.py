"""Layers of two stacks that run in turns (HRM Text)."""

from __future__ import annotations

from engine.memory.compute_graph.graph import Tensor
from engine.memory.compute_graph.sketch import Sketch
from engine.memory.compute_graph.transformer import Inputs, Mixer, Style, attention, decoder_layer

_HIGH, _LOW = "high", "low"
"""Names of what the stacks made last among what layers hand on."""


def stacked_layer(
    sketch: Sketch, style: Style, inputs: Inputs, index: int, previous: Tensor, mixer: Mixer = attention
) -> Tensor:
    """Return the output of a layer: the first of a stack reads the sum of what both stacks made last."""
    graph, carried, stacks = sketch.graph, sketch.carried, sketch.numbers.stacks
    assert stacks is not None
    is_high, place = stacks.place(sketch.layer.index)
    if place == 0:
        low = carried.get(_LOW)
        if low is None:
            low = sketch.outer_weight(sketch.outer["hrm.z_l_init"], sketch.layer.memory)
        previous = graph.add(carried.get(_HIGH, inputs.embeddings), low)
    current = decoder_layer(sketch, style, inputs, index, previous, mixer)
    if place == stacks.layers - 1:
        current = carried[_HIGH if is_high else _LOW] = sketch.raw_norm(current)
    return graph.get_rows(current, inputs.output_rows) if sketch.layer.is_last else current
