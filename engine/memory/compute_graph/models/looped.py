"""Layers that run several times, each time with a cache of their own (Nanbeige)."""

from __future__ import annotations

from engine.memory.compute_graph.building.ends import outer_norm
from engine.memory.compute_graph.building.sketch import Sketch
from engine.memory.compute_graph.ggml.graph import Tensor
from engine.memory.compute_graph.models.transformer import decoder_layer


def looped_layer(sketch: Sketch, previous: Tensor) -> Tensor:
    """Return the output of a layer; between two runs the norm of the output comes behind the last layer."""
    current = decoder_layer(sketch, previous)
    ends_run = (sketch.layer.index + 1) % sketch.numbers.n_blocks == 0
    if not ends_run or sketch.layer.is_last or sketch.style.bare_runs:
        return current
    return outer_norm(sketch, "output_norm", sketch.inputs.output, current, sketch.layer.backend)
