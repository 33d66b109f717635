"""Hyper-parameters of a model and its layers that shape the graph, with names as in `llama_hparams`
(llama-hparams.h).
"""

from __future__ import annotations

import math
from typing import Literal

from msgspec import Struct

from engine.model.architectures.record import Architecture, GraphRecord, Rope, Scaled
from engine.model.gguf.model_file import ModelFile
from engine.planning.memory.hyper_parameters import HyperParameters, MissingNumberError, number


class Stacks(Struct, frozen=True):
    """The two stacks of layers in a hierarchical reasoning model (src/models/hrm-text.cpp), each of `layers` layers.

    The graph repeats: the low stack runs `low_cycles` times, then the high stack once.
    """

    layers: int
    low_cycles: int

    def position(self, index: int) -> tuple[bool, int]:
        """Return (whether layer `index` of the graph belongs to the high stack, index of the layer within its stack).

        The low stack and the high stack are the two groups of layers that the model runs in turn.
        """
        run, position = divmod(index, self.layers)
        return run % (self.low_cycles + 1) == self.low_cycles, position

    def block(self, index: int) -> int:
        """Return the index, in the file, of the block that contains the weights of layer `index` of the graph."""
        is_high, position = self.position(index)
        return position + (self.layers if is_high else 0)


def read_stacks(model: ModelFile) -> Stacks:
    """Return the two stacks of a hierarchical reasoning model, with the numbers of layers and cycles in the file.

    Raises:
        MissingNumberError: a number is missing, or the numbers contradict the number of layers in the file.
    """
    layers, high_cycles, low_cycles = (
        number(model, f"hrm.{key}") for key in ("layers_per_stack", "h_cycles", "l_cycles")
    )
    if layers * high_cycles * (low_cycles + 1) != model.n_layers:
        raise MissingNumberError(f"the stacks of the file do not make {model.n_layers} layers")
    return Stacks(layers, low_cycles)


_LEAST_LIMIT = 1e-6
"""Gates are clamped only if the limit in the file is above this value, as in `build_ffn` of llama-graph.cpp."""
_SIGMOID = 2
"""Number of the sigmoid router in files: `LLAMA_EXPERT_GATING_FUNC_TYPE_SIGMOID`."""

Gating = Literal["fused", "clamped", "tanh", "tanh_both"]
"""Computation of a gated feed-forward part.

`fused`: one node. `clamped`: both inputs are clamped. `tanh`, `tanh_both`: a hyperbolic tangent is applied to the gate,
or to both inputs (SiTU of kimi-k3.cpp).
"""


class LayerHparams(Struct, frozen=True):
    """Hyper-parameters of one layer. Head sizes and widths are in elements.

    `n_experts_used`: number of experts that each token uses; 0 if the layer has no experts.
    `indexer_width`: width of the indexer's keys; 0 if the layer has no indexer.
    `ratio`: compression ratio of the layer's keys (`dsv4_compress_ratios`); 0 for none.
    `has_rope`: whether RoPE is applied to queries and keys.
    `cache_of`: index of the layer whose KV cache the layer reads; -1 for its own.
    `keeps_largest`: whether feed-forward activations are sparse (`gaussian_topk` of Gemma 3n).
    `block_size`: number of cells in a block that an indexer selects; 0 if it selects no blocks.
    `gating`, `expert_gating`: computation of the dense and of the expert feed-forward part.
    `adds_input`: whether a part of the image embeddings is added to the layer's output (deepstack).
    """

    n_head: int
    n_head_kv: int
    head_k: int
    head_v: int
    is_swa: bool
    is_recurrent: bool
    n_experts_used: int
    indexer_width: int = 0
    ratio: int = 0
    has_rope: bool = True
    cache_of: int = -1
    keeps_largest: bool = False
    block_size: int = 0
    gating: Gating = "fused"
    expert_gating: Gating = "fused"
    adds_input: bool = False

    @property
    def k_width(self) -> int:
        return self.head_k * self.n_head_kv

    @property
    def v_width(self) -> int:
        return self.head_v * self.n_head_kv


class IndexerHparams(Struct, frozen=True):
    """Hyper-parameters of indexers (`indexer_*`), which select the cells that a token attends to.

    All are 0 if the model has no indexers.

    `top_k`: number of selected cells, or of blocks of `block_size` cells.
    `kpool`: number of tokens in a pool, whose keys are scored together.
    `kpool_select_tail`: whether the last tokens, which do not fill a pool, are always selected.
    """

    n_head: int = 0
    head_size: int = 0
    top_k: int = 0
    block_size: int = 0
    kpool: int = 0
    kpool_select_tail: bool = True


class SsmHparams(Struct, frozen=True):
    """Hyper-parameters of recurrent layers (`ssm_*`). Those that the architecture does not use are 0.

    `n_embd_r`, `n_embd_s`: elements of the rolling state and of the recurrent state of one sequence.
    `has_gate_lower_bound`: whether the decay of KDA (Kimi Delta Attention) has a lower bound; its graph then has
    other nodes.
    """

    d_conv: int = 0
    d_inner: int = 0
    d_state: int = 0
    dt_rank: int = 0
    n_group: int = 0
    n_embd_r: int = 0
    n_embd_s: int = 0
    dt_b_c_rms: bool = False
    has_gate_lower_bound: bool = False

    @property
    def kept(self) -> int:
        """Number of tokens of the previous batch that a convolution needs.

        3 if the file has no kernel size (`llama_hparams::n_embd_r`).
        """
        return self.d_conv - 1 if self.d_conv else 3


class ModelHparams(Struct, frozen=True):
    """Hyper-parameters of a model that shape its graph.

    `v_width_max`: width of the widest V cache (`n_embd_v_gqa_max`).
    `n_pos_per_embd`: number of values for the position of a token.
    `n_rot`: elements of a head that RoPE rotates.
    `scaled`: parts of a layer whose weights may have `.scale` tensors.
    `sigmoid_router`: whether the router uses sigmoid instead of softmax.
    `ple_n_heads`: number of rows of the n-gram embedding table that each token reads.
    `ple_ngram_size`: length of the longest hashed n-gram in tokens.
    `rotated_heads`: sizes of the K and V heads that are rotated by a Hadamard matrix if the cache is quantised, for
    full-attention layers and for sliding-window layers; 0 for none.
    `hc_mult`: number of parallel residual streams (hyper-connections), mixed in `hc_sinkhorn_iters` steps.
    `stacked_inputs`: number of image embeddings that follow a token's own (`n_deepstack_layers`).
    `n_blocks`: number of blocks in the file; `n_loops`: number of times that all of them run.
    """

    n_embd: int
    n_ctx_train: int
    v_width_max: int
    n_pos_per_embd: int
    clamps_kqv: bool
    n_expert_groups: int
    n_group_used: int
    n_rot: int
    latent: bool
    scales_embeddings: bool
    scaled: Scaled
    has_rope_factors: bool
    scales_experts: bool
    normalises_experts: bool
    sigmoid_router: bool
    scales_residuals: bool
    attn_res_block_size: int
    ple_n_heads: int
    ple_ngram_size: int
    stacks: Stacks | None
    ssm: SsmHparams
    rotated_heads: tuple[tuple[int, int], tuple[int, int]]
    indexer: IndexerHparams = IndexerHparams()
    hc_mult: int = 1
    hc_sinkhorn_iters: int = 0
    stacked_inputs: int = 0
    n_blocks: int = 0
    n_loops: int = 1

    @property
    def shares_blocks(self) -> bool:
        """Whether several layers of the graph use the weights of one block."""
        return self.stacks is not None or self.n_loops > 1


def read_model_hparams(
    model: ModelFile, hyper: HyperParameters, architecture: Architecture, graph: GraphRecord, positions: int
) -> ModelHparams:
    """Return the hyper-parameters of the model.

    `graph`: graph record of the model's architecture.
    `positions`: number of position values of each token (`Style.positions`); 0: read from the file.

    Raises:
        MissingNumberError: a key is missing; the message names it. Only a probe (a load without
            allocation) can then find the model's memory.
    """
    # Hybrid models may begin with recurrent layers, which have no KV heads.
    first = next((index for index, count in enumerate(hyper.n_head_kv) if count), 0)
    has_state = architecture.recurrence is not None
    groups = number(model, "expert_group_count", 0, least=0)
    return ModelHparams(
        n_embd=hyper.n_embd,
        n_ctx_train=hyper.n_ctx_train,
        v_width_max=max(hyper.v_widths, default=0),
        n_pos_per_embd=positions or _positions(model),
        clamps_kqv=_is_set(model, "attention.clamp_kqv"),
        n_expert_groups=groups,
        n_group_used=number(model, "expert_group_used_count", 0, least=0) if groups > 1 else 0,
        n_rot=number(model, "rope.dimension_count", hyper.head_k[first], least=0),
        latent=hyper.latent,
        has_rope_factors=graph.uses_rope_factors,
        scaled=graph.scaled,
        scales_embeddings=_is_set(model, "embedding_scale"),
        # llama.cpp adds no node for 0 and 1 (`w_scale` in `build_moe_ffn`).
        scales_experts=model.hyper_parameter("expert_weights_scale") not in (None, 0.0, 1.0),
        normalises_experts=bool(model.hyper_parameter("expert_weights_norm")),
        sigmoid_router=_has_sigmoid_router(model, graph),
        scales_residuals=_is_set(model, "residual_scale"),
        attn_res_block_size=number(model, "attn_res.block_size", 0, least=0),
        ple_n_heads=_hashes(model),
        ple_ngram_size=number(model, "ple.ngram_size", 0, least=0),
        stacks=read_stacks(model) if model.hyper_parameter("hrm.layers_per_stack") else None,
        ssm=_read_ssm(model, hyper) if has_state else SsmHparams(),
        rotated_heads=(_rotated_heads(hyper, slides=False), _rotated_heads(hyper, slides=True)),
        indexer=_read_indexer(model) if any(hyper.indexer_widths) else IndexerHparams(),
        hc_mult=number(model, "hyper_connection.count", 1, least=0),
        hc_sinkhorn_iters=number(model, "hyper_connection.sinkhorn_iterations", 0, least=0),
        stacked_inputs=_stacked_inputs(model),
        n_blocks=hyper.n_trunk_layers,
        n_loops=hyper.n_loops,
    )


def _rotated_heads(hyper: HyperParameters, *, slides: bool) -> tuple[int, int]:
    """Return the sizes of the K and V heads that a Hadamard matrix rotates if the KV cache is quantised.

    0 if layers have heads of different sizes, or if heads of this size cannot be rotated.

    `slides`: True for the heads of sliding-window layers, False for those of full-attention layers.
    """
    layers = [index for index, caches in enumerate(hyper.caching) if caches and hyper.sliding[index] is slides]

    def common(heads: tuple[int, ...]) -> int:
        # As `_rotation` in attention.py: heads whose size is not a multiple of 64 are not rotated.
        sizes = {heads[index] for index in layers}
        return sizes.pop() if len(sizes) == 1 and heads[0] % 64 == 0 else 0

    return common(hyper.head_k), common(hyper.head_v)


def _positions(model: ModelFile) -> int:
    """Return the number of values for a token's position: 4 with several RoPE sections (M-RoPE), else 1."""
    sections = model.hyper_parameter("rope.dimension_sections")
    return 4 if isinstance(sections, tuple) and len(sections) > 1 and 0 not in sections[:2] else 1


def _hashes(model: ModelFile) -> int:
    """Return the number of rows that each token reads from the embedding table of hashed n-grams; 0 if there is none.

    In llama.cpp it is `ple_n_heads`: `ple.heads_per_ngram` rows for each n-gram length from 2 to `ple.ngram_size`.
    """
    longest = number(model, "ple.ngram_size", 0, least=0)
    return max(0, longest - 1) * number(model, "ple.heads_per_ngram", 0, least=0)


def _has_sigmoid_router(model: ModelFile, graph: GraphRecord) -> bool:
    gating = model.hyper_parameter("expert_gating_func")
    if graph.gating_func == "sigmoid" or (graph.gating_func == "file_or_sigmoid" and not gating):
        return True
    return gating == _SIGMOID


def _is_set(model: ModelFile, key: str) -> bool:
    value = model.hyper_parameter(key)
    return isinstance(value, int | float) and not isinstance(value, bool) and value != 0


def _read_indexer(model: ModelFile) -> IndexerHparams:
    return IndexerHparams(
        n_head=number(model, "attention.indexer.head_count"),
        head_size=number(model, "attention.indexer.key_length"),
        top_k=number(model, "attention.indexer.top_k"),
        kpool=number(model, "attention.indexer.kpool", 0, least=0),
        kpool_select_tail=model.hyper_parameter("attention.indexer.kpool_select_tail") is not False,
        block_size=number(model, "attention.indexer.block_size", 0, least=0),
    )


def _read_ssm(model: ModelFile, hyper: HyperParameters) -> SsmHparams:
    return SsmHparams(
        d_conv=number(model, "ssm.conv_kernel", 0, least=0),
        d_inner=number(model, "ssm.inner_size", 0, least=0),
        d_state=number(model, "ssm.state_size", 0, least=0),
        dt_rank=number(model, "ssm.time_step_rank", 0, least=0),
        n_group=number(model, "ssm.group_count", 0, least=0),
        n_embd_r=hyper.recurrent_widths[0],
        n_embd_s=hyper.recurrent_widths[1],
        dt_b_c_rms=bool(model.hyper_parameter("ssm.dt_b_c_rms")),
        has_gate_lower_bound=_is_bound(model.hyper_parameter("kda.gate_lower_bound")),
    )


def _is_bound(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > -math.inf


def read_layer_hparams(
    model: ModelFile, hyper: HyperParameters, graph: GraphRecord, rope: Rope
) -> tuple[LayerHparams, ...]:
    """Return the hyper-parameters of each layer, except layers for multi-token prediction.

    `hyper`: hyper-parameters that determine the size of the model's state.
    `graph`, `rope`: graph record and RoPE record of the model's architecture.

    Raises:
        MissingNumberError: the number of used experts is missing, or larger than the number of experts.
    """
    found = []
    for index in range(hyper.n_trunk_layers):
        experts = next((t for t in model.blocks[index].tensors if "ffn_down_exps.weight" in t.name), None)
        n_used = 0
        if experts is not None:
            n_used = _experts_used(model, index)
            if len(experts.shape) != 3 or n_used > experts.shape[2]:
                raise MissingNumberError(f"{experts.name} has the shape {experts.shape} for {n_used} experts in use")
        found.append(
            LayerHparams(
                n_head=hyper.n_head[index],
                n_head_kv=hyper.n_head_kv[index],
                head_k=hyper.head_k[index],
                head_v=hyper.head_v[index],
                is_swa=hyper.sliding[index],
                is_recurrent=hyper.recurrent[index],
                n_experts_used=n_used,
                indexer_width=hyper.indexer_widths[index],
                ratio=hyper.ratios[index] if hyper.ratios else 0,
                has_rope=_has_rope(model, hyper, rope, index),
                cache_of=-1 if hyper.cache_of[index] == index else hyper.cache_of[index],
                keeps_largest=index < graph.n_keeping_largest,
                block_size=_block_size(model, index),
                gating=_gating(model, graph, "swiglu_clamp_shexp", index),
                expert_gating=_gating(model, graph, "swiglu_clamp_exp", index),
                adds_input=index < _stacked_inputs(model),
            )
        )
    return tuple(found)


def _stacked_inputs(model: ModelFile) -> int:
    """Return the number of image embeddings that follow a token's own, one for each of the first layers (deepstack)."""
    return number(model, "n_deepstack_layers", 0, least=0)


def _has_rope(model: ModelFile, hyper: HyperParameters, rope: Rope, index: int) -> bool:
    slides = any(hyper.sliding)
    is_swa = hyper.sliding[index] or not slides
    if rope == "finetuned":
        return model.hyper_parameter("rope.scaling.finetuned") is not False
    if rope == "but_fourth":
        return (index + 1) % 4 != 0
    if rope == "but_first_of_four":
        # smallthinker.cpp applies RoPE everywhere if `n_no_rope_layer_step` is the number of layers. Without windows it
        # is set so; with windows it is 4, which is the number of layers of a model with four.
        return index % 4 != 0 or not slides or hyper.n_trunk_layers == 4
    if rope == "but_last":
        return index + 1 < model.n_layers
    if rope == "sliding_or_dense":
        return is_swa or index < number(model, "leading_dense_block_count", 0, least=0)
    return is_swa if rope == "sliding" else rope == "all"


def _block_size(model: ModelFile, index: int) -> int:
    ratios = model.hyper_parameter("attention.compress_ratios")
    if isinstance(ratios, tuple):
        ratios = ratios[index] if index < len(ratios) else 0
    return ratios if isinstance(ratios, int) and not isinstance(ratios, bool) and ratios > 0 else 0


def _gating(model: ModelFile, graph: GraphRecord, limits: str, index: int) -> Gating:
    if graph.gating == "tanh":
        linear = model.hyper_parameter("activation.situ_linear_beta")
        return "tanh_both" if isinstance(linear, float) and linear > 0 else "tanh"
    if graph.gating != "clamped":
        return "fused"
    limit = model.hyper_parameter(limits)
    if isinstance(limit, tuple):
        limit = limit[index] if index < len(limit) else 0.0
    return "clamped" if isinstance(limit, float) and limit > _LEAST_LIMIT else "fused"


def _experts_used(model: ModelFile, index: int) -> int:
    value = model.hyper_parameter("expert_used_count")
    if isinstance(value, tuple) and index < len(value):
        value = value[index]
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return number(model, "expert_used_count")
