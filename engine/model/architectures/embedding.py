"""Descriptions of model architectures that are not plain decoders: encoders, T5, diffusion and draft models."""

from __future__ import annotations

from engine.base.values import replace
from engine.model.architectures.record import (
    NO_SPLIT,
    PLAIN_GRAPH,
    Architecture,
    GraphRecord,
    Records,
    Style,
    Window,
    same,
)

_BERT = Style(embeds=True, layer_norm=True, input_norm=True, normalises=False)
_POST_NORM = GraphRecord(_BERT, layer="transformer.post_norm_layer")


def _encoder(graph: GraphRecord | None) -> Architecture:
    return Architecture(has_cache=False, ties_output=False, graph=graph)


_ONLY_WITH_ANOTHER = "it only runs beside another model"

RECORDS: Records = {
    # BERT and its kin, and other models that make embeddings of a text
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
    # T5: an encoder, and a decoder that attends to what it made
    "t5": Architecture(
        keeps_encoded=True,
        one_stream=True,
        split=NO_SPLIT,
        graph=GraphRecord(layer="t5.t5_decoder_layer", before_layers="t5.open_decoder", every_layer=True, part="dec"),
    ),
    "t5encoder": Architecture(
        split=NO_SPLIT,
        graph=GraphRecord(
            Style(embeds=True),
            layer="t5.t5_encoder_layer",
            before_layers="t5.open_encoder",
            every_layer=True,
            part="enc",
        ),
    ),
    # Diffusion models: nothing is kept between batches, and tokens attend to each other both ways
    **same("dream rnd1", Architecture(has_cache=False, causal=False, graph=PLAIN_GRAPH)),
    "llada": Architecture(
        has_cache=False,
        causal=False,
        graph=GraphRecord(Style(output_bias=False), uses_rope_factors=False),
    ),
    "llada-moe": Architecture(has_cache=False, causal=False, graph=GraphRecord(Style(normalises=False))),
    # Models that draft for another one
    "dflash": Architecture(drafts="without_embedding", refused=_ONLY_WITH_ANOTHER),
    "eagle3": Architecture(drafts="without_embedding", ties_output=False),
    "gemma4-assistant": Architecture(drafts="always", refused=_ONLY_WITH_ANOTHER),
}
