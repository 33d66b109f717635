"""GLM's models."""

from __future__ import annotations

from engine.architectures.graph_record import EXPERTS_SCALED, LLAMA_GRAPH, NONE_SCALED, GraphRecord
from engine.architectures.record import NO_SPLIT, Architecture, Indexer, Records, Recurrence
from engine.architectures.style import Style

_FILE_DECIDES = Style(normalises=None)

RECORDS: Records = {
    "chatglm": Architecture(graph=LLAMA_GRAPH),
    "glm4": Architecture(graph=GraphRecord(Style(positions=0))),
    "glm4moe": Architecture(
        graph=GraphRecord(Style(normalises=None, post_norm=False, positions=0), odds="told_or_sigmoid")
    ),
    "glm-dsa": Architecture(
        latent=True,
        # GLM 5.2 is told from its predecessors by its training context.
        indexer=Indexer("listed", default=True, default_long=1 << 20),
        split=NO_SPLIT,
        graph=GraphRecord(
            _FILE_DECIDES, attention="sparse.sparse_attention", scaled=EXPERTS_SCALED, odds="told_or_sigmoid"
        ),
    ),
    "glm5-next": Architecture(
        latent=True,
        recurrence=Recurrence("no_kv_heads", "kda"),
        indexer=Indexer("listed", default=True, pooled=True),
        latent_values=True,
        split=NO_SPLIT,
        graph=GraphRecord(
            _FILE_DECIDES,
            layer="hyper_connections.connected_layer",
            attention="pooled_sparse.pooled_attention",
            recurrence="kda.early_delta_attention",
            odds="told_or_sigmoid",
            before="pooled_sparse.open_pools",
            behind="hyper_connections.mean_end",
            scaled=NONE_SCALED,
        ),
    ),
}
