"""Models whose layers run more than once."""

from __future__ import annotations

from engine.architectures.graph_record import LLAMA_GRAPH, GraphRecord
from engine.architectures.record import Architecture, Records, TensorSplit
from engine.architectures.style import Style

RECORDS: Records = {
    "hrm_text": Architecture(
        split=TensorSplit(whole_model=True),
        graph=GraphRecord(
            Style(bare_norms=True, bare_end=True, late_rows="never"), layer="stacked.stacked_layer", every_layer=True
        ),
    ),
    "nanbeige": Architecture(looped=True, graph=LLAMA_GRAPH),
}
