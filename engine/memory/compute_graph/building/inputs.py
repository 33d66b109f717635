"""What the host fills in before a graph runs, and all layers read."""

from __future__ import annotations

from dataclasses import dataclass

from engine.memory.compute_graph.building.placed import Placed
from engine.memory.compute_graph.ggml.graph import Tensor
from engine.memory.compute_graph.ggml.scheduler import HOST


@dataclass(frozen=True, slots=True)
class Masks:
    """Inputs of attention to one cache."""

    mask: Tensor
    k_rows: Tensor
    v_rows: Tensor | None
    k_rotation: Tensor | None
    v_rotation: Tensor | None


@dataclass(frozen=True, slots=True)
class Inputs:
    """What every layer reads besides its predecessor. `unused_rows`: states of sequences that are not in the batch,
    none in the worst case; `output`: memory of the output layer;
    `last`: the last layer, which layers go with that the file does not list."""

    positions: Tensor
    embeddings: Tensor
    output_rows: Tensor
    full: Masks
    sliding: Masks | None
    last: Placed
    indexer: Masks | None = None
    state_rows: Tensor | None = None
    unused_rows: Tensor | None = None
    q_scale: Tensor | None = None
    output: str = HOST
