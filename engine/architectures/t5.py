"""T5: an encoder, and a decoder that attends to what it made."""

from __future__ import annotations

from engine.architectures.graph_record import GraphRecord
from engine.architectures.record import NO_SPLIT, Architecture, Records
from engine.architectures.style import Style

RECORDS: Records = {
    "t5": Architecture(
        keeps_encoded=True,
        one_stream=True,
        split=NO_SPLIT,
        graph=GraphRecord(layer="t5.t5_decoder_layer", before="t5.open_decoder", every_layer=True, part="dec"),
    ),
    "t5encoder": Architecture(
        split=NO_SPLIT,
        graph=GraphRecord(
            Style(embeds=True),
            layer="t5.t5_encoder_layer",
            before="t5.open_encoder",
            every_layer=True,
            part="enc",
        ),
    ),
}
