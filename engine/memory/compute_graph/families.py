"""Which graph an architecture has: one line each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.memory.compute_graph.graph import Graph, Tensor
from engine.memory.compute_graph.scheduler import HOST
from engine.memory.compute_graph.sketch import Placed, Sketch
from engine.memory.compute_graph.latent import latent_attention
from engine.memory.compute_graph.recurrent import mamba, mamba2
from engine.memory.compute_graph.transformer import Inputs, Mixer, Style, attention, decoder_layer, single_part_layer

LayerBuilder = Callable[[Sketch, Style, Inputs, int, Tensor, Mixer], Tensor]


@dataclass(frozen=True, slots=True)
class Family:
    """A way to build layers, and how the architecture departs from it.

    `recurrence` takes the place of attention in recurrent layers, or stands beside it with `both`; `flash`: whether the
    engine lets the architecture have flash attention.
    """

    style: Style = Style()
    attention: Mixer = attention
    recurrence: Mixer | None = None
    layer: LayerBuilder = decoder_layer
    both: bool = False
    flash: bool = True


_LLAMA = Family()

FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "qwen3moe": _LLAMA,
    "gemma2": Family(Style(input_scale=True, scaled_q=True)),
    "gemma3": Family(Style(input_scale=True, scaled_q=True)),
    "gpt-oss": Family(Style(normalise=False, late_softmax=True, late_rows="before_norm", post_norm=False)),
}


_PLAIN = """
    afmoe arctic bailingmoe bailingmoe3 chatglm cogvlm cohere2moe dbrx deepseek dots1 dream ernie4_5 exaone-moe falcon
    gemma glm4 gpt2 granite granite_swa granitemoe grok hrm_text hunyuan-moe hy_v3 internlm2 jais2 laguna llada-moe
    maincoder mellum minicpm minimax-m2 mistral3 muse-glimmer nemotron olmo2 openelm paddleocr phi2 phimoe pockettts
    qwen2vl qwen3tts qwen3vlmoe refact rnd1 smallthinker spark2_5 starcoder talkie
"""
FAMILIES |= dict.fromkeys(_PLAIN.split(), _LLAMA)
_MULTI_AXIS = Family(Style(positions=4))
_NO_LATE_NORM = Family(Style(normalise=None))
FAMILIES |= {
    **dict.fromkeys(("glm4", "qwen2vl", "qwen3tts", "paddleocr", "qwen3vlmoe"), _MULTI_AXIS),
    "qwen3vl": _MULTI_AXIS,
    "gemma": Family(Style(input_scale=True, scaled_q=True)),
    "bailingmoe": _NO_LATE_NORM,
    "dots1": _NO_LATE_NORM,
    "exaone-moe": Family(Style(normalise=None, rope="sliding")),
    "deepseek": Family(Style(normalise=False)),
    "qwen2moe": Family(Style(normalise=False)),
    "olmoe": Family(Style(normalise=False, qk_norm="flat")),
    "hy_v3": Family(Style(normalise=None, late_rows="after_norm")),
    "glm4moe": Family(Style(normalise=None, late_rows="after_norm")),
    "cohere2moe": Family(Style(parallel="input", normalise=None, late_rows="after_norm", rope="sliding")),
    "phi2": Family(Style(layer_norm=True, parallel="input", scaled_q=True)),
    "falcon": Family(Style(layer_norm=True, parallel="input")),
    "starcoder": Family(Style(layer_norm=True, rope="none", position_table=True)),
    "gpt2": Family(Style(layer_norm=True, rope="none", position_table=True)),
    "dbrx": Family(Style(layer_norm=True)),
    "nemotron": Family(Style(layer_norm=True, steps=2)),
    "jais2": Family(Style(layer_norm=True, steps=2)),
    "phimoe": Family(Style(layer_norm=True)),
    "granite": Family(Style(rope="finetuned")),
    "granitemoe": Family(Style(rope="finetuned")),
    "refact": Family(Style(rope="none")),
    "olmo2": Family(Style(qk_norm="flat")),
    "hunyuan-moe": Family(Style(qk_norm="after")),
    "maincoder": Family(Style(qk_norm="after")),
    "minimax-m2": Family(Style(qk_norm="flat")),
    "deepseek2": Family(Style(normalise=None), attention=latent_attention),
    "mamba": Family(recurrence=mamba),
    "mamba2": Family(recurrence=mamba2),
    "jamba": Family(Style(rope="none", normalise=False, residual_first=True), recurrence=mamba),
    "granitehybrid": Family(Style(rope="finetuned"), recurrence=mamba2),
    "nemotron_h": Family(
        Style(rope="none", late_rows="after_norm", steps=2), recurrence=mamba2, layer=single_part_layer
    ),
}


def find_family(name: str) -> Family | None:
    """Return the family of an architecture, None where only a probe can tell its compute buffers."""
    return FAMILIES.get(name)


def build_graph(sketch: Sketch, family: Family, layers: Sequence[Placed], output: str) -> Graph:
    """Return the graph of `layers` between the embeddings and the output matrix."""
    graph, batch, style = sketch.graph, sketch.batch, family.style
    tokens = graph.new_input("i32", batch.n_tokens)
    current = graph.get_rows(sketch.outer_weight(sketch.outer["token_embd"], HOST), tokens)
    graph.expand(current)
    graph.expand(graph.new_input("f32", sketch.numbers.n_embd, batch.n_tokens))
    if sketch.numbers.scales_embeddings:
        current = graph.expand(graph.scale(current))
    if style.input_scale:
        current = graph.scale(current)
    sliding = any(layer.numbers.is_swa for layer in layers)
    positions = sketch.positions()
    if style.position_table:
        current = graph.add(current, graph.get_rows(sketch.outer_weight(sketch.outer["position_embd"], HOST), positions))
    if sketch.has_cache:
        rows = graph.new_input("i32", batch.n_sequences) if family.recurrence is not None else None
        inputs = Inputs(
            positions=positions,
            output_rows=sketch.output_rows(),
            full=sketch.masks(k_only=sketch.numbers.latent),
            sliding=sketch.masks(swa=True) if sliding else None,
            state_rows=None if rows is None else graph.view(rows, (batch.n_sequences,)),
            unused_rows=None if rows is None else graph.view(rows, (0,)),
        )
    else:
        mask = sketch.batch_mask()
        inputs = Inputs(positions, sketch.output_rows(), mask, mask if sliding else None)
    for index, layer in enumerate(layers):
        sketch.enter(index, layer)
        mixer = family.attention
        if family.recurrence is not None and layer.numbers.is_recurrent:
            mixer = family.recurrence
        current = family.layer(sketch, style, inputs, index, current, mixer)
    return _finish(sketch, style, inputs, output, current)


def _finish(sketch: Sketch, style: Style, inputs: Inputs, output: str, current: Tensor) -> Graph:
    graph, outer = sketch.graph, sketch.outer
    if style.late_rows == "before_norm":
        current.is_output = True
        current = graph.get_rows(current, inputs.output_rows)
    current = sketch.raw_norm(current, layer_norm=style.layer_norm)
    for name, operation in (("output_norm", graph.mul), ("output_norm.bias", graph.add)):
        if name in outer:
            current = operation(current, sketch.outer_weight(outer[name], output))
    if style.late_rows == "after_norm":
        current.is_output = True
        current = graph.get_rows(current, inputs.output_rows)
    current.is_output = True
    matrix = outer.get("output") or outer["token_embd"]
    logits = graph.mul_mat(sketch.outer_weight(matrix, output), current)
    if "output.bias" in outer:
        logits = graph.add(logits, sketch.outer_weight(outer["output.bias"], output))
    logits.is_output = True
    graph.expand(logits)
    return graph
