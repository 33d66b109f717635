"""Hunyuan's models."""

from __future__ import annotations

from engine.architectures.graph_record import ALL_SCALED, NONE_SCALED, GraphRecord
from engine.architectures.record import NO_SPLIT, Architecture, Indexer, Records, same
from engine.architectures.style import Style

RECORDS: Records = {
    **same("hunyuan-dense hunyuan-moe", Architecture(graph=GraphRecord(Style(qk_norm="after")))),
    "hunyuan_vl": Architecture(graph=GraphRecord(Style(qk_norm="after", positions=0))),
    "hy_v3": Architecture(
        graph=GraphRecord(Style(normalises=None, late_rows="after_norm"), scaled=ALL_SCALED, odds="told_or_sigmoid")
    ),
    "hy_v4": Architecture(
        latent=True,
        indexer=Indexer("listed", optional=True),
        split=NO_SPLIT,
        graph=GraphRecord(
            Style(normalises=None),
            layer="residual_streams.connected_layer",
            attention="mla.plain_sparse_attention",
            before="residual_streams.open_streams",
            behind="residual_streams.copied_end",
            scaled=NONE_SCALED,
        ),
    ),
}
