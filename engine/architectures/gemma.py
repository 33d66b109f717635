"""Gemma and what was made of it."""

from __future__ import annotations

from engine.architectures.graph_record import EXPERTS_SCALED, GraphRecord
from engine.architectures.record import NO_SPLIT, Architecture, Records, Window
from engine.architectures.style import Style

_GRAPH = GraphRecord(Style(input_scale=True, scaled_q=True))

RECORDS: Records = {
    "gemma": Architecture(graph=_GRAPH),
    "gemma2": Architecture(window=Window(2, n_tokens=4096), graph=_GRAPH),
    "gemma3": Architecture(window=Window(6, optional=True), graph=_GRAPH),
    "gemma-embedding": Architecture(
        has_cache=False,
        causal=False,
        window=Window(6),
        graph=GraphRecord(Style(input_scale=True, scaled_q=True, embeds=True)),
    ),
    "gemma3n": Architecture(
        window=Window(5),
        n_kv_layers=20,
        output_first=True,
        split=NO_SPLIT,
        graph=GraphRecord(
            Style(input_scale=True, late_rows="never"),
            layer="gemma.gemma3n_layer",
            attention="gemma.sharing_attention",
            behind="gemma.merge_versions",
            every_layer=True,
            n_keeping_largest=10,
        ),
    ),
    "gemma4": Architecture(
        window=Window(),
        shares_kv=True,
        output_first=True,
        turns_by_table=True,
        reads_lazily=True,
        graph=GraphRecord(
            Style(input_scale=True, late_rows="after_norm"),
            layer="gemma.gemma4_layer",
            attention="gemma.sharing_attention",
            scaled=EXPERTS_SCALED,
        ),
    ),
}
