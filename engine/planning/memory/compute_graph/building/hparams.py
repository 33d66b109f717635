"""The numbers that shape a graph, of the model and of each layer, as `llama_hparams` in llama-hparams.h has them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from engine.model.architectures.record import Architecture, GraphRecord, Rope, Scaled
from engine.model.gguf.model_file import ModelFile
from engine.planning.memory.hyper_parameters import HyperParameters, MissingNumberError, number


@dataclass(frozen=True, slots=True)
class Stacks:
    """`layers` of one stack; the low stack runs `low_cycles` times before the high one does, over and over."""

    layers: int
    low_cycles: int

    def place(self, slot: int) -> tuple[bool, int]:
        """Return whether the layer at `slot` belongs to the high stack, and its place in the stack."""
        run, place = divmod(slot, self.layers)
        return run % (self.low_cycles + 1) == self.low_cycles, place

    def block(self, slot: int) -> int:
        """Return the block of the file whose weights the layer at `slot` has."""
        is_high, place = self.place(slot)
        return place + (self.layers if is_high else 0)


def read_stacks(model: ModelFile) -> Stacks:
    """Return the stacks of a model.

    Raises:
        MissingNumberError: they do not add up to the layers of the file.
    """
    layers, high_cycles, low_cycles = (
        number(model, f"hrm.{key}") for key in ("layers_per_stack", "h_cycles", "l_cycles")
    )
    if layers * high_cycles * (low_cycles + 1) != model.n_layers:
        raise MissingNumberError(f"the stacks of the file do not make {model.n_layers} layers")
    return Stacks(layers, low_cycles)


_LEAST_LIMIT = 1e-6
"""Gates are limited, in several operations, by more than this."""
_SIGMOID = 2
"""`LLAMA_EXPERT_GATING_FUNC_TYPE_SIGMOID`."""

Gating = Literal["fused", "clamped", "tanh", "tanh_both"]
"""`clamped`: gate and values are clamped; `tanh`: the gate, or both, go through a hyperbolic tangent."""


@dataclass(frozen=True, slots=True)
class LayerNumbers:
    """Heads of one layer, in elements and counts. `n_experts_used` is 0 where the layer has no experts;
    `ratio`: by what it compresses its keys, 0 for not at all.

    `cache_of`: the layer whose cache it reads, -1 for its own; `keeps_largest`: only the largest gates open (Gemma 3n);
    `adds_input`: a part of the embeddings is added to what it makes.
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
    owns_cache: bool = True
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


@dataclass(frozen=True, slots=True)
class IndexerNumbers:
    """What picks cells: heads, elements of each, and how many cells or blocks of `block` a token attends to.

    `pool`: tokens whose keys are scored together; `picks_tail`: those that do not fill a pool are always picked.
    """

    n_heads: int = 0
    head: int = 0
    n_chosen: int = 0
    block: int = 0
    pool: int = 0
    picks_tail: bool = True


@dataclass(frozen=True, slots=True)
class StateNumbers:
    """Sizes of recurrent layers, 0 where an architecture has none (see `ssm.*` and `wkv.*` in the file).

    `bounds_decay`: the decay of delta attention has a lower bound, which makes it by other operations.
    """

    conv: int = 0
    inner: int = 0
    state: int = 0
    dt_rank: int = 0
    n_groups: int = 0
    rolling_width: int = 0
    recurrent_width: int = 0
    normalises: bool = False
    bounds_decay: bool = False

    @property
    def kept(self) -> int:
        """Tokens that a convolution remembers; three where the file does not say how many it sees."""
        return self.conv - 1 if self.conv else 3


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers of the model.

    `head_k`, `head_v`: head sizes of the first layer with attention.
    `rope_part`: elements of a head that are rotated by position (`n_rot`).
    `n_streams`: parallel residual streams, balanced in `mixing_steps` (Sinkhorn).
    `rotated_heads`: head sizes of K and V that a quantised cache rotates by a Hadamard matrix, of full-attention layers
    and of sliding-window layers; 0 if it does not.
    `stacked_inputs`: embeddings that follow the token's own, added by the first layers.
    `n_runs`: how often all `n_blocks` of the file run.
    `sigmoid_router`: the router uses sigmoid instead of softmax.
    """

    n_embd: int
    n_vocab: int
    n_ctx_train: int
    head_k: int
    head_v: int
    v_width_max: int
    positions: int
    clamps_kqv: bool
    n_expert_groups: int
    n_groups_used: int
    rope_part: int
    latent: bool
    scales_embeddings: bool
    scaled: Scaled
    has_rope_factors: bool
    scales_experts: bool
    normalises_experts: bool
    sigmoid_router: bool
    scales_residuals: bool
    residual_period: int
    hashes: int
    hashed_tokens: int
    stacks: Stacks | None
    state: StateNumbers
    rotated_heads: tuple[tuple[int, int], tuple[int, int]]
    indexer: IndexerNumbers = IndexerNumbers()
    n_streams: int = 1
    mixing_steps: int = 0
    stacked_inputs: int = 0
    n_blocks: int = 0
    n_runs: int = 1

    @property
    def shares_blocks(self) -> bool:
        """Whether layers have the weights of one block of the file."""
        return self.stacks is not None or self.n_runs > 1


def read_numbers(
    model: ModelFile, hyper: HyperParameters, architecture: Architecture, graph: GraphRecord, positions: int
) -> Numbers:
    """Return the numbers of the whole model; `positions`: see `Style`.

    Raises:
        MissingNumberError: naming the key, so that the caller can leave the model to the probe.
    """
    first = next((index for index, count in enumerate(hyper.n_head_kv) if count), 0)
    has_state = architecture.recurrence is not None
    groups = number(model, "expert_group_count", 0, least=0)
    return Numbers(
        n_embd=hyper.n_embd,
        n_vocab=hyper.n_vocab,
        n_ctx_train=hyper.n_ctx_train,
        head_k=hyper.head_k[first],
        head_v=hyper.head_v[first],
        v_width_max=max(hyper.v_widths, default=0),
        positions=positions or _positions(model),
        clamps_kqv=_is_set(model, "attention.clamp_kqv"),
        n_expert_groups=groups,
        n_groups_used=number(model, "expert_group_used_count", 0, least=0) if groups > 1 else 0,
        rope_part=number(model, "rope.dimension_count", hyper.head_k[first], least=0),
        latent=hyper.latent,
        has_rope_factors=graph.uses_rope_factors,
        scaled=graph.scaled,
        scales_embeddings=_is_set(model, "embedding_scale"),
        scales_experts=model.hyper_parameter("expert_weights_scale") not in (None, 0.0, 1.0),
        normalises_experts=bool(model.hyper_parameter("expert_weights_norm")),
        sigmoid_router=_has_sigmoid_router(model, graph),
        scales_residuals=_is_set(model, "residual_scale"),
        residual_period=number(model, "attn_res.block_size", 0, least=0),
        hashes=_hashes(model),
        hashed_tokens=number(model, "ple.ngram_size", 0, least=0),
        stacks=read_stacks(model) if model.hyper_parameter("hrm.layers_per_stack") else None,
        state=_read_state(model, hyper) if has_state else StateNumbers(),
        rotated_heads=(_rotated_heads(hyper, slides=False), _rotated_heads(hyper, slides=True)),
        indexer=_read_indexer(model) if any(hyper.indexer_widths) else IndexerNumbers(),
        n_streams=number(model, "hyper_connection.count", 1, least=0),
        mixing_steps=number(model, "hyper_connection.sinkhorn_iterations", 0, least=0),
        stacked_inputs=_stacked_inputs(model),
        n_blocks=hyper.n_trunk_layers,
        n_runs=hyper.n_loops,
    )


def _rotated_heads(hyper: HyperParameters, *, slides: bool) -> tuple[int, int]:
    """Return the head sizes of the full or the sliding cache where they are those of all its layers."""
    layers = [index for index, caches in enumerate(hyper.caching) if caches and hyper.sliding[index] is slides]

    def common(heads: tuple[int, ...]) -> int:
        sizes = {heads[index] for index in layers}
        return sizes.pop() if len(sizes) == 1 and heads[0] % 64 == 0 else 0

    return common(hyper.head_k), common(hyper.head_v)


def _positions(model: ModelFile) -> int:
    """Return how many numbers tell the position of a token: four where the file has sections for several axes."""
    sections = model.hyper_parameter("rope.dimension_sections")
    return 4 if isinstance(sections, tuple) and len(sections) > 1 and 0 not in sections[:2] else 1


def _hashes(model: ModelFile) -> int:
    """Return how many rows of the table of hashed sequences a token gets."""
    longest = number(model, "ple.ngram_size", 0, least=0)
    return max(0, longest - 1) * number(model, "ple.heads_per_ngram", 0, least=0)


def _has_sigmoid_router(model: ModelFile, graph: GraphRecord) -> bool:
    told = model.hyper_parameter("expert_gating_func")
    if graph.gating_func == "sigmoid" or (graph.gating_func == "file_or_sigmoid" and not told):
        return True
    return told == _SIGMOID


def _is_set(model: ModelFile, key: str) -> bool:
    value = model.hyper_parameter(key)
    return isinstance(value, int | float) and not isinstance(value, bool) and value != 0


def _read_indexer(model: ModelFile) -> IndexerNumbers:
    return IndexerNumbers(
        n_heads=number(model, "attention.indexer.head_count"),
        head=number(model, "attention.indexer.key_length"),
        n_chosen=number(model, "attention.indexer.top_k"),
        pool=number(model, "attention.indexer.kpool", 0, least=0),
        picks_tail=model.hyper_parameter("attention.indexer.kpool_select_tail") is not False,
        block=number(model, "attention.indexer.block_size", 0, least=0),
    )


def _read_state(model: ModelFile, hyper: HyperParameters) -> StateNumbers:
    return StateNumbers(
        conv=number(model, "ssm.conv_kernel", 0, least=0),
        inner=number(model, "ssm.inner_size", 0, least=0),
        state=number(model, "ssm.state_size", 0, least=0),
        dt_rank=number(model, "ssm.time_step_rank", 0, least=0),
        n_groups=number(model, "ssm.group_count", 0, least=0),
        rolling_width=hyper.recurrent_widths[0],
        recurrent_width=hyper.recurrent_widths[1],
        normalises=bool(model.hyper_parameter("ssm.dt_b_c_rms")),
        bounds_decay=_is_bound(model.hyper_parameter("kda.gate_lower_bound")),
    )


def _is_bound(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > -math.inf


def read_layers(model: ModelFile, hyper: HyperParameters, graph: GraphRecord, rope: Rope) -> tuple[LayerNumbers, ...]:
    """Return the numbers of each layer before those of multi-token prediction.

    Raises:
        MissingNumberError: the experts in use are missing or more than there are.
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
            LayerNumbers(
                n_head=hyper.n_head[index],
                n_head_kv=hyper.n_head_kv[index],
                head_k=hyper.head_k[index],
                head_v=hyper.head_v[index],
                is_swa=hyper.sliding[index],
                is_recurrent=hyper.recurrent[index],
                n_experts_used=n_used,
                indexer_width=hyper.indexer_widths[index],
                ratio=hyper.ratios[index] if hyper.ratios else 0,
                owns_cache=hyper.caching[index],
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
    """Return how many embeddings of an image stand behind that of a token, for as many of the first layers."""
    return number(model, "n_deepstack_layers", 0, least=0)


def _has_rope(model: ModelFile, hyper: HyperParameters, rope: Rope, index: int) -> bool:
    slides = any(hyper.sliding)
    is_swa = hyper.sliding[index] or not slides
    if rope == "finetuned":
        return model.hyper_parameter("rope.scaling.finetuned") is not False
    if rope == "but_fourth":
        return (index + 1) % 4 != 0
    if rope == "but_first_of_four":
        # The engine takes four layers in all for a model without windows.
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
