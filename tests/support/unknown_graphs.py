"""Every architecture that a small model can be made of has arithmetic: here a graph that is known is taken away."""

from __future__ import annotations

import pytest

from engine.planning.memory.compute_graph.building import graph_tables

LOOPED_ARCHITECTURE = "nanbeige"
LOOPED_METADATA = {"nanbeige.num_loops": 2}
"""Like llama in all but name; the engine runs its layers twice, each time with a cache of its own."""


def know_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave compute buffers to the engine, in this process, whatever the model is."""
    monkeypatch.setattr(graph_tables, "find_family", lambda _model, _architecture: None)
