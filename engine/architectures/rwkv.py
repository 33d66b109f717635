"""RWKV, and its time mixing with another model's feed-forward part."""

from __future__ import annotations

from engine.architectures.graph_record import GraphRecord
from engine.architectures.record import NO_SPLIT, Architecture, Records, Recurrence, same
from engine.architectures.style import Style

_STATE = Recurrence("all", "wkv")

RECORDS: Records = {
    **same(
        "rwkv6 rwkv7",
        Architecture(
            recurrence=_STATE,
            split=NO_SPLIT,
            graph=GraphRecord(
                Style(layer_norm=True, input_norm=True), layer="rwkv.rwkv_layer", recurrence="rwkv.time_mixing"
            ),
        ),
    ),
    **same(
        "arwkv7 rwkv6qwen2",
        Architecture(
            recurrence=_STATE,
            split=NO_SPLIT,
            graph=GraphRecord(layer="rwkv.rwkv_gated_layer", recurrence="rwkv.time_mixing"),
        ),
    ),
}
