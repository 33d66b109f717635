"""Models with Mamba's scans or short convolutions, alone or beside attention."""

from __future__ import annotations

from engine.architectures.graph_record import ALL_SCALED, ATTENTION_SCALED, GraphRecord
from engine.architectures.record import NO_SPLIT, Architecture, Records, Recurrence, TensorSplit, Window, same
from engine.architectures.style import Style

_CONVOLUTION = Recurrence("no_kv_heads", "short_convolution")
_LFM2 = GraphRecord(Style(residual_first="both"), recurrence="recurrent.short_convolution")

RECORDS: Records = {
    "mamba": Architecture(
        recurrence=Recurrence("all", "scan"), split=NO_SPLIT, graph=GraphRecord(recurrence="recurrent.mamba")
    ),
    "mamba2": Architecture(
        recurrence=Recurrence("all", "grouped_scan"),
        split=NO_SPLIT,
        graph=GraphRecord(recurrence="recurrent.mamba2"),
    ),
    "jamba": Architecture(
        recurrence=Recurrence("no_kv_heads", "scan"),
        split=NO_SPLIT,
        graph=GraphRecord(Style(rope="none", normalises=False, residual_first="both"), recurrence="recurrent.mamba"),
    ),
    "falcon-h1": Architecture(
        recurrence=Recurrence("all", "grouped_scan", beside_attention=True),
        split=NO_SPLIT,
        graph=GraphRecord(
            Style(output_bias=False),
            layer="special.parallel_hybrid_layer",
            recurrence="recurrent.mamba2",
            turns_by_frequencies=False,
        ),
    ),
    "plamo2": Architecture(
        recurrence=Recurrence("no_kv_heads", "grouped_scan"),
        states_heads=True,
        split=NO_SPLIT,
        graph=GraphRecord(recurrence="recurrent.interleaved_mamba", scaled=ATTENTION_SCALED),
    ),
    **same(
        "nemotron_h nemotron_h_moe",
        Architecture(
            recurrence=Recurrence("no_kv_heads_no_ffn", "grouped_scan"),
            split=NO_SPLIT,
            graph=GraphRecord(
                Style(rope="none", late_rows="after_norm", activations=2, normalises=None),
                layer="transformer.single_part_layer",
                recurrence="recurrent.mamba2",
                scaled=ALL_SCALED,
                odds="sigmoid",
            ),
        ),
    ),
    "lfm2": Architecture(
        window=Window(1, optional=True),
        recurrence=_CONVOLUTION,
        output_norm_in_embedding=True,
        split=TensorSplit(mirrors_state=True),
        graph=_LFM2,
    ),
    "lfm2moe": Architecture(
        recurrence=_CONVOLUTION,
        output_norm_in_embedding=True,
        split=TensorSplit(mirrors_state=True),
        graph=_LFM2,
    ),
}
