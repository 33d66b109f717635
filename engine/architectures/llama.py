"""Llama and its like: layers of attention and feed-forward, told apart by the file alone or by a style."""

from __future__ import annotations

from engine.architectures.graph_record import ALL_SCALED, ATTENTION_SCALED, LLAMA_GRAPH, GraphRecord
from engine.architectures.record import NO_SPLIT, Architecture, Records, TensorSplit, same
from engine.architectures.style import Style
from engine.gguf.model_file import ModelFile

_TURNING_BAICHUAN = 32
"""Layers of the one size of Baichuan that turns by position; the engine tells it by this."""


def _baichuan(model: ModelFile) -> Style:
    return Style() if model.n_layers == _TURNING_BAICHUAN else Style(rope="none")


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


_PHI = _styled(Style(scaled_q=True, residual_first="second"))
_MULTI_AXIS = GraphRecord(Style(positions=4))
_FALCON = Style(layer_norm=True, parallel="input", parallel_sum="ffn attention input")
_UNTURNED = GraphRecord(Style(layer_norm=True, rope="none", position_table=True))
_MPT = Style(layer_norm=True, rope="none", position_table=True, qk_norm="none")

RECORDS: Records = {
    **same(
        """
        apertus arcee exaone internlm2 minicpm plm pockettts xverse
        """,
        Architecture(graph=LLAMA_GRAPH),
    ),
    **same("llama mistral3", Architecture(graph=GraphRecord(scaled=ALL_SCALED))),
    "pangu-embedded": Architecture(graph=GraphRecord(turns_by_frequencies=False)),
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
    **same("gpt2 starcoder", Architecture(graph=_UNTURNED)),
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
    "cogvlm": Architecture(
        graph=GraphRecord(Style(late_rows="never"), scaled=ATTENTION_SCALED, turns_by_frequencies=False)
    ),
    "deci": Architecture(split=TensorSplit(may_lack_heads=True), graph=GraphRecord(layer="special.uneven_layer")),
    "talkie": Architecture(graph=GraphRecord(Style(input_scale=True, qk_norm="after"), layer="special.skipping_layer")),
}
