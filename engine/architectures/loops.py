"""Models whose layers run more than once."""

from __future__ import annotations

from engine.architectures.graph_record import GraphRecord
from engine.architectures.record import Architecture, Records, TensorSplit
from engine.architectures.style import Style
from engine.gguf.model_file import ModelFile


def _nanbeige(model: ModelFile) -> Style:
    return Style(bare_runs=bool(model.hyper_parameter("skip_loop_final_norm")))


RECORDS: Records = {
    "hrm_text": Architecture(
        split=TensorSplit(whole_model=True),
        graph=GraphRecord(
            Style(bare_norms=True, bare_end=True, late_rows="never"), layer="special.stacked_layer", every_layer=True
        ),
    ),
    "nanbeige": Architecture(looped=True, graph=GraphRecord(_nanbeige, layer="special.looped_layer")),
}
