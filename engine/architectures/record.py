"""What a record of an architecture says: where it departs from a model whose layers all keep keys and values of the
whole context, may be split in any way, and are built like llama's.

Sources are `load_arch_hparams` and the graph of each file in llama.cpp's src/models, `llama_model::create_memory` and
`llm_arch_supports_sm_tensor`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.architectures.graph_record import GraphRecord


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

    turns_by_table: bool = False
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
