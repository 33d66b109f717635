"""Records of architectures with compressed keys and values (MLA), or with indexers that select tokens for attention."""

from __future__ import annotations

from engine.model.architectures.record import (
    ALL_SCALED,
    ATTENTION_SCALED,
    EXPERTS_SCALED,
    NO_SPLIT,
    NONE_SCALED,
    PLAIN_GRAPH,
    Architecture,
    GraphRecord,
    Indexer,
    Records,
    Recurrence,
    Style,
    Window,
    same,
)

_FILE_DECIDES = Style(normalises=None)


_KDA = Recurrence("no_kv_heads", "kda")

RECORDS: Records = {
    # DeepSeek's models
    "deepseek": Architecture(graph=GraphRecord(Style(normalises=False))),
    "deepseek2-ocr": Architecture(),
    "deepseek2": Architecture(
        latent=True,
        split=NO_SPLIT,
        graph=GraphRecord(Style(normalises=None, shapes_queries=True), attention="mla.mla_attention"),
    ),
    "deepseek32": Architecture(
        latent=True,
        indexer=Indexer(),
        split=NO_SPLIT,
        graph=GraphRecord(_FILE_DECIDES, attention="mla.dsa_attention", scaled=EXPERTS_SCALED),
    ),
    "deepseek4": Architecture(
        window=Window(1),
        indexer=Indexer(),
        compressed=True,
        one_cache_type=True,
        graph=GraphRecord(
            _FILE_DECIDES,
            layer="residual_streams.hc_layer_pinned",
            attention="deepseek4.dsv4_attention",
            before_layers="deepseek4.dsv4_inputs",
            after_layers="residual_streams.build_hc_head",
            scaled=NONE_SCALED,
        ),
    ),
    # GLM's models
    "chatglm": Architecture(graph=PLAIN_GRAPH),
    "glm4": Architecture(graph=GraphRecord(Style(positions=0))),
    "glm4moe": Architecture(
        graph=GraphRecord(Style(normalises=None, post_norm=False, positions=0), gating_func="file_or_sigmoid")
    ),
    "glm-dsa": Architecture(
        latent=True,
        # GLM 5.2 is told from its predecessors by its training context.
        indexer=Indexer("listed", default=True, default_long=1 << 20),
        split=NO_SPLIT,
        graph=GraphRecord(
            _FILE_DECIDES, attention="mla.dsa_attention", scaled=EXPERTS_SCALED, gating_func="file_or_sigmoid"
        ),
    ),
    "glm5-next": Architecture(
        latent=True,
        recurrence=Recurrence("no_kv_heads", "kda"),
        indexer=Indexer("listed", default=True, pooled=True),
        latent_values=True,
        split=NO_SPLIT,
        graph=GraphRecord(
            _FILE_DECIDES,
            layer="residual_streams.hc_layer",
            attention="mla.kpool_attention",
            recurrence="delta_net.build_kda_layer_expanded",
            gating_func="file_or_sigmoid",
            before_layers="mla.build_inp_kpool",
            after_layers="residual_streams.build_hc_mean",
            scaled=NONE_SCALED,
        ),
    ),
    # Hunyuan's models
    **same("hunyuan-dense hunyuan-moe", Architecture(graph=GraphRecord(Style(qk_norm="after")))),
    "hunyuan_vl": Architecture(graph=GraphRecord(Style(qk_norm="after", positions=0))),
    "hy_v3": Architecture(
        graph=GraphRecord(
            Style(normalises=None, out_ids="after_norm"), scaled=ALL_SCALED, gating_func="file_or_sigmoid"
        )
    ),
    "hy_v4": Architecture(
        latent=True,
        indexer=Indexer("listed", optional=True),
        split=NO_SPLIT,
        graph=GraphRecord(
            Style(normalises=None),
            layer="residual_streams.hc_layer",
            attention="mla.dsa_attention_without_rotation",
            before_layers="residual_streams.repeat_streams",
            after_layers="residual_streams.build_hc_head_cast",
            scaled=NONE_SCALED,
        ),
    ),
    # Models with delta attention beside latent attention (KDA)
    "kimi-linear": Architecture(
        latent=True,
        recurrence=_KDA,
        also_as_one=True,
        split=NO_SPLIT,
        graph=GraphRecord(
            Style(rope="none"),
            attention="mla.mla_attention",
            recurrence="delta_net.build_kda_layer_expanded",
            scaled=ATTENTION_SCALED,
        ),
    ),
    "kimi-k3": Architecture(
        latent=True,
        recurrence=_KDA,
        latent_values=True,
        split=NO_SPLIT,
        graph=GraphRecord(
            Style(rope="none", normalises=None, out_ids="never"),
            layer="residual_streams.res_mix_layer",
            attention="mla.mla_attention",
            recurrence="delta_net.build_kda_layer",
            after_layers="residual_streams.res_mix_rows",
            scaled=NONE_SCALED,
            gating="tanh",
        ),
    ),
    # Bailing's models
    **same("bailingmoe bailingmoe2", Architecture(graph=GraphRecord(Style(normalises=None)))),
    "bailingmoe3": Architecture(
        latent=True,
        recurrence=Recurrence("no_kv_heads", "kda"),
        split=NO_SPLIT,
        graph=GraphRecord(
            Style(normalises=None, out_ids="after_norm", positions=0),
            attention="mla.mla_attention_head_gate",
            recurrence="delta_net.build_kda_layer",
            scaled=NONE_SCALED,
            gating="clamped",
        ),
    ),
    # MiniMax's models
    "minimax-01": Architecture(
        recurrence=Recurrence("interval", "linear", interval=8),
        also_as_one=True,
        split=NO_SPLIT,
        graph=GraphRecord(
            layer="recurrent.minimax_01_layer",
            recurrence="recurrent.lightning_attention",
            scaled=ATTENTION_SCALED,
        ),
    ),
    "minimax-m2": Architecture(split=NO_SPLIT, graph=GraphRecord(Style(qk_norm="flat"))),
    "minimax-m3": Architecture(
        indexer=Indexer("after_dense", with_values=True),
        split=NO_SPLIT,
        graph=GraphRecord(
            Style(normalises=None),
            attention="block_sparse.msa_attention",
            one_token=True,
            grows=True,
            scaled=ATTENTION_SCALED,
        ),
    ),
    # Models with compressed keys and values (MLA) that are no one's kin
    "minicpm3": Architecture(
        split=NO_SPLIT,
        graph=GraphRecord(Style(input_scale=True, scaled_sums=True, scaled_output=True), attention="mla.mla_attention"),
    ),
    "mistral4": Architecture(
        latent=True,
        split=NO_SPLIT,
        graph=GraphRecord(
            Style(normalises=None, shapes_queries=True, precise_experts=True), attention="mla.mla_attention"
        ),
    ),
    "dots3note": Architecture(
        latent=True,
        window=Window(),
        indexer=Indexer("listed", any_length=True),
        split=NO_SPLIT,
        graph=GraphRecord(Style(normalises=None), attention="mla.dsa_attention", scaled=EXPERTS_SCALED),
    ),
}
