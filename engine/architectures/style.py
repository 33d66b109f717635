"""How the layers of an architecture depart from llama's, flag by flag."""

from __future__ import annotations

from typing import Literal

import msgspec

Rope = Literal["all", "none", "sliding", "sliding_or_dense", "finetuned", "but_fourth", "but_first_of_four", "but_last"]
"""Which layers turn queries and keys by position: `finetuned` asks the file, `but_fourth` leaves out every fourth,
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

    norms_behind: bool = False
    """The norms of a layer's two parts stand behind them."""

    post_norm: bool = True
    """The norm behind attention is applied to its output, not to the sum with the residual."""

    residual_first: Literal["", "first", "second", "both"] = ""
    """Which of a layer's two sums begin with the residual; a sum takes the place of its first term if it can."""

    scaled_sums: bool = False
    """What a layer adds to its input is scaled whatever the file says."""

    parallel: Literal["", "input", "apart"] = ""
    """The feed-forward part stands beside attention and reads the layer's `input` norm, or one `apart`."""

    parallel_sum: Literal[
        "attention ffn input", "ffn attention input", "ffn input attention", "ffn (attention input)"
    ] = "attention ffn input"
    """The order in which the three terms of a parallel layer are added."""

    # ------------------------------------------------------------------ attention

    rope: Rope = "all"
    """Which layers turn queries and keys by position."""

    qk_norm: Literal["before", "after", "flat", "none"] = "before"
    """Norms of queries and keys come before or after turning; `flat`: before heads are told apart; `none`: they
    are only loaded."""

    scaled_q: bool = False
    """Queries are scaled before attention."""

    scales_unturned: bool = False
    """Queries that are not turned are scaled by their position."""

    shapes_queries: bool = False
    """Queries to compressed keys are put into the shape of heads before they are cut; else that is done in one."""

    projections: Literal["full", "scaled", "bare"] = "full"
    """What makes queries, keys and values: products with the scales and biases that the file has for them, with the
    scales alone, or with neither."""

    scaled_attention: bool = False
    """What attention returns is scaled, behind its output matrix."""

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

    late_rows: Literal["", "before_norm", "after_norm", "after_post_norm", "never"] = ""
    """Wanted rows are picked behind the last layer, before or behind the last norm, or in the last layer behind the
    norm of attention's output, or never; by default in the last layer right behind attention."""

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
