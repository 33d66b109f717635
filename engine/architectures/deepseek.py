"""DeepSeek's models."""

from __future__ import annotations

from engine.architectures.graph_record import EXPERTS_SCALED, NONE_SCALED, GraphRecord
from engine.architectures.record import NO_SPLIT, Architecture, Indexer, Records, Window
from engine.architectures.style import Style

_FILE_DECIDES = Style(normalises=None)

RECORDS: Records = {
    "deepseek": Architecture(graph=GraphRecord(Style(normalises=False))),
    "deepseek2-ocr": Architecture(),
    "deepseek2": Architecture(
        latent=True,
        split=NO_SPLIT,
        graph=GraphRecord(Style(normalises=None, shapes_queries=True), attention="mla.latent_attention"),
    ),
    "deepseek32": Architecture(
        latent=True,
        indexer=Indexer(),
        split=NO_SPLIT,
        graph=GraphRecord(_FILE_DECIDES, attention="mla.sparse_attention", scaled=EXPERTS_SCALED),
    ),
    "deepseek4": Architecture(
        window=Window(1),
        indexer=Indexer(),
        compressed=True,
        one_cache_type=True,
        graph=GraphRecord(
            _FILE_DECIDES,
            layer="residual_streams.pinned_layer",
            attention="deepseek4.windowed_attention",
            before="deepseek4.open_masked_streams",
            behind="residual_streams.weighted_end",
            scaled=NONE_SCALED,
        ),
    ),
}
