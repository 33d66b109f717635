"""A layer on its way into the graph."""

from __future__ import annotations

from dataclasses import dataclass

from engine.memory.compute_graph.building.facts import Weights
from engine.memory.compute_graph.building.numbers import LayerNumbers


@dataclass(frozen=True, slots=True)
class Placed:
    """`memory` of its device; `home`: of the block whose weights it has, mostly the same; `backend` that its norms are
    pinned to (-1: none); `index` among the layers of the model."""

    numbers: LayerNumbers
    weights: Weights
    memory: str
    home: str
    backend: int
    is_last: bool
    index: int
