"""Cohere's models: attention and feed-forward read the same norm."""

from __future__ import annotations

from msgspec.structs import replace

from engine.architectures.graph_record import ALL_SCALED, GraphRecord
from engine.architectures.record import Architecture, Records, Window
from engine.architectures.style import Style
from engine.gguf.model_file import ModelFile

_STYLE = Style(layer_norm=True, parallel="input", parallel_sum="ffn input attention")


def _experts(model: ModelFile) -> Style:
    layer_norm = not model.hyper_parameter("attention.layer_norm_rms_epsilon")
    return replace(_STYLE, layer_norm=layer_norm, rope="sliding_or_dense", normalises=None, late_rows="after_norm")


RECORDS: Records = {
    "command-r": Architecture(graph=GraphRecord(_STYLE)),
    "cohere2": Architecture(window=Window(4), graph=GraphRecord(replace(_STYLE, rope="sliding"), scaled=ALL_SCALED)),
    "cohere2moe": Architecture(
        window=Window(4, full_first=True), graph=GraphRecord(_experts, scaled=ALL_SCALED, odds="told_or_sigmoid")
    ),
}
