"""Records of architectures with recurrent layers: Mamba and its hybrids, RWKV, Granite's and Qwen's hybrids."""

from __future__ import annotations

from engine.model.architectures.record import (
    ALL_SCALED,
    ATTENTION_SCALED,
    NO_SPLIT,
    Architecture,
    GraphRecord,
    Indexer,
    Records,
    Recurrence,
    Style,
    TensorSplit,
    Window,
    same,
)

_CONVOLUTION = Recurrence("no_kv_heads", "short_convolution")
_LFM2 = GraphRecord(Style(residual_first="both"), recurrence="recurrent.build_shortconv_block")

_RWKV = Recurrence("all", "wkv")

_GRANITE = Style(rope="finetuned")

_DELTA_NET = Recurrence("interval", "grouped_scan")

RECORDS: Records = {
    # Models with Mamba's scans or short convolutions, alone or beside attention
    "mamba": Architecture(
        recurrence=Recurrence("all", "scan"),
        split=NO_SPLIT,
        graph=GraphRecord(recurrence="recurrent.build_mamba_layer"),
    ),
    "mamba2": Architecture(
        recurrence=Recurrence("all", "grouped_scan"),
        split=NO_SPLIT,
        graph=GraphRecord(recurrence="recurrent.build_mamba2_layer"),
    ),
    "jamba": Architecture(
        recurrence=Recurrence("no_kv_heads", "scan"),
        split=NO_SPLIT,
        graph=GraphRecord(
            Style(rope="none", normalises=False, residual_first="both"), recurrence="recurrent.build_mamba_layer"
        ),
    ),
    "falcon-h1": Architecture(
        recurrence=Recurrence("all", "grouped_scan", has_kv_cache=True),
        split=NO_SPLIT,
        graph=GraphRecord(
            Style(output_bias=False),
            layer="special.falcon_h1_layer",
            recurrence="recurrent.build_mamba2_layer",
            uses_rope_factors=False,
        ),
    ),
    "plamo2": Architecture(
        recurrence=Recurrence("no_kv_heads", "grouped_scan"),
        states_heads=True,
        split=NO_SPLIT,
        graph=GraphRecord(recurrence="recurrent.build_plamo2_mamba_layer", scaled=ATTENTION_SCALED),
    ),
    **same(
        "nemotron_h nemotron_h_moe",
        Architecture(
            recurrence=Recurrence("no_kv_heads_no_ffn", "grouped_scan"),
            split=NO_SPLIT,
            graph=GraphRecord(
                Style(rope="none", out_ids="after_norm", activations=2, normalises=None),
                layer="transformer.single_part_layer",
                recurrence="recurrent.build_mamba2_layer",
                scaled=ALL_SCALED,
                gating_func="sigmoid",
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
    # RWKV, and its time mixing with another model's feed-forward part
    **same(
        "rwkv6 rwkv7",
        Architecture(
            recurrence=_RWKV,
            split=NO_SPLIT,
            graph=GraphRecord(
                Style(layer_norm=True, input_norm=True), layer="rwkv.rwkv_layer", recurrence="rwkv.time_mixing"
            ),
        ),
    ),
    **same(
        "arwkv7 rwkv6qwen2",
        Architecture(
            recurrence=_RWKV,
            split=NO_SPLIT,
            graph=GraphRecord(layer="rwkv.rwkv_gated_layer", recurrence="rwkv.time_mixing"),
        ),
    ),
    # Granite's and Qwen's hybrids
    "granitehybrid": Architecture(
        recurrence=Recurrence("no_kv_heads", "grouped_scan"),
        split=NO_SPLIT,
        graph=GraphRecord(_GRANITE, recurrence="recurrent.build_mamba2_layer"),
    ),
    "qwen3next": Architecture(
        recurrence=_DELTA_NET,
        split=TensorSplit(gated_queries=True, values_by_key=True),
        graph=GraphRecord(
            Style(post_norm=False, out_ids="after_norm"),
            attention="delta_net.build_layer_attn",
            recurrence="delta_net.build_layer_attn_linear_ba",
            scaled=ALL_SCALED - {"joined", "states"},
        ),
        mtp=GraphRecord(
            Style(post_norm=False, bare_end=True),
            embed="mtp.build_inp_embd_h",
            layer="mtp.nextn_layer",
            attention="delta_net.build_layer_attn",
            scaled=ALL_SCALED,
            every_layer=True,
        ),
    ),
    **same(
        "qwen35 qwen35moe",
        Architecture(
            recurrence=_DELTA_NET,
            split=TensorSplit(gated_queries=True),
            graph=GraphRecord(
                Style(positions=4, post_norm=False, out_ids="after_norm"),
                attention="delta_net.build_layer_attn",
                recurrence="delta_net.build_layer_attn_linear",
                scaled=ALL_SCALED,
            ),
            mtp=GraphRecord(
                Style(positions=4, post_norm=False, bare_end=True, out_ids="before_norm"),
                embed="mtp.build_inp_embd_h",
                layer="mtp.nextn_layer",
                attention="delta_net.build_layer_attn",
                scaled=ALL_SCALED,
                every_layer=True,
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
            Style(positions=4, bare_end=True, out_ids="never", projections="scaled"),
            layer="residual_streams.qwen4exp_layer",
            attention="block_sparse.qsa_attention",
            recurrence="delta_net.build_layer_attn_linear_copy",
            before_layers="residual_streams.build_inp_ple",
            after_layers="residual_streams.build_hc_mix_head",
            scaled=ALL_SCALED,
        ),
    ),
}
