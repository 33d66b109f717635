"""Makes every architecture unknown to our graph arithmetic, to test models whose buffers only a probe can give."""

from __future__ import annotations

import pytest

from engine.planning.memory.compute_graph.building import graph_tables

LOOPED_ARCHITECTURE = "nanbeige"
LOOPED_METADATA = {"nanbeige.num_loops": 2}
"""Metadata of a model like llama whose layers llama.cpp runs twice, each time with a KV cache of its own."""


def know_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every architecture unknown in this process, so that only a probe gives its compute buffers."""
    monkeypatch.setattr(graph_tables, "find_family", lambda _model, _architecture: None)
