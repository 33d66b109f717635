"""Chameleon, which reads images as tokens and must not answer with them."""

from __future__ import annotations

from engine.architectures.graph_record import GraphRecord
from engine.architectures.record import Architecture, Records
from engine.architectures.style import Style
from engine.gguf.model_file import ModelFile


def _style(model: ModelFile) -> Style:
    return Style(norms_behind=bool(model.hyper_parameter("swin_norm")))


RECORDS: Records = {
    "chameleon": Architecture(
        graph=GraphRecord(
            _style,
            layer="special.chameleon_layer",
            attention="special.head_norm_attention",
            logits="special.without_images",
            turns_by_frequencies=False,
        )
    ),
}
