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
            _FILE_DECIDES, attention="mla.sparse_attention", scaled=EXPERTS_SCALED, odds="told_or_sigmoid"
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
            layer="residual_streams.connected_layer",
            attention="mla.pooled_attention",
            recurrence="delta_net.early_delta_attention",
            odds="told_or_sigmoid",
            before="mla.open_pools",
            behind="residual_streams.mean_end",
            scaled=NONE_SCALED,
        ),
    ),
}
