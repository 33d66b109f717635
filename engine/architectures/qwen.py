"""Qwen's models."""

from __future__ import annotations

from engine.architectures.graph_record import ALL_SCALED, EXPERTS_SCALED, LLAMA_GRAPH, GraphRecord
from engine.architectures.record import NO_SPLIT, Architecture, Indexer, Records, Recurrence, TensorSplit, same
from engine.architectures.style import Style

_DELTA_NET = Recurrence("interval", "grouped_scan")
_MULTI_AXIS = Style(positions=4)

RECORDS: Records = {
    **same("qwen qwen2", Architecture(graph=LLAMA_GRAPH)),
    "qwen3moe": Architecture(graph=GraphRecord(scaled=EXPERTS_SCALED)),
    "qwen3": Architecture(graph=GraphRecord(scaled=ALL_SCALED)),
    "qwen2moe": Architecture(graph=GraphRecord(Style(normalises=False, divided_gate=True))),
    "qwen2vl": Architecture(graph=GraphRecord(_MULTI_AXIS)),
    "qwen3tts": Architecture(split=NO_SPLIT, graph=GraphRecord(_MULTI_AXIS)),
    **same("qwen3vl qwen3vlmoe", Architecture(graph=GraphRecord(_MULTI_AXIS, layer="special.input_adding_layer"))),
    "qwen3next": Architecture(
        recurrence=_DELTA_NET,
        split=TensorSplit(gated_queries=True, values_by_key=True),
        graph=GraphRecord(
            Style(post_norm=False, late_rows="after_norm"),
            attention="delta_net.gated_attention",
            recurrence="delta_net.joint_delta_net",
            scaled=ALL_SCALED - {"joined", "states"},
        ),
    ),
    **same(
        "qwen35 qwen35moe",
        Architecture(
            recurrence=_DELTA_NET,
            split=TensorSplit(gated_queries=True),
            graph=GraphRecord(
                Style(positions=4, post_norm=False, late_rows="after_norm"),
                attention="delta_net.gated_attention",
                recurrence="delta_net.delta_net",
                scaled=ALL_SCALED,
            ),
        ),
    ),
    "qwen4exp": Architecture(
        recurrence=_DELTA_NET,
        indexer=Indexer(),
        hashed=True,
        reads_lazily=True,
        split=NO_SPLIT,
        graph=GraphRecord(
            Style(positions=4, bare_end=True, late_rows="never", projections="scaled"),
            layer="residual_streams.wide_layer",
            attention="block_sparse.block_scored_attention",
            recurrence="delta_net.copying_delta_net",
            before="residual_streams.open_hashed",
            behind="residual_streams.gated_end",
            scaled=ALL_SCALED,
        ),
    ),
}
