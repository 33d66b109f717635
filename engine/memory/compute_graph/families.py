"""Which graph an architecture has: one line each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from engine.gguf.model_file import ModelFile
from engine.layout.unlisted_layers import count_unlisted_layers
from engine.memory.compute_graph.block_scores import block_scored_attention
from engine.memory.compute_graph.block_sparse import block_sparse_attention
from engine.memory.compute_graph.delta_net import delta_net, gated_attention, joint_delta_net
from engine.memory.compute_graph.encoder import post_norm_layer
from engine.memory.compute_graph.ends import embed, finish
from engine.memory.compute_graph.gemma3n import gemma3n_layer, merge_versions
from engine.memory.compute_graph.gemma4 import gemma4_layer
from engine.memory.compute_graph.graph import Graph, Tensor
from engine.memory.compute_graph.grouped_experts import grouped_experts_layer
from engine.memory.compute_graph.hyper_connections import (
    connected_layer,
    copied_end,
    mean_end,
    open_streams,
    weighted_end,
)
from engine.memory.compute_graph.kda import delta_attention, early_delta_attention
from engine.memory.compute_graph.latent import latent_attention, latent_attention_by_head
from engine.memory.compute_graph.lightning import lightning_attention, lightning_layer
from engine.memory.compute_graph.pooled_sparse import open_pools, pooled_attention
from engine.memory.compute_graph.recurrent import interleaved_mamba, mamba, mamba2, short_convolution
from engine.memory.compute_graph.residual_mixing import mixed_rows, residual_mixing_layer
from engine.memory.compute_graph.rwkv import rwkv_gated_layer, rwkv_layer, time_mixing
from engine.memory.compute_graph.shared_cache import sharing_attention
from engine.memory.compute_graph.sketch import Placed, Sketch
from engine.memory.compute_graph.sparse import sparse_attention
from engine.memory.compute_graph.special import (
    arctic_layer,
    grok_layer,
    input_adding_layer,
    parallel_hybrid_layer,
    skipping_layer,
    uneven_layer,
)
from engine.memory.compute_graph.stacked import stacked_layer
from engine.memory.compute_graph.t5 import open_decoder, open_encoder, t5_decoder_layer, t5_encoder_layer
from engine.memory.compute_graph.transformer import Inputs, Mixer, Style, attention, decoder_layer, single_part_layer
from engine.memory.compute_graph.wide_residual import gated_end, open_hashed, wide_layer
from engine.memory.compute_graph.windowed_sparse import open_masked_streams, windowed_attention

LayerBuilder = Callable[[Sketch, Style, Inputs, int, Tensor, Mixer], Tensor]


@dataclass(frozen=True, slots=True)
class Family:
    """A way to build layers, and how the architecture departs from it.

    `recurrence` takes the place of attention in recurrent layers, or stands beside it with `both`; `flash`: whether the
    engine lets the architecture have flash attention; `one_sequence`: it makes room for a batch of one sequence too;
    `one_token`: a batch of one token a sequence has another graph, which may need more;
    `every_layer`: each of its layers counts, however alike they are; `reads_cache`: the graph uses the
    caches, if there are any; `part`: of its layers that the graph is of;
    `before`: what is made of the embeddings before the first layer; `behind`: of the last layer's output, on the device
    of the output.
    """

    style: Style = field(default_factory=Style)
    attention: Mixer = attention
    recurrence: Mixer | None = None
    layer: LayerBuilder = decoder_layer
    both: bool = False
    flash: bool = True
    one_sequence: bool = False
    one_token: bool = False
    every_layer: bool = False
    reads_cache: bool = True
    part: str = ""
    before: Callable[[Sketch, Inputs, Tensor], Tensor] | None = None
    behind: Callable[[Sketch, Inputs, str, Tensor], Tensor] | None = None


_LAYER_NORM = Style(layer_norm=True)
_FILE_DECIDES = Style(normalise=None)
_UNWEIGHTED = Style(normalise=False)
_MULTI_AXIS = Style(positions=4)
_GEMMA = Style(input_scale=True, scaled_q=True)
_PHI = Style(scaled_q=True, residual_first="second")
_COHERE = Style(layer_norm=True, parallel="input", parallel_sum="ffn input attention")
_NO_ROPE_LAYER_NORM = Style(layer_norm=True, rope="none", position_table=True)
_DELTA_NET = Style(positions=4, post_norm=False, late_rows="after_norm")
_ENCODER = Style(embeds=True)
_BERT = Style(embeds=True, layer_norm=True, input_norm=True, normalise=False)
_AS_LLAMA = """
    arcee apertus baichuan bailingmoe2 chatglm dream ernie4_5 ernie4_5-moe exaone granitemoe internlm2
    llada llama mellum minicpm mistral3 nanbeige pangu-embedded plm pockettts qwen qwen2 qwen3 qwen3moe rnd1
    seed_oss xverse
"""

STYLES: dict[str, Style] = {
    **dict.fromkeys(_AS_LLAMA.split(), Style()),
    **dict.fromkeys(("codeshell", "dbrx", "orion", "starcoder2"), _LAYER_NORM),
    **dict.fromkeys(("nemotron", "jais2"), Style(layer_norm=True, steps=2)),
    **dict.fromkeys(("qwen2vl", "qwen3tts", "paddleocr"), _MULTI_AXIS),
    **dict.fromkeys(("gemma", "gemma2", "gemma3"), _GEMMA),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "dots1"), _FILE_DECIDES),
    **dict.fromkeys(("deepseek", "llada-moe", "qwen2moe"), _UNWEIGHTED),
    **dict.fromkeys(("phi3", "phimoe"), _PHI),
    **dict.fromkeys(("starcoder", "gpt2"), _NO_ROPE_LAYER_NORM),
    **dict.fromkeys(("hunyuan-moe", "hunyuan-dense", "maincoder"), Style(qk_norm="after")),
    "afmoe": Style(input_scale=True, normalise=None, rope="but_fourth", late_rows="after_post_norm"),
    "bitnet": Style(reads_embedding=True),
    "bloom": Style(layer_norm=True, rope="none", input_norm=True),
    "cogvlm": Style(late_rows="never"),
    "cohere2": replace(_COHERE, rope="sliding"),
    "cohere2moe": replace(
        _COHERE, rope="sliding_or_dense", normalise=None, late_rows="after_norm", file_decides_norm=True
    ),
    "command-r": _COHERE,
    "exaone-moe": Style(normalise=None, rope="sliding"),
    "exaone4": Style(rope="sliding"),
    "falcon": Style(layer_norm=True, parallel="input", parallel_sum="ffn attention input"),
    "glm4": Style(positions=0),
    "glm4moe": Style(normalise=None, post_norm=False, positions=0),
    "gpt-oss": Style(normalise=False, late_softmax=True, late_rows="before_norm", post_norm=False),
    "gptneox": _LAYER_NORM,
    "granite": Style(rope="finetuned"),
    "granite_swa": Style(),
    "hunyuan_vl": Style(qk_norm="after", positions=0),
    "hy_v3": Style(normalise=None, late_rows="after_norm"),
    "jais": Style(layer_norm=True, rope="none"),
    "laguna": Style(normalise=None),
    "llama4": Style(rope="but_fourth", normalise=False, weigh_first=True, scales_unturned=True),
    "maple": Style(rope="sliding"),
    "mimo2": Style(),
    "minimax-m2": Style(qk_norm="flat"),
    "mpt": _NO_ROPE_LAYER_NORM,
    "muse-glimmer": Style(input_scale=True, rope="sliding"),
    "olmo2": Style(qk_norm="flat"),
    "olmoe": Style(qk_norm="flat", normalise=False),
    "olmo": Style(layer_norm=True, bare_norms=True),
    "openelm": Style(residual_first="first"),
    "phi2": Style(layer_norm=True, parallel="input", scaled_q=True),
    "plamo": Style(parallel="input", parallel_sum="ffn attention input"),
    "plamo3": Style(),
    "refact": Style(rope="none", ignores_experts=True),
    "seed_oss": Style(post_norm=False),
    "smallthinker": Style(early_router=True, rope="but_first_of_four"),
    "smollm3": Style(rope="but_fourth"),
    "spark2_5": Style(),
    "stablelm": _LAYER_NORM,
}

FAMILIES: dict[str, Family] = {
    **{name: Family(style) for name, style in STYLES.items()},
    "deepseek2": Family(_FILE_DECIDES, attention=latent_attention),
    "deepseek32": Family(_FILE_DECIDES, attention=sparse_attention),
    "dots3note": Family(_FILE_DECIDES, attention=sparse_attention),
    "glm-dsa": Family(_FILE_DECIDES, attention=sparse_attention),
    "hy_v4": Family(
        Style(normalise=None, plain_indexer=True),
        attention=sparse_attention,
        layer=connected_layer,
        before=open_streams,
        behind=copied_end,
    ),
    "deepseek4": Family(
        Style(normalise=None, pinned_streams=True),
        attention=windowed_attention,
        layer=connected_layer,
        before=open_masked_streams,
        behind=weighted_end,
    ),
    "glm5-next": Family(
        _FILE_DECIDES,
        attention=pooled_attention,
        recurrence=early_delta_attention,
        layer=connected_layer,
        before=open_pools,
        behind=mean_end,
    ),
    "minimax-m3": Family(_FILE_DECIDES, attention=block_sparse_attention, one_token=True),
    "minicpm3": Family(Style(input_scale=True, scaled_sums=True, scaled_output=True), attention=latent_attention),
    "mistral4": Family(_FILE_DECIDES, attention=latent_attention),
    "mamba": Family(recurrence=mamba),
    "mamba2": Family(recurrence=mamba2),
    "jamba": Family(Style(rope="none", normalise=False, residual_first="both"), recurrence=mamba),
    "plamo2": Family(recurrence=interleaved_mamba),
    "granitehybrid": Family(Style(rope="finetuned"), recurrence=mamba2),
    "nemotron_h": Family(
        Style(rope="none", late_rows="after_norm", steps=2, normalise=None), recurrence=mamba2, layer=single_part_layer
    ),
    "grok": Family(layer=grok_layer, flash=False),
    "talkie": Family(Style(input_scale=True, qk_norm="after"), layer=skipping_layer),
    "minimax-01": Family(recurrence=lightning_attention, layer=lightning_layer, one_sequence=True),
    "arctic": Family(layer=arctic_layer),
    "deci": Family(layer=uneven_layer),
    **dict.fromkeys(("qwen3vl", "qwen3vlmoe"), Family(_MULTI_AXIS, layer=input_adding_layer)),
    "grovemoe": Family(layer=grouped_experts_layer),
    "falcon-h1": Family(recurrence=mamba2, layer=parallel_hybrid_layer, both=True),
    "qwen3next": Family(
        Style(post_norm=False, late_rows="after_norm"), attention=gated_attention, recurrence=joint_delta_net
    ),
    "qwen35": Family(_DELTA_NET, attention=gated_attention, recurrence=delta_net),
    "qwen35moe": Family(_DELTA_NET, attention=gated_attention, recurrence=delta_net),
    "kimi-linear": Family(
        Style(rope="none"), attention=latent_attention, recurrence=early_delta_attention, one_sequence=True
    ),
    "hrm_text": Family(Style(bare_norms=True, bare_end=True, late_rows="never"), layer=stacked_layer, every_layer=True),
    "kimi-k3": Family(
        Style(rope="none", normalise=None, late_rows="never"),
        attention=latent_attention,
        recurrence=delta_attention,
        layer=residual_mixing_layer,
        behind=mixed_rows,
    ),
    "bailingmoe3": Family(
        Style(normalise=None, late_rows="after_norm", positions=0),
        attention=latent_attention_by_head,
        recurrence=delta_attention,
    ),
    **dict.fromkeys(
        ("rwkv6", "rwkv7"),
        Family(Style(layer_norm=True, input_norm=True), layer=rwkv_layer, recurrence=time_mixing),
    ),
    **dict.fromkeys(("rwkv6qwen2", "arwkv7"), Family(layer=rwkv_gated_layer, recurrence=time_mixing)),
    "qwen4exp": Family(
        Style(positions=4, bare_end=True, late_rows="never", copies_states=True),
        attention=block_scored_attention,
        recurrence=delta_net,
        layer=wide_layer,
        before=open_hashed,
        behind=gated_end,
    ),
    "lfm2": Family(Style(residual_first="both"), recurrence=short_convolution),
    "lfm2moe": Family(Style(residual_first="both"), recurrence=short_convolution),
}
FAMILIES.update(
    {
        "bert": Family(replace(_BERT, rope="none", position_table=True), layer=post_norm_layer),
        "nomic-bert": Family(_BERT, layer=post_norm_layer),
        "nomic-bert-moe": Family(_BERT, layer=post_norm_layer),
        "jina-bert-v2": Family(replace(_BERT, rope="none", qk_norm="flat"), layer=post_norm_layer),
        "jina-bert-v3": Family(_BERT, layer=post_norm_layer),
        "modern-bert": Family(_BERT),
        "llama-embed": Family(_ENCODER, reads_cache=False),
        "neo-bert": Family(_ENCODER),
        "eurobert": Family(_ENCODER),
        "gemma3n": Family(
            Style(input_scale=True, late_rows="never"),
            attention=sharing_attention,
            layer=gemma3n_layer,
            every_layer=True,
            behind=merge_versions,
        ),
        "gemma4": Family(
            Style(input_scale=True, late_rows="after_norm"),
            attention=sharing_attention,
            layer=gemma4_layer,
        ),
        "t5": Family(layer=t5_decoder_layer, before=open_decoder, every_layer=True, part="dec"),
        "t5encoder": Family(_ENCODER, layer=t5_encoder_layer, before=open_encoder, every_layer=True, part="enc"),
        "gemma-embedding": Family(replace(_GEMMA, embeds=True)),
    }
)
FAMILIES["nemotron_h_moe"] = FAMILIES["nemotron_h"]


def find_family(model: ModelFile) -> Family | None:
    """Return the family of a model's architecture, None where only a probe can tell its compute buffers."""
    family = None if _is_unmeasured(model) else FAMILIES.get(model.architecture)
    return None if family is None else replace(family, style=_style_of(model, family.style))


_TURNING_BAICHUAN = 32
"""Layers of the one size of Baichuan that turns by position; the engine tells it by this."""


def _style_of(model: ModelFile, style: Style) -> Style:
    """Return the style with what the file decides about it."""
    if style.file_decides_norm:
        return replace(style, layer_norm=not model.hyper_parameter("attention.layer_norm_rms_epsilon"))
    match model.architecture:
        case "baichuan" if model.n_layers != _TURNING_BAICHUAN:
            return replace(style, rope="none")
        case "gptneox" if model.hyper_parameter("use_parallel_residual"):
            return replace(style, parallel="apart", parallel_sum="ffn input attention")
        case "llama4" if model.hyper_parameter("attention.sliding_window") == 0:
            return replace(style, rope="but_last")
        case "stablelm" if not any(".ffn_norm." in tensor.name for tensor in model.blocks[0].tensors):
            return replace(style, parallel="input", parallel_sum="ffn (attention input)")
    return style


def _is_unmeasured(model: ModelFile) -> bool:
    """Return whether the file asks for a variant of its architecture that was never compared with the engine's."""
    mapping = model.hyper_parameter("deepstack_mapping")
    if isinstance(mapping, tuple) and any(isinstance(each, int) and each >= 0 for each in mapping):
        return True
    return model.architecture == "nanbeige" and count_unlisted_layers(model) > 0


def build_graph(
    sketch: Sketch,
    family: Family,
    layers: Sequence[Placed],
    output: str,
    *,
    sliding: bool,
    ends: bool = True,
    passed: Callable[[Tensor], None] = lambda _: None,
    inside: bool = False,
) -> Graph:
    """Return the graph of `layers` between the embeddings and the output matrix, which is left out unless it `ends`.

    `sliding`: the model has sliding windows; `passed` is told what each layer gets, and what comes out of the last;
    `inside`: something stands for layers that are left out before the first of these.
    """
    graph, batch, style = sketch.graph, sketch.batch, family.style
    positions = sketch.positions()
    current = embed(sketch, style, layers[0], positions)
    if sketch.has_cache:
        rows = graph.new_input("i32", batch.n_states) if family.recurrence is not None else None
        # A model with windows and states has no inputs to turn keys with, whatever the type of its caches.
        rotates = rows is None or not sliding
        inputs = Inputs(
            positions=positions,
            embeddings=current,
            output_rows=sketch.output_rows(),
            full=sketch.masks(k_only=sketch.numbers.latent, rotate=rotates),
            sliding=sketch.masks(swa=True, rotate=rotates) if sliding else None,
            indexer=sketch.indexer_masks() if sketch.numbers.indexer.n_heads else None,
            q_scale=graph.new_input("f32", 1, 1, batch.n_tokens) if style.scales_unturned else None,
            state_rows=None if rows is None else graph.view(rows, (batch.n_sequences,)),
            unused_rows=None if rows is None else graph.view(rows, (batch.n_states - batch.n_sequences,)),
            output=output,
        )
    else:
        in_window = sketch.batch_mask() if sliding else None
        inputs = Inputs(positions, current, sketch.output_rows(), sketch.batch_mask(), in_window)
    if family.before is not None:
        current = family.before(sketch, inputs, current)
    if inside:
        current = graph.like("left_out", current)
    for index, layer in enumerate(layers):
        passed(current)
        sketch.enter(index, layer)
        mixer = family.attention
        if family.recurrence is not None and layer.numbers.is_recurrent:
            mixer = family.recurrence
        current = family.layer(sketch, style, inputs, index, current, mixer)
    passed(current)
    if not ends:
        return graph
    if family.behind is not None:
        current = family.behind(sketch, inputs, output, current)
    return finish(sketch, style, inputs, output, current)
