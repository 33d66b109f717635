"""What planning knows about transformer architectures (`Architecture` records): llama, similar ones, and Gemma.

Their layers have a KV cache for the whole context or for a sliding window.
"""

from __future__ import annotations

from engine.base.values import replace
from engine.model.architectures.record import (
    ALL_SCALED,
    ATTENTION_SCALED,
    EXPERTS_SCALED,
    NO_SPLIT,
    PLAIN_GRAPH,
    Architecture,
    GraphRecord,
    Records,
    Style,
    TensorSplit,
    Window,
    same,
)
from engine.model.gguf.model_file import ModelFile

_ROPE_BAICHUAN = 32
"""Layer count of Baichuan 7B. llama.cpp uses RoPE for this size only, and recognises it by the number of layers."""


def _baichuan(model: ModelFile) -> Style:
    return Style() if model.n_layers == _ROPE_BAICHUAN else Style(rope="none")


def _gptneox(model: ModelFile) -> Style:
    if model.hyper_parameter("use_parallel_residual"):
        return Style(layer_norm=True, parallel="apart", parallel_sum="ffn input attention")
    return Style(layer_norm=True)


def _stablelm(model: ModelFile) -> Style:
    if any(".ffn_norm." in tensor.name for tensor in model.blocks[0].tensors):
        return Style(layer_norm=True)
    return Style(layer_norm=True, parallel="input", parallel_sum="ffn (attention input)")


def _styled(style: Style) -> Architecture:
    return Architecture(graph=GraphRecord(style))


_GRANITE = Style(rope="finetuned")
_PHI = _styled(Style(scaled_q=True, residual_first="second"))
_MULTI_AXIS = GraphRecord(Style(positions=4))
_FALCON = Style(layer_norm=True, parallel="input", parallel_sum="ffn attention input")
_NO_ROPE = GraphRecord(Style(layer_norm=True, rope="none", position_table=True))
_MPT = Style(layer_norm=True, rope="none", position_table=True, qk_norm="none")


def _llama4(model: ModelFile) -> Style:
    unwindowed = model.hyper_parameter("attention.sliding_window") == 0
    return Style(
        rope="but_last" if unwindowed else "but_fourth",
        normalises=False,
        weighting="on_input",
        scales_nope_queries=True,
    )


def _mimo2(model: ModelFile) -> Style:
    scaled = model.hyper_parameter("attention.value_scale") not in (None, 0.0, 1.0)
    return Style(projections="bare", scaled_attention=scaled)


_COHERE = Style(layer_norm=True, parallel="input", parallel_sum="ffn input attention")


def _cohere_experts(model: ModelFile) -> Style:
    layer_norm = not model.hyper_parameter("attention.layer_norm_rms_epsilon")
    return replace(_COHERE, layer_norm=layer_norm, rope="sliding_or_dense", normalises=None, out_ids="after_norm")


_GEMMA = GraphRecord(Style(input_scale=True, scaled_q=True))


def _chameleon(model: ModelFile) -> Style:
    return Style(norms_after=bool(model.hyper_parameter("swin_norm")))


def _nanbeige(model: ModelFile) -> Style:
    return Style(bare_runs=bool(model.hyper_parameter("skip_loop_final_norm")))


RECORDS: Records = {
    # Llama and its like: layers of attention and feed-forward, told apart by the file alone or by a style
    **same(
        """
        apertus arcee exaone internlm2 minicpm plm pockettts xverse
        """,
        Architecture(graph=PLAIN_GRAPH),
    ),
    **same("llama mistral3", Architecture(graph=GraphRecord(scaled=ALL_SCALED))),
    "pangu-embedded": Architecture(graph=GraphRecord(uses_rope_factors=False)),
    # Granite and Qwen; their hybrids are in `recurrent.py`
    "granite": Architecture(graph=GraphRecord(_GRANITE)),
    "granitemoe": Architecture(graph=PLAIN_GRAPH),
    "granite_swa": Architecture(window=Window(), graph=PLAIN_GRAPH),
    "graniteswitch": Architecture(
        routed=True,
        graph=GraphRecord(
            _GRANITE,
            embed="special.granite_switch_embd",
            layer="special.granite_switch_layer",
            attention="special.granite_switch_attention",
            before_layers="special.granite_switch_router",
            every_layer=True,
        ),
    ),
    **same("qwen qwen2", Architecture(graph=PLAIN_GRAPH)),
    "qwen3moe": Architecture(graph=GraphRecord(scaled=EXPERTS_SCALED)),
    "qwen3": Architecture(graph=GraphRecord(scaled=ALL_SCALED)),
    "qwen2moe": Architecture(graph=GraphRecord(Style(normalises=False, divided_gate=True))),
    "qwen2vl": Architecture(graph=_MULTI_AXIS),
    "qwen3tts": Architecture(split=NO_SPLIT, graph=_MULTI_AXIS),
    **same("qwen3vl qwen3vlmoe", Architecture(graph=GraphRecord(Style(positions=4), layer="special.deepstack_layer"))),
    # norms
    **same("codeshell dbrx orion starcoder2", _styled(Style(layer_norm=True))),
    **same("jais2 nemotron", _styled(Style(layer_norm=True, activations=2))),
    "olmo": _styled(Style(layer_norm=True, bare_norms=True)),
    "olmoe": Architecture(split=NO_SPLIT, graph=GraphRecord(Style(qk_norm="flat", normalises=False))),
    **same("ernie4_5 ernie4_5-moe", _styled(Style(output_bias=False))),
    "maincoder": _styled(Style(qk_norm="after")),
    "openelm": _styled(Style(residual_first="first")),
    "seed_oss": _styled(Style(post_norm=False)),
    "stablelm": Architecture(graph=GraphRecord(_stablelm)),
    # positions
    "baichuan": Architecture(graph=GraphRecord(_baichuan)),
    "bloom": _styled(Style(layer_norm=True, rope="none", input_norm=True)),
    "jais": _styled(Style(layer_norm=True, rope="none")),
    "refact": _styled(Style(rope="none", ignores_experts=True, output_bias=False)),
    "smollm3": _styled(Style(rope="but_fourth")),
    "paddleocr": Architecture(graph=_MULTI_AXIS),
    **same("gpt2 starcoder", Architecture(graph=_NO_ROPE)),
    "mpt": Architecture(split=NO_SPLIT, graph=GraphRecord(_MPT)),
    # feed-forward beside attention
    "falcon": _styled(_FALCON),
    "gptneox": Architecture(graph=GraphRecord(_gptneox)),
    "phi2": _styled(Style(layer_norm=True, parallel="input", scaled_q=True)),
    "plamo": _styled(Style(parallel="input", parallel_sum="ffn attention input")),
    **same("phi3 phimoe", _PHI),
    # experts
    "dots1": _styled(Style(normalises=None)),
    "arctic": Architecture(graph=GraphRecord(layer="special.arctic_layer")),
    "grok": Architecture(flash_attention=False, split=NO_SPLIT, graph=GraphRecord(layer="special.grok_layer")),
    "grovemoe": Architecture(graph=GraphRecord(layer="transformer.grouped_experts_layer", scaled=ATTENTION_SCALED)),
    # single ones
    "bitnet": Architecture(
        ties_output=False, split=NO_SPLIT, graph=GraphRecord(Style(reads_embedding=True), scaled=ALL_SCALED)
    ),
    "cogvlm": Architecture(graph=GraphRecord(Style(out_ids="never"), scaled=ATTENTION_SCALED, uses_rope_factors=False)),
    "deci": Architecture(split=TensorSplit(may_lack_heads=True), graph=GraphRecord(layer="special.deci_layer")),
    "talkie": Architecture(graph=GraphRecord(Style(input_scale=True, qk_norm="after"), layer="special.talkie_layer")),
    # Models whose layers partly attend to a window
    "mimo2": Architecture(window=Window(), graph=GraphRecord(_mimo2, gating_func="sigmoid")),
    "spark2_5": Architecture(window=Window(), graph=PLAIN_GRAPH),
    "step35": Architecture(window=Window()),
    "mellum": Architecture(window=Window(4, optional=True), graph=GraphRecord(scaled=EXPERTS_SCALED)),
    "plamo3": Architecture(window=Window(8, optional=True), graph=PLAIN_GRAPH),
    "afmoe": Architecture(
        window=Window(4, optional=True),
        graph=GraphRecord(
            Style(input_scale=True, normalises=None, rope="but_fourth", out_ids="after_post_norm"),
            gating_func="file_or_sigmoid",
        ),
    ),
    "exaone-moe": Architecture(window=Window(4), graph=GraphRecord(Style(normalises=None, rope="sliding"))),
    "exaone4": Architecture(
        window=Window(4, n_tokens=4096, only_with_layers=64), graph=GraphRecord(Style(rope="sliding"))
    ),
    "gpt-oss": Architecture(
        window=Window(2),
        graph=GraphRecord(Style(normalises=False, weighting="after_choice", out_ids="before_norm", post_norm=False)),
    ),
    "laguna": Architecture(
        window=Window(4, full_first=True, optional=True),
        graph=GraphRecord(Style(normalises=None), gating_func="file_or_sigmoid"),
    ),
    "llama4": Architecture(window=Window(4, n_tokens=8192, fixed=True, none_if_zero=True), graph=GraphRecord(_llama4)),
    "maple": Architecture(window=Window(), graph=GraphRecord(Style(rope="sliding"))),
    "muse-glimmer": Architecture(
        window=Window(4), graph=GraphRecord(Style(input_scale=True, rope="sliding", out_ids="after_post_norm"))
    ),
    "olmo2": Architecture(window=Window(4, optional=True), split=NO_SPLIT, graph=GraphRecord(Style(qk_norm="flat"))),
    "smallthinker": Architecture(
        window=Window(4, full_first=True, n_tokens=4096, fixed=True, optional=True),
        graph=GraphRecord(Style(early_router=True, rope="but_first_of_four")),
    ),
    # Cohere's models: attention and feed-forward read the same norm
    "command-r": Architecture(graph=GraphRecord(_COHERE)),
    "cohere2": Architecture(window=Window(4), graph=GraphRecord(replace(_COHERE, rope="sliding"), scaled=ALL_SCALED)),
    "cohere2moe": Architecture(
        window=Window(4, full_first=True),
        graph=GraphRecord(_cohere_experts, scaled=ALL_SCALED, gating_func="file_or_sigmoid"),
    ),
    # Gemma and what was made of it
    "gemma": Architecture(graph=_GEMMA),
    "gemma2": Architecture(window=Window(2, n_tokens=4096), graph=_GEMMA),
    "gemma3": Architecture(window=Window(6, optional=True), graph=_GEMMA),
    "gemma-embedding": Architecture(
        has_cache=False,
        causal=False,
        window=Window(6),
        graph=GraphRecord(Style(input_scale=True, scaled_q=True, embeds=True)),
    ),
    "gemma3n": Architecture(
        window=Window(5),
        n_kv_layers=20,
        output_first=True,
        split=NO_SPLIT,
        graph=GraphRecord(
            Style(input_scale=True, out_ids="never"),
            layer="gemma.gemma3n_layer",
            attention="gemma.shared_kv_attention",
            after_layers="gemma.altup_unembed",
            every_layer=True,
            n_keeping_largest=10,
        ),
    ),
    "gemma4": Architecture(
        window=Window(),
        shares_kv=True,
        output_first=True,
        rope_factors_full_only=True,
        reads_lazily=True,
        graph=GraphRecord(
            Style(input_scale=True, out_ids="after_norm"),
            layer="gemma.gemma4_layer",
            attention="gemma.shared_kv_attention",
            scaled=EXPERTS_SCALED,
        ),
    ),
    # Chameleon, which reads images as tokens and must not answer with them
    "chameleon": Architecture(
        graph=GraphRecord(
            _chameleon,
            layer="special.chameleon_layer",
            attention="special.chameleon_attention",
            logits="special.mask_image_tokens",
            uses_rope_factors=False,
        )
    ),
    # Models whose layers run more than once
    "hrm_text": Architecture(
        split=TensorSplit(whole_model=True),
        graph=GraphRecord(
            Style(bare_norms=True, bare_end=True, out_ids="never"), layer="special.hrm_layer", every_layer=True
        ),
    ),
    "nanbeige": Architecture(looped=True, graph=GraphRecord(_nanbeige, layer="special.looped_layer")),
}
