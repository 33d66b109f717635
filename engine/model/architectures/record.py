"""What a record of an architecture says: where it departs from a model whose layers all keep keys and values of the
whole context, may be split in any way, and are built like llama's.

Sources are `load_arch_hparams` and the graph of each file in llama.cpp's src/models, `llama_model::create_memory` and
`llm_arch_supports_sm_tensor`. `Style` and `GraphRecord` say how the compute graph is built, `Architecture` the rest.
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
    """What the shared builders of embeddings, layers and output look at; the defaults are llama's."""

    # ------------------------------------------------------------------ embeddings

    input_scale: bool = False
    """Embeddings are scaled or normalised without weights."""

    input_norm: bool = False
    """Embeddings are normalised with weights of their own."""

    positions: int = 1
    """Numbers that tell the position of a token, 0 where the file tells how many."""

    position_table: bool = False
    """A learnt embedding of the position is added to the token's."""

    # ------------------------------------------------------------------ norms and sums

    layer_norm: bool = False
    """Norms subtract the mean, which needs a tensor of its own."""

    bare_norms: bool = False
    """Norms have no weights."""

    norms_after: bool = False
    """The norms of a layer's two parts come after them."""

    post_norm: bool = True
    """The norm after attention is applied to its output, not to the sum with the residual."""

    residual_first: Literal["", "first", "second", "both"] = ""
    """Which of a layer's two sums begin with the residual; a sum takes the place of its first term if it can."""

    scaled_sums: bool = False
    """What a layer adds to its input is scaled whatever the file says."""

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
    """Norms of queries and keys come before or after RoPE; `flat`: before heads are told apart; `none`: they
    are only loaded."""

    scaled_q: bool = False
    """Queries are scaled before attention."""

    scales_nope_queries: bool = False
    """Queries without RoPE are scaled by their position (`inp_attn_scale`)."""

    shapes_queries: bool = False
    """Queries to compressed keys are put into the shape of heads before they are cut; else that is done in one."""

    projections: Literal["full", "scaled", "bare"] = "full"
    """What makes queries, keys and values: products with the scales and biases that the file has for them, with the
    scales alone, or with neither."""

    scaled_attention: bool = False
    """What attention returns is scaled, after its output matrix."""

    output_bias: bool = True
    """The bias of attention's output is added where the file has one; else it is only loaded."""

    # ------------------------------------------------------------------ feed-forward

    activations: int = 1
    """Operations of an activation without a gate."""

    divided_gate: bool = False
    """The gate of experts that every token takes is an activation divided by what goes in; else it is one alone."""

    ignores_experts: bool = False
    """The graph has a dense part even where the file has experts."""

    early_router: bool = False
    """Experts are chosen by what the layer gets, not by what its feed-forward part gets."""

    weighting: Literal["", "after_choice", "on_input"] = ""
    """Weights of experts are made after the choice, or applied to what experts get; else made before, applied after."""

    normalises: bool | None = True
    """Weights of experts are made to add up to 1; None where the file tells."""

    precise_experts: bool = False
    """The last matrix of experts gets numbers that need 32 bits."""

    # ------------------------------------------------------------------ output

    out_ids: Literal["", "before_norm", "after_norm", "after_post_norm", "never"] = ""
    """Output rows (`inp_out_ids`) are selected after the last layer, before or after the last norm, in the last layer
    after the norm of attention's output, or never; by default in the last layer right after attention."""

    bare_runs: bool = False
    """No norm stands between two runs of all layers."""

    bare_end: bool = False
    """No norm stands before the output matrix."""

    scaled_output: bool = False
    """What the output matrix gets is scaled whatever the file says."""

    embeds: bool = False
    """What the layers make of the tokens is the result, without an output matrix."""

    reads_embedding: bool = False
    """The output matrix is the token embedding where that is, in host memory."""


Builder = str
"""`MODULE.FUNCTION` of `engine/planning/memory/compute_graph/models`; a module is imported when a model asks for it."""

Scaled = frozenset[Literal["attention", "dense", "experts", "joined", "states"]]
"""Parts of a layer that look for `.scale` tensors beside their weights; `joined`: queries, keys and values in one;
`states`: what recurrent layers read and write."""
MOSTLY_SCALED: Scaled = frozenset({"attention", "joined", "states"})
EXPERTS_SCALED: Scaled = MOSTLY_SCALED | {"experts"}
ALL_SCALED: Scaled = EXPERTS_SCALED | {"dense"}
ATTENTION_SCALED: Scaled = frozenset({"attention", "states"})
NONE_SCALED: Scaled = frozenset()

StyleOfFile = Callable[[ModelFile], Style]
"""What tells the style where that depends on the file."""


class GraphRecord(msgspec.Struct, frozen=True):
    """How the graph of an architecture is built. Fields of the type `Builder` name functions."""

    style: Style | StyleOfFile = Style()
    """How its layers depart from llama's."""

    embed: Builder | None = None
    """Makes the embeddings of the tokens, if they are not just looked up."""

    layer: Builder = "transformer.decoder_layer"
    """Builds a layer."""

    attention: Builder = "transformer.attention"
    """Mixes tokens in a layer."""

    recurrence: Builder | None = None
    """Takes the place of attention in recurrent layers, or is added to it."""

    before: Builder | None = None
    """Makes the input of the first layer from the embeddings."""

    behind: Builder | None = None
    """Changes the last layer's output, on the device of the output layer."""

    logits: Builder | None = None
    """Changes the logits."""

    part: Literal["", "enc", "dec"] = ""
    """Part of its layers that the graph is of: those of an encoder or a decoder."""

    every_layer: bool = False
    """Each of its layers counts, however alike they are."""

    one_token: bool = False
    """A batch of one token a sequence has another graph, which may need more."""

    reads_cache: bool = True
    """The graph uses the caches, if there are any."""

    uses_rope_factors: bool = True
    """RoPE uses the factors of the file (`rope_freqs`, `rope_factors_*`), if it has any."""

    scaled: Scaled = MOSTLY_SCALED
    """Where it looks for scales."""

    gating: Literal["fused", "tanh", "clamped"] = "fused"
    """Gated activations are one operation, or several: with a tanh, or clamped if the file names a limit."""

    gating_func: Literal["file", "sigmoid", "file_or_sigmoid"] = "file"
    """The function of the router (`expert_gating_func`): softmax unless the file says sigmoid; sigmoid whatever the
    file says; or sigmoid if the file says nothing."""

    n_keeping_largest: int = 0
    """Layers, from the first on, in which only the largest gates open."""

    def style_of(self, model: ModelFile) -> Style:
        """Return the style with what the file decides about it."""
        return self.style if isinstance(self.style, Style) else self.style(model)


PLAIN_GRAPH = GraphRecord()


class Window(msgspec.Struct, frozen=True):
    """Sliding-window attention. A list or period in the file wins over `period`."""

    period: int = 0
    """Every how many layers one attends to everything (the last of them); 0 where the file has to list the others."""

    full_first: bool = False
    """It is the first of them."""

    n_tokens: int | None = None
    """The window where the file names none."""

    fixed: bool = False
    """The window is `n_tokens` whatever the file names."""

    optional: bool = False
    """Without a window in the file there is none."""

    none_if_zero: bool = False
    """A window of 0 means none."""

    only_with_layers: int | None = None
    """Layer count of the one size that has a window."""


COMPRESSED_RATIOS = (4, 128)
"""What DeepSeek 4 compresses by: layers of the first ratio have an indexer."""

RecurrentLayers = Literal["all", "no_kv_heads", "no_kv_heads_no_ffn", "interval"]
"""Which layers are recurrent: all, those without key heads (and feed-forward), all but every n-th."""

RecurrentState = Literal["scan", "grouped_scan", "wkv", "short_convolution", "kda", "linear"]
"""Whose formula sizes the state (`llama_hparams::n_embd_r` and `n_embd_s`): scans are Mamba's, `linear` is lightning
attention's."""


class Recurrence(msgspec.Struct, frozen=True):
    """State that does not grow with the context."""

    layers: RecurrentLayers
    state: RecurrentState

    beside_attention: bool = False
    """Its layers keep keys and values as well."""

    interval: int = 4
    """Every how many layers one is attention, where the file does not tell."""


class Indexer(msgspec.Struct, frozen=True):
    """A second cache with one key head, for the layers that choose what others attend to."""

    layers: Literal["all", "listed", "after_dense"] = "all"
    """All layers, those that the file's list marks, or all after the leading dense ones."""

    default: bool = False
    """What layers are without a list."""

    default_long: int | None = None
    """Training context from which on, without a list, the first two layers and then every fourth have one."""

    any_length: bool = False
    """The file's list may be shorter or longer than there are layers."""

    with_values: bool = False
    """It holds values too."""

    optional: bool = False
    """There is one only where the file names how many tokens to keep."""

    pooled: bool = False
    """Rows hold three vectors where the file pools keys."""


class TensorSplit(msgspec.Struct, frozen=True):
    """Split mode tensor."""

    allowed: bool = True
    """The engine splits layers of this architecture, and its weights have the names that it cuts state by."""

    may_lack_heads: bool = False
    """Layers may have no attention, and the engine would divide their empty caches by no heads."""

    whole_model: bool = False
    """Layers share cache slots, so that all of them have to be split or none; each device has everything in full."""

    mirrors_state: bool = False
    """Each device has recurrent states in full."""

    gated_queries: bool = False
    """The query projection holds a gate of the same width."""

    values_by_key: bool = False
    """Value heads of recurrent layers follow their key head, so that plain cuts keep them together."""


ANY_SPLIT, NO_SPLIT = TensorSplit(), TensorSplit(allowed=False)


class Architecture(msgspec.Struct, frozen=True):
    """One record. What it does not say is in the file's header, or like in llama."""

    # ------------------------------------------------------------------ state

    has_cache: bool = True
    """Keeps state between batches at all; encoders and diffusion models do not."""

    causal: bool = True
    """Tokens attend to those before them. A file may say that they do not; some architectures never do."""

    window: Window | None = None
    recurrence: Recurrence | None = None
    indexer: Indexer | None = None

    latent: bool = False
    """Keys and values are one compressed vector where the file has lengths for it (MLA)."""

    n_kv_layers: int | None = None
    """Only so many layers from the start have a cache, the rest read theirs."""

    shares_kv: bool = False
    """The same, and the file tells how many."""

    compressed: bool = False
    """Layers keep compressed keys beside their window, by the ratios that the file lists."""

    hashed: bool = False
    """Some layers keep the inputs of a hash of tokens."""

    looped: bool = False
    """The file tells how often all layers run, each time with a cache of their own."""

    routed: bool = False
    """One more layer with a single head picks adapters."""

    states_heads: bool = False
    """The file states how large heads are, and its first layer may have none."""

    keeps_encoded: bool = False
    """Beside the logits what was made of the tokens is kept."""

    refused: str | None = None
    """Why the arithmetic leaves the state to the probe."""

    # ------------------------------------------------------------------ weights

    ties_output: bool = True
    """A file without an output matrix uses the token embedding for it."""

    output_first: bool = False
    """The engine asks for that copy before the embedding, so that it is there twice even in one buffer."""

    output_norm_in_embedding: bool = False
    """The output's norm is called `token_embd_norm`."""

    rope_factors_full_only: bool = False
    """Only layers that attend to everything use the file's rope table."""

    reads_lazily: bool = False
    """Large embeddings per layer stay in the file and are read as needed."""

    # ------------------------------------------------------------------ rules

    drafts: Literal["", "always", "without_embedding"] = ""
    """It only drafts for another model, always or where the file leaves embedding or output to that one."""

    flash_attention: bool = True
    """The engine has flash attention for it; where not it is off, whatever is asked for."""

    one_cache_type: bool = False
    """K and V have to be of one type, as with latent attention."""

    one_stream: bool = False
    """The graph adds a bias for all tokens to the attention of each sequence (`build_pos_bias`)."""

    also_as_one: bool = False
    """The engine makes room for a whole micro batch of one sequence, too, but with the caches of all: it cuts the batch
    among them and aborts where a token is left over."""

    latent_values: bool = False
    """V heads are as wide as the latent vector, whatever `attention.value_length` says."""

    split: TensorSplit = ANY_SPLIT

    # ------------------------------------------------------------------ compute buffers

    graph: GraphRecord | None = None
    """None: recorded numbers are missing, and compute buffers are left to the probe."""


Records = dict[str, Architecture]
"""Records by name. A group of kin shares a module; what only one of them has is said in its record."""


def same(names: str, record: Architecture) -> Records:
    """Return one record for several names, which spaces separate."""
    return dict.fromkeys(names.split(), record)
