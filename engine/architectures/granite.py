"""Granite's models."""

from __future__ import annotations

from engine.architectures.graph_record import LLAMA_GRAPH, GraphRecord
from engine.architectures.record import NO_SPLIT, Architecture, Records, Recurrence, Window
from engine.architectures.style import Style

_STYLE = Style(rope="finetuned")

RECORDS: Records = {
    "granite": Architecture(graph=GraphRecord(_STYLE)),
    "granitemoe": Architecture(graph=LLAMA_GRAPH),
    "granite_swa": Architecture(window=Window(), graph=LLAMA_GRAPH),
    "granitehybrid": Architecture(
        recurrence=Recurrence("no_kv_heads", "grouped_scan"),
        split=NO_SPLIT,
        graph=GraphRecord(_STYLE, recurrence="recurrent.mamba2"),
    ),
    "graniteswitch": Architecture(
        routed=True,
        graph=GraphRecord(
            _STYLE,
            embed="special.embed_substitutes",
            layer="special.switched_layer",
            attention="special.switched_attention",
            before="special.route",
            every_layer=True,
        ),
    ),
}
