"""The record of an architecture: its differences from a model with llama's graph, a full KV cache in every layer, and
any split mode.

Sources are `load_arch_hparams` and the graph of each file in llama.cpp's src/models, `llama_model::create_memory` and
`llm_arch_supports_sm_tensor`. `Style` and `GraphRecord` describe the compute graph, `Architecture` the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from engine.model.gguf.model_file import ModelFile

Rope = Literal["all", "none", "sliding", "sliding_or_dense", "finetuned", "but_fourth", "but_first_of_four", "but_last"]
"""Which layers apply RoPE to queries and keys: `finetuned` asks the file, `but_fourth` leaves out every fourth,
`but_first_of_four` the first of every four where some layers have a window, `but_last` the last one,
`sliding_or_dense` adds the leading layers without experts to those with a window."""


class Style(msgspec.Struct, frozen=True):
    """Options of the shared builders of embeddings, layers and output; the defaults are llama's."""

    # ------------------------------------------------------------------ embeddings

    input_scale: bool = False
    """Embeddings are scaled or normalised without weights."""

    input_norm: bool = False
    """Embeddings are normalised with weights of their own."""

    positions: int = 1
    """Position numbers of a token; 0 if the file says how many."""

    position_table: bool = False
    """A learned position embedding is added to the token's."""

    # ------------------------------------------------------------------ norms and sums

    layer_norm: bool = False
    """Norms are LayerNorm (`ggml_norm`), not RMS norm; the result is a tensor of its own."""

    bare_norms: bool = False
    """Norms have no weights."""

    norms_after: bool = False
    """The norms of a layer's two parts are applied to their outputs."""

    post_norm: bool = True
    """The norm after attention is applied to its output, not to the sum with the residual."""

    residual_first: Literal["", "first", "second", "both"] = ""
    """Sums of a layer in which the residual is the first operand; a sum may reuse the buffer of its first operand."""

    scaled_sums: bool = False
    """The output of each part of a layer is scaled, whatever the file says."""

    parallel: Literal["", "input", "apart"] = ""
    """The feed-forward part is parallel to attention and reads the layer's `input` norm, or one `apart`."""

    parallel_sum: Literal[
        "attention ffn input", "ffn attention input", "ffn input attention", "ffn (attention input)"
    ] = "attention ffn input"
    """The order in which the three terms of a parallel layer are added."""

    # ------------------------------------------------------------------ attention

    rope: Rope = "all"
    """Which layers apply RoPE to queries and keys."""

    qk_norm: Literal["before", "after", "flat", "none"] = "before"
    """Position of the norms of queries and keys: before or after RoPE, or `flat`, before the split into heads. `none`:
    the tensors are loaded and not used."""

    scaled_q: bool = False
    """Queries are scaled before attention."""

    scales_nope_queries: bool = False
    """Queries without RoPE are scaled by their position (`inp_attn_scale`)."""

    shapes_queries: bool = False
    """Queries are reshaped into heads before they are split into parts; else both is one view."""

    projections: Literal["full", "scaled", "bare"] = "full"
    """Projections to queries, keys and values: with the file's scales and biases (`full`), scales only, or neither."""

    scaled_attention: bool = False
    """The output of attention is scaled after its output matrix."""

    output_bias: bool = True
    """The bias of attention's output is added if the file has one; else it is only loaded."""

    # ------------------------------------------------------------------ feed-forward

    activations: int = 1
    """Number of ggml operations of an ungated activation."""

    divided_gate: bool = False
    """The gate of shared experts is an activation divided by its input; else the activation alone."""

    ignores_experts: bool = False
    """The graph has a dense part even if the file has experts."""

    early_router: bool = False
    """The router reads the input of the layer instead of that of the feed-forward part."""

    weighting: Literal["", "after_choice", "on_input"] = ""
    """Expert weights are computed after the choice, or applied to the experts' input; else computed before it and
    applied to the output."""

    normalises: bool | None = True
    """Expert weights are normalised to a sum of 1; None if the file says so."""

    precise_experts: bool = False
    """The down projection of experts is computed in F32 (`ggml_mul_mat_set_prec`)."""

    # ------------------------------------------------------------------ output

    out_ids: Literal["", "before_norm", "after_norm", "after_post_norm", "never"] = ""
    """Output rows (`inp_out_ids`) are selected after the last layer, before or after the last norm, in the last layer
    after the norm of attention's output, or never; by default in the last layer right after attention."""

    bare_runs: bool = False
    """There is no norm between two passes over all layers."""

    bare_end: bool = False
    """There is no norm before the output matrix."""

    scaled_output: bool = False
    """The input of the output matrix is scaled, whatever the file says."""

    embeds: bool = False
    """The result is the last layer's output, without an output matrix."""

    reads_embedding: bool = False
    """The output matrix is the token embedding at its place, in host memory."""


Builder = str
"""`MODULE.FUNCTION` in `engine/planning/memory/compute_graph/models`; the module is imported when a model needs it."""

Scaled = frozenset[Literal["attention", "dense", "experts", "joined", "states"]]
"""Parts of a layer that may have `.scale` tensors next to their weights. `joined`: queries, keys and values in one
matrix. `states`: projections of recurrent layers."""
MOSTLY_SCALED: Scaled = frozenset({"attention", "joined", "states"})
EXPERTS_SCALED: Scaled = MOSTLY_SCALED | {"experts"}
ALL_SCALED: Scaled = EXPERTS_SCALED | {"dense"}
ATTENTION_SCALED: Scaled = frozenset({"attention", "states"})
NONE_SCALED: Scaled = frozenset()

StyleOfFile = Callable[[ModelFile], Style]
"""Returns the style if it depends on the file."""


class GraphRecord(msgspec.Struct, frozen=True):
    """How the graph of an architecture is built. Fields of type `Builder` name functions."""

    style: Style | StyleOfFile = Style()
    """The differences of its layers from llama's."""

    embed: Builder | None = None
    """Builds the token embeddings, if they are more than a look-up."""

    layer: Builder = "transformer.decoder_layer"
    """Builds a layer."""

    attention: Builder = "transformer.attention"
    """Builds attention."""

    recurrence: Builder | None = None
    """Builds the recurrent part of a layer, in place of attention or in addition to it."""

    before: Builder | None = None
    """Builds the input of the first layer from the embeddings."""

    behind: Builder | None = None
    """Builds what follows the last layer, on the device of the output layer."""

    logits: Builder | None = None
    """Builds what follows the logits."""

    part: Literal["", "enc", "dec"] = ""
    """Stack of layers in the graph: those of the encoder, or of the decoder."""

    every_layer: bool = False
    """Each layer is built, even if they are alike."""

    one_token: bool = False
    """A batch of one token for each sequence has another graph, which may need more memory."""

    grows: bool = False
    """The graph grows with the positions in the cache. The engine plans for an empty one, and allocates more later."""

    reads_cache: bool = True
    """The graph uses the caches, if there are any."""

    uses_rope_factors: bool = True
    """RoPE uses the file's factors (`rope_freqs`, `rope_factors_*`), if there are any."""

    scaled: Scaled = MOSTLY_SCALED
    """Parts that may have scale tensors."""

    gating: Literal["fused", "tanh", "clamped"] = "fused"
    """Gated activations are one operation, or several: with a tanh, or clamped if the file names a limit."""

    gating_func: Literal["file", "sigmoid", "file_or_sigmoid"] = "file"
    """The function of the router (`expert_gating_func`): softmax unless the file says sigmoid; sigmoid whatever the
    file says; or sigmoid if the file says nothing."""

    n_keeping_largest: int = 0
    """Number of first layers in which only the largest gates are kept."""

    def style_of(self, model: ModelFile) -> Style:
        """Return the style, with the decisions that depend on the file."""
        return self.style if isinstance(self.style, Style) else self.style(model)


PLAIN_GRAPH = GraphRecord()


class Window(msgspec.Struct, frozen=True):
    """Sliding-window attention. A list or period in the file wins over `period`."""

    period: int = 0
    """Period of the layers with full attention, which is the last of each; 0 if the file must list them."""

    full_first: bool = False
    """Full attention is in the first layer of each period instead."""

    n_tokens: int | None = None
    """Window in tokens if the file has none."""

    fixed: bool = False
    """The window is `n_tokens`, whatever the file says."""

    optional: bool = False
    """If the file has no window, there is none."""

    none_if_zero: bool = False
    """A window of 0 in the file means no window."""

    only_with_layers: int | None = None
    """Layer count of the only model size that has a window."""


COMPRESSED_RATIOS = (4, 128)
"""Compression ratios of DeepSeek 4; layers of the first ratio have an indexer."""

RecurrentLayers = Literal["all", "no_kv_heads", "no_kv_heads_no_ffn", "interval"]
"""Which layers are recurrent: all, those without key heads (and feed-forward), all but every n-th."""

RecurrentState = Literal["scan", "grouped_scan", "wkv", "short_convolution", "kda", "linear"]
"""Formula for the size of the state (`llama_hparams::n_embd_r` and `n_embd_s`): scans are Mamba's, `linear` is
lightning attention's."""


class Recurrence(msgspec.Struct, frozen=True):
    """Recurrent state, whose size does not depend on the context."""

    layers: RecurrentLayers
    state: RecurrentState

    beside_attention: bool = False
    """Recurrent layers have a KV cache as well."""

    interval: int = 4
    """Period of the attention layers if the file has none."""


class Indexer(msgspec.Struct, frozen=True):
    """A second KV cache with one key head, for layers that choose which tokens attention reads."""

    layers: Literal["all", "listed", "after_dense"] = "all"
    """Layers with an indexer: all, those in the file's list, or all after the leading dense ones."""

    default: bool = False
    """Whether layers have an indexer if the file has no list."""

    default_long: int | None = None
    """Training context from which, without a list, the first two layers and then every fourth have an indexer."""

    any_length: bool = False
    """The file's list may be shorter or longer than the number of layers."""

    with_values: bool = False
    """The cache has values too."""

    optional: bool = False
    """There is an indexer only if the file says how many tokens to keep."""

    pooled: bool = False
    """Rows have three vectors if the file pools keys."""


class TensorSplit(msgspec.Struct, frozen=True):
    """Split mode tensor."""

    allowed: bool = True
    """The engine supports split mode tensor for this architecture, and the tensor names by which it splits state."""

    may_lack_heads: bool = False
    """Layers may lack attention; the engine would then divide an empty cache by zero heads."""

    whole_model: bool = False
    """Layers share cache slots, so either all layers are split or none, and each device has the whole cache."""

    mirrors_state: bool = False
    """Each device has the whole recurrent state."""

    gated_queries: bool = False
    """The query projection contains a gate of the same width."""

    values_by_key: bool = False
    """Value heads of recurrent layers are ordered by key head, so that plain splits keep them together."""


ANY_SPLIT, NO_SPLIT = TensorSplit(), TensorSplit(allowed=False)


class Architecture(msgspec.Struct, frozen=True):
    """The record of an architecture. Everything else is in the file's header, or like llama."""

    # ------------------------------------------------------------------ state

    has_cache: bool = True
    """There is a KV cache or state between batches; encoders and diffusion models have none."""

    causal: bool = True
    """Attention is causal. A file may say that it is not; for some architectures it never is."""

    window: Window | None = None
    recurrence: Recurrence | None = None
    indexer: Indexer | None = None

    latent: bool = False
    """Keys and values are one compressed vector (MLA) if the file has its length."""

    n_kv_layers: int | None = None
    """Number of first layers that have a cache; the others read theirs. None for all."""

    shares_kv: bool = False
    """The same, with the number in the file."""

    compressed: bool = False
    """Layers have a cache of compressed keys next to their window, by the ratios in the file."""

    hashed: bool = False
    """Some layers keep the inputs of a token hash."""

    looped: bool = False
    """The file says how often all layers run; each pass has a KV cache of its own."""

    routed: bool = False
    """One additional layer with a single head routes between adapters."""

    states_heads: bool = False
    """The file states the head sizes, and the first layer may have no heads."""

    keeps_encoded: bool = False
    """The embeddings are output next to the logits."""

    refused: str | None = None
    """Why state is left to the probe; None if it is computed."""

    # ------------------------------------------------------------------ weights

    ties_output: bool = True
    """If the file has no output matrix, the token embedding is used."""

    output_first: bool = False
    """The output copy of the embedding is created first, so that both exist even within one buffer."""

    output_norm_in_embedding: bool = False
    """The output norm is named `token_embd_norm`."""

    rope_factors_full_only: bool = False
    """Only layers with full attention use the file's RoPE factors."""

    reads_lazily: bool = False
    """Large per-layer embeddings stay in the file and are read on demand."""

    # ------------------------------------------------------------------ rules

    drafts: Literal["", "always", "without_embedding"] = ""
    """The model only drafts for another one: always, or if the file lacks embedding or output."""

    flash_attention: bool = True
    """The engine has flash attention for it; if not, it is off whatever is requested."""

    one_cache_type: bool = False
    """K and V cache must have the same type, as with latent attention."""

    one_stream: bool = False
    """The graph adds a bias for all tokens to the attention of each sequence (`build_pos_bias`)."""

    also_as_one: bool = False
    """The engine also reserves a graph for a full micro-batch of one sequence, with the caches of all. It divides the
    batch among them, and aborts if tokens are left over."""

    latent_values: bool = False
    """V heads are as wide as the latent vector, whatever `attention.value_length` says."""

    split: TensorSplit = ANY_SPLIT

    # ------------------------------------------------------------------ compute buffers

    graph: GraphRecord | None = None
    """The graph; None if there is no record, so that compute buffers are left to the probe."""


Records = dict[str, Architecture]
"""Records by name. Related architectures share a module."""


def same(names: str, record: Architecture) -> Records:
    """Return the same record for several names, separated by spaces."""
    return dict.fromkeys(names.split(), record)
