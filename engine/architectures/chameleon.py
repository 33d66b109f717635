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
            layer="chameleon.chameleon_layer",
            attention="chameleon.head_norm_attention",
            logits="chameleon.without_images",
            turns_by_frequencies=False,
        )
    ),
}
