"""Classes for the record of an architecture: how llama.cpp treats its models differently from llama models.

A llama model has a full KV cache in each layer, and supports every split mode. `Style` and `GraphRecord` describe the
compute graph, `Architecture` the rest. Sources in llama.cpp are `load_arch_hparams` and the graph of each file in
src/models, `llama_model::create_memory` and `llm_arch_supports_sm_tensor`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from engine.model.gguf.model_file import ModelFile

Rope = Literal["all", "none", "sliding", "sliding_or_dense", "finetuned", "but_fourth", "but_first_of_four", "but_last"]
"""Layers that apply RoPE to queries and keys.

`sliding`: layers with a sliding window; all layers if no layer has one.
`sliding_or_dense`: the layers of `sliding`, and the leading layers without experts.
`finetuned`: all layers, unless `rope.scaling.finetuned` is false in the file.
`but_fourth`: all but every fourth.
`but_first_of_four`: all but the first of every four if some layers have a sliding window, else all.
`but_last`: all but the last.
"""


class Style(Struct, frozen=True):
    """How the compute graph of an architecture builds embeddings, layers and output.

    The fields are options of graph functions that all architectures share. The defaults are right for llama.
    """

    # ------------------------------------------------------------------ embeddings

    input_scale: bool = False
    """Whether token embeddings are scaled. Also set if they are normalised without weights: this allocates the same."""

    input_norm: bool = False
    """Whether embeddings are normalised with weights of a norm tensor."""

    positions: int = 1
    """Number of position values of each token, as for M-RoPE; 0: read from the file."""

    position_table: bool = False
    """Whether a learned position embedding is added to the token's embedding."""

    # ------------------------------------------------------------------ norms and sums

    layer_norm: bool = False
    """Whether norms are LayerNorm (`ggml_norm`) instead of RMS norm; the result of a norm is then a separate tensor."""

    bare_norms: bool = False
    """Whether norms have no weights."""

    norms_after: bool = False
    """Whether norms are applied to the outputs of attention and feed-forward, instead of to their inputs."""

    post_norm: bool = True
    """Whether the norm after attention is applied to attention's output; if not, to the sum of output and residual."""

    residual_first: Literal["", "first", "second", "both"] = ""
    """Sums of a layer that have the residual as first operand: the one after attention (`first`), the one
    after feed-forward (`second`), or both.

    The order matters because ggml may reuse the buffer of a sum's first operand.
    """

    scaled_sums: bool = False
    """Whether the outputs of attention and feed-forward are always scaled before they are added to the residual.

    If not, they are scaled only if the file has a residual scale.
    """

    parallel: Literal["", "input", "apart"] = ""
    """Input of the feed-forward part in layers that compute attention and feed-forward in parallel.

    `input`: the normalised input of attention. `apart`: the layer's input after another norm. Empty: feed-forward
    follows attention.
    """

    parallel_sum: Literal[
        "attention ffn input", "ffn attention input", "ffn input attention", "ffn (attention input)"
    ] = "attention ffn input"
    """Order in which the outputs of parallel attention and feed-forward, and their input, are added."""

    # ------------------------------------------------------------------ attention

    rope: Rope = "all"
    """Layers that apply RoPE to queries and keys."""

    qk_norm: Literal["before", "after", "flat", "none"] = "before"
    """Position of the norms of queries and keys: before or after RoPE, or `flat`, before the division into heads.

    `none`: their tensors are loaded, but not used.
    """

    scaled_q: bool = False
    """Whether queries are scaled before attention."""

    scales_nope_queries: bool = False
    """Whether queries without RoPE are scaled by the token's position (`inp_attn_scale`)."""

    shapes_queries: bool = False
    """Whether queries are reshaped into heads before they are divided into views with and without RoPE.

    If not, the flat tensor is divided.
    """

    projections: Literal["full", "scaled", "bare"] = "full"
    """Tensors that the file may have besides the matrices of the query, key and value projections.

    `full`: scales and biases. `scaled`: scales only. `bare`: neither.
    """

    scaled_attention: bool = False
    """Whether the output of attention is scaled after its output matrix."""

    output_bias: bool = True
    """Whether the bias of attention's output is added if the file has one; if not, it is only loaded."""

    # ------------------------------------------------------------------ feed-forward

    activations: int = 1
    """Number of ggml operations for the activation in a feed-forward part without a gate."""

    divided_gate: bool = False
    """Whether the gate of shared experts is an activation divided by its input, instead of the activation alone."""

    ignores_experts: bool = False
    """Whether the graph has a dense feed-forward part even if the file has experts."""

    early_router: bool = False
    """Whether the router reads the input of the layer, instead of the input of the feed-forward part."""

    weighting: Literal["", "after_choice", "on_input"] = ""
    """When expert weights are computed, and to what they are applied.

    `after_choice`: computed after the choice of experts. `on_input`: applied to the experts' input. Empty: computed
    before the choice and applied to the output.
    """

    normalises: bool | None = True
    """Whether expert weights are normalised to a sum of 1; None: the file says so."""

    precise_experts: bool = False
    """Whether the down projection of experts is computed with F32 precision (`ggml_mul_mat_set_prec`)."""

    # ------------------------------------------------------------------ output

    out_ids: Literal["", "before_norm", "after_norm", "after_post_norm", "never"] = ""
    """Where the output rows (`inp_out_ids`) are selected.

    `before_norm`, `after_norm`: after the last layer, before or after the last norm. `after_post_norm`: in the last
    layer after the norm of attention's output. `never`: not at all. Empty: in the last layer right after attention.
    """

    bare_runs: bool = False
    """Whether a model that passes through its layers several times has no norm between two passes."""

    bare_end: bool = False
    """Whether the model has no norm before the output matrix."""

    scaled_output: bool = False
    """Whether the input of the output matrix is scaled."""

    embeds: bool = False
    """Whether the result is the last layer's output, without an output matrix, as in embedding models."""

    reads_embedding: bool = False
    """Whether logits are computed with the token embedding in host memory.

    If not, a copy of the token embedding is on the device of the output layer.
    """


Builder = str
"""Name `MODULE.FUNCTION` of a graph-building function in `engine/planning/memory/compute_graph/models`.

The module is imported when a model needs it.
"""

Scaled = frozenset[Literal["attention", "dense", "experts", "joined", "states"]]
"""Parts of a layer that may have `.scale` tensors next to their weights.

`joined`: queries, keys and values in one matrix. `states`: projections of recurrent layers.
"""
MOSTLY_SCALED: Scaled = frozenset({"attention", "joined", "states"})
EXPERTS_SCALED: Scaled = MOSTLY_SCALED | {"experts"}
ALL_SCALED: Scaled = EXPERTS_SCALED | {"dense"}
ATTENTION_SCALED: Scaled = frozenset({"attention", "states"})
NONE_SCALED: Scaled = frozenset()

StyleOfFile = Callable[[ModelFile], Style]
"""A function that returns the style, for an architecture whose style depends on the file."""


class GraphRecord(Struct, frozen=True):
    """How the graph of an architecture is built. Fields of type `Builder` name functions."""

    style: Style | StyleOfFile = Style()
    """How the layers of the architecture differ from llama's."""

    embed: Builder | None = None
    """Function that builds the token embeddings; None: a plain look-up."""

    layer: Builder = "transformer.decoder_layer"
    """Function that builds the graph of one layer."""

    attention: Builder = "transformer.attention"
    """Function that builds the graph of a layer's attention."""

    recurrence: Builder | None = None
    """Function that builds the recurrent part of a layer, instead of attention or in addition to it; None: there is
    none.
    """

    before_layers: Builder | None = None
    """Function that builds the input of the first layer from the embeddings; None: the embeddings are the input."""

    after_layers: Builder | None = None
    """Function that builds the operations after the last layer, on the device of the output layer;
    None: no operations.
    """

    logits: Builder | None = None
    """Function that builds the operations after the logits; None: no operations."""

    part: Literal["", "enc", "dec"] = ""
    """The layers in the graph: those of the encoder (`enc`), those of the decoder (`dec`), or all (empty)."""

    every_layer: bool = False
    """Whether the forecast builds the graph with all layers; if not, equal layers are built once."""

    one_token: bool = False
    """Whether generation (one token of each sequence) has another graph than prompt processing.

    That graph may need larger buffers.
    """

    grows: bool = False
    """Whether the graph grows with the number of positions in the cache.

    llama.cpp reserves buffers for an empty cache, and allocates more later.
    """

    reads_cache: bool = True
    """Whether the graph uses the KV cache and recurrent state, if the model has them."""

    uses_rope_factors: bool = True
    """Whether RoPE uses the file's factors (`rope_freqs`, `rope_factors_*`), if the file has them."""

    scaled: Scaled = MOSTLY_SCALED
    """Parts of a layer that may have scale tensors."""

    gating: Literal["fused", "tanh", "clamped"] = "fused"
    """Computation of gated activations: as one operation, as several with tanh, or clamped if the file has a limit."""

    gating_func: Literal["file", "sigmoid", "file_or_sigmoid"] = "file"
    """Function of the router (`expert_gating_func`).

    `file`: softmax, unless the file names sigmoid.
    `sigmoid`: sigmoid, whatever the file names.
    `file_or_sigmoid`: the function that the file names; sigmoid if it names none.
    """

    n_keeping_largest: int = 0
    """Number of leading layers with sparse feed-forward activations (`gaussian_topk` of Gemma 3n)."""

    def style_of(self, model: ModelFile) -> Style:
        """Return the style (how the compute graph is built) for a model; it may depend on values in the header."""
        return self.style if isinstance(self.style, Style) else self.style(model)


PLAIN_GRAPH = GraphRecord()


class Window(Struct, frozen=True):
    """Sliding-window attention of an architecture: which layers have a window, and its length.

    `period` is only a default, except if it is 1: the file may have another period, or a list of the layers with a
    window (`attention.sliding_window_pattern`).
    """

    period: int = 0
    """Period of full attention: one layer of each period has it, the last one by default.

    0: the file must list the layers with a window. 1: all attention layers have a window.
    """

    full_first: bool = False
    """Whether the first layer of each period has full attention. If not, the last layer of the period has it."""

    n_tokens: int | None = None
    """Length of the window in tokens if the file has no length; None: the file must have one."""

    fixed: bool = False
    """Whether the window is always `n_tokens` long, even if the file has another length."""

    optional: bool = False
    """Whether the model has no sliding window if its file has no window length."""

    none_if_zero: bool = False
    """Whether a window length of 0 in the file means that the model has no sliding window."""

    only_with_layers: int | None = None
    """Number of layers of the only model size that has a window; None: models of all sizes have one."""


COMPRESSED_RATIOS = (4, 128)
"""Compression ratios of DeepSeek 4's layers; those with the first ratio have an indexer."""

RecurrentLayers = Literal["all", "no_kv_heads", "no_kv_heads_no_ffn", "interval"]
"""Which layers of an architecture are recurrent.

`all`: all layers. `no_kv_heads`: layers without key heads. `no_kv_heads_no_ffn`: layers without key heads and without a
feed-forward part. `interval`: all but the last layer of each period (`full_attention_interval`).
"""

RecurrentState = Literal["scan", "grouped_scan", "wkv", "short_convolution", "kda", "linear"]
"""Formula for the size of the recurrent state (`llama_hparams::n_embd_r` and `n_embd_s`).

`scan`: Mamba. `grouped_scan`: Mamba with groups (`ssm.group_count`), and gated delta nets. `wkv`: RWKV.
`short_convolution`: LFM2. `kda`: Kimi delta attention. `linear`: lightning attention.
"""


class Recurrence(Struct, frozen=True):
    """Recurrent layers of an architecture. Their state has a fixed size, which does not depend on the context."""

    layers: RecurrentLayers
    state: RecurrentState

    has_kv_cache: bool = False
    """Whether recurrent layers also have a KV cache."""

    interval: int = 4
    """Period of attention layers if the file has no `full_attention_interval`.

    The last layer of each period has attention, the others are recurrent.
    """


class Indexer(Struct, frozen=True):
    """The indexer of an architecture: which layers have one, and its cache.

    An indexer selects the tokens that attention reads. It has a second KV cache with one key head.
    """

    layers: Literal["all", "listed", "after_dense"] = "all"
    """Layers with an indexer: all, those in the file's list, or all after the leading dense layers."""

    default: bool = False
    """Whether layers have an indexer if the file has no list of layers with an indexer."""

    default_long: int | None = None
    """Smallest training context, in tokens, with which only some layers have an indexer: 0, 1, and every fourth from 2.

    Used only if the file has no list of layers with an indexer. None: `default` is used for every training context.
    """

    any_length: bool = False
    """Whether the file's list of layers with an indexer may be shorter or longer than the number of layers."""

    with_values: bool = False
    """Whether the indexer's cache also contains values."""

    optional: bool = False
    """Whether the model has an indexer only if the file has `attention.indexer.top_k`."""

    pooled: bool = False
    """Whether `attention.indexer.kpool` in the file makes each row of the indexer's cache three vectors instead of one.
    """


class TensorSplit(Struct, frozen=True):
    """How llama.cpp's split mode `tensor` treats an architecture: whether it is supported, and what it slices."""

    allowed: bool = True
    """Whether llama.cpp supports split mode `tensor` for the architecture, and knows the tensors of its state."""

    may_lack_heads: bool = False
    """Whether layers may have no key heads; llama.cpp would then divide their empty KV cache by zero heads."""

    whole_model: bool = False
    """Whether llama.cpp slices no weights and no KV cache, so that each device has all of them.

    CPU layers at the front are then not allowed (rule `leading_cpu_only`).
    """

    mirrors_state: bool = False
    """Whether each device has the whole recurrent state."""

    gated_queries: bool = False
    """Whether the query projection contains a gate of the same width."""

    values_by_key: bool = False
    """Whether the value heads of each key head are adjacent in recurrent layers.

    If so, all value heads are sliced as one block. If not, there are several blocks, each with one value head of every
    key head, and each block is sliced.
    """


ANY_SPLIT, NO_SPLIT = TensorSplit(), TensorSplit(allowed=False)


class Architecture(Struct, frozen=True):
    """The properties of an architecture that differ from llama's and are not in the file's header."""

    # ------------------------------------------------------------------ state

    has_cache: bool = True
    """Whether there is a KV cache or state between batches; encoders and diffusion models have none."""

    causal: bool = True
    """Whether attention is causal, unless `attention.causal` is false in the file."""

    window: Window | None = None
    recurrence: Recurrence | None = None
    indexer: Indexer | None = None

    latent: bool = False
    """Whether keys and values are cached as one compressed vector (MLA).

    Only models whose file has the length of this vector do so.
    """

    n_kv_layers: int | None = None
    """Number of leading layers that have a KV cache of their own. Later layers read one of these caches.

    None: all layers have one.
    """

    shares_kv: bool = False
    """Whether the last layers read the KV cache of earlier layers.

    The file has the number of these last layers (`attention.shared_kv_layers`).
    """

    compressed: bool = False
    """Whether layers have a cache of compressed keys in addition to that of their sliding window.

    The file has the compression ratio of each layer.
    """

    hashed: bool = False
    """Whether the layers in `ple.layers` have a state: the last inputs of a convolution over hashed n-grams."""

    looped: bool = False
    """Whether the file says how often all layers run; each pass then has its own KV cache."""

    routed: bool = False
    """Whether there is an additional layer with a single head, which selects a LoRA adapter for each token."""

    states_heads: bool = False
    """Whether the file always has the head sizes. If not, missing ones are computed from the heads of layer 0."""

    keeps_encoded: bool = False
    """Whether the output buffer holds the encoder's embeddings (T5) in addition to the logits."""

    refused: str | None = None
    """Reason why the size of the state must be measured by a probe; None: it is computed."""

    # ------------------------------------------------------------------ weights

    ties_output: bool = True
    """Whether the token embedding is used as the output matrix if the file has no output matrix."""

    output_first: bool = False
    """Whether llama.cpp creates the output matrix before the token embedding if one tensor is used for both.

    Both are then separate copies, even in one buffer.
    """

    output_norm_in_embedding: bool = False
    """Whether the output norm is named `token_embd_norm`."""

    rope_factors_full_only: bool = False
    """Whether only layers with full attention use the file's RoPE factors."""

    reads_lazily: bool = False
    """Whether large per-layer embeddings stay in the file and are read on demand."""

    # ------------------------------------------------------------------ rules

    mtp: GraphRecord | None = None
    """The graph of the architecture's MTP heads; None: drafting with them is not supported."""

    drafts: Literal["", "always", "without_embedding"] = ""
    """Condition under which a model can only be a draft model, not the main model.

    `always`: always. `without_embedding`: if the file lacks the token embedding or the output matrix. Empty: never.
    """

    flash_attention: bool = True
    """Whether llama.cpp supports flash attention for the architecture; if not, it is off, whatever is requested."""

    one_cache_type: bool = False
    """Whether K and V cache must have the same type, as with latent attention."""

    one_stream: bool = False
    """Whether all sequences must share one KV cache, because one attention bias is for all tokens (`build_pos_bias`).
    """

    also_as_one: bool = False
    """Whether llama.cpp also reserves the graph of a full micro batch with one sequence (`[TAG_RESERVE_DIAG_DECAY]`).

    With separate KV caches, micro batches must then have equally many tokens of each sequence; llama.cpp aborts
    otherwise.
    """

    latent_values: bool = False
    """Whether V heads are as wide as the latent vector, whatever `attention.value_length` says."""

    split: TensorSplit = ANY_SPLIT

    # ------------------------------------------------------------------ compute buffers

    graph: GraphRecord | None = None
    """The compute graph; None: it is not described, so a probe measures the compute buffers."""


Records = dict[str, Architecture]
"""Architecture records by name (`general.architecture`). Related architectures share a module."""


def same(names: str, record: Architecture) -> Records:
    """Return a dict with `record` under each of the `names`, which are separated by spaces."""
    return dict.fromkeys(names.split(), record)
