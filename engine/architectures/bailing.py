"""Bailing's models."""

from __future__ import annotations

from engine.architectures.graph_record import NONE_SCALED, GraphRecord
from engine.architectures.record import NO_SPLIT, Architecture, Records, Recurrence, same
from engine.architectures.style import Style

RECORDS: Records = {
    **same("bailingmoe bailingmoe2", Architecture(graph=GraphRecord(Style(normalises=None)))),
    "bailingmoe3": Architecture(
        latent=True,
        recurrence=Recurrence("no_kv_heads", "kda"),
        split=NO_SPLIT,
        graph=GraphRecord(
            Style(normalises=None, late_rows="after_norm", positions=0),
            attention="mla.latent_attention_by_head",
            recurrence="delta_net.delta_attention",
            scaled=NONE_SCALED,
            gating="limited",
        ),
    ),
}
