"""BERT and its kin, and other models that make embeddings of a text."""

from __future__ import annotations

from msgspec.structs import replace

from engine.architectures.graph_record import GraphRecord
from engine.architectures.record import Architecture, Records, Window, same
from engine.architectures.style import Style

_BERT = Style(embeds=True, layer_norm=True, input_norm=True, normalises=False)
_POST_NORM = GraphRecord(_BERT, layer="transformer.post_norm_layer")


def _encoder(graph: GraphRecord | None) -> Architecture:
    return Architecture(has_cache=False, ties_output=False, graph=graph)


RECORDS: Records = {
    "bert": _encoder(replace(_POST_NORM, style=replace(_BERT, rope="none", position_table=True))),
    "jina-bert-v2": _encoder(replace(_POST_NORM, style=replace(_BERT, rope="none", qk_norm="flat"))),
    **same("jina-bert-v3 nomic-bert nomic-bert-moe", _encoder(_POST_NORM)),
    "modern-bert": Architecture(
        has_cache=False,
        ties_output=False,
        window=Window(3, full_first=True, optional=True),
        graph=GraphRecord(_BERT),
    ),
    **same("eurobert neo-bert", _encoder(GraphRecord(Style(embeds=True)))),
    "llama-embed": Architecture(graph=GraphRecord(Style(embeds=True), reads_cache=False)),
    "wavtokenizer-dec": _encoder(None),
}
