"""MiniMax's models."""

from __future__ import annotations

from engine.architectures.graph_record import ATTENTION_SCALED, GraphRecord
from engine.architectures.record import NO_SPLIT, Architecture, Indexer, Records, Recurrence
from engine.architectures.style import Style

RECORDS: Records = {
    "minimax-01": Architecture(
        recurrence=Recurrence("interval", "linear", interval=8),
        also_as_one=True,
        split=NO_SPLIT,
        graph=GraphRecord(
            layer="recurrent.lightning_layer",
            recurrence="recurrent.lightning_attention",
            scaled=ATTENTION_SCALED,
        ),
    ),
    "minimax-m2": Architecture(split=NO_SPLIT, graph=GraphRecord(Style(qk_norm="flat"))),
    "minimax-m3": Architecture(
        indexer=Indexer("after_dense", with_values=True),
        split=NO_SPLIT,
        graph=GraphRecord(
            Style(normalises=None),
            attention="block_sparse.block_sparse_attention",
            one_token=True,
            scaled=ATTENTION_SCALED,
        ),
    ),
}
