"""Models with compressed keys and values (MLA) that are no one's kin."""

from __future__ import annotations

from engine.architectures.graph_record import EXPERTS_SCALED, GraphRecord
from engine.architectures.record import NO_SPLIT, Architecture, Indexer, Records, Window
from engine.architectures.style import Style

RECORDS: Records = {
    "minicpm3": Architecture(
        split=NO_SPLIT,
        graph=GraphRecord(
            Style(input_scale=True, scaled_sums=True, scaled_output=True), attention="mla.latent_attention"
        ),
    ),
    "mistral4": Architecture(
        latent=True,
        split=NO_SPLIT,
        graph=GraphRecord(
            Style(normalises=None, shapes_queries=True, precise_experts=True), attention="mla.latent_attention"
        ),
    ),
    "dots3note": Architecture(
        latent=True,
        window=Window(),
        indexer=Indexer("listed", any_length=True),
        split=NO_SPLIT,
        graph=GraphRecord(Style(normalises=None), attention="mla.sparse_attention", scaled=EXPERTS_SCALED),
    ),
}
