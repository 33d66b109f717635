"""Diffusion models: nothing is kept between batches, and tokens attend to each other both ways."""

from __future__ import annotations

from engine.architectures.graph_record import LLAMA_GRAPH, GraphRecord
from engine.architectures.record import Architecture, Records, same
from engine.architectures.style import Style

RECORDS: Records = {
    **same("dream rnd1", Architecture(has_cache=False, causal=False, graph=LLAMA_GRAPH)),
    "llada": Architecture(
        has_cache=False,
        causal=False,
        graph=GraphRecord(Style(output_bias=False), turns_by_frequencies=False),
    ),
    "llada-moe": Architecture(has_cache=False, causal=False, graph=GraphRecord(Style(normalises=False))),
}
