"""Building of a model's graph from embeddings to logits, with the builders that its architecture's record names.

Mirrors `llama_model::build_graph`, with `build_inp_embd` and the other inputs of llama-graph.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

from msgspec import Struct

from engine.model.architectures.record import Architecture, Builder, GraphRecord, Style
from engine.model.gguf.model_file import ModelFile
from engine.planning.memory.compute_graph.building.attention import (
    build_attn_inp_indexer,
    build_attn_inp_kv,
    build_attn_inp_no_cache,
)
from engine.planning.memory.compute_graph.building.context import GraphContext, GraphInputs, Mixer
from engine.planning.memory.compute_graph.building.layer import LayerInstance, Weights
from engine.planning.memory.compute_graph.ggml.graph import Graph, Tensor
from engine.planning.memory.compute_graph.ggml.scheduler import HOST


class Tokens(Struct, frozen=True):
    """Input tensor with the token ids (`inp_tokens`)."""

    ids: Tensor


def build_inp_embd(ctx: GraphContext, first: LayerInstance, positions: Tensor) -> Tensor:
    """Return the input of the first layer: token embeddings, scaled and normalised as the architecture does.

    Mirrors `llm_graph_context::build_inp_embd` and the beginning of the graphs in src/models.

    `first`: the first layer. `positions`: input tensor with the positions of the tokens.
    """
    graph, outer = ctx.graph, ctx.outer
    tokens = Tokens(graph.new_input("i32", ctx.batch.n_tokens))
    ctx.shared.put(tokens)
    current = graph.get_rows(ctx.outer_weight(outer["token_embd"], HOST), tokens.ids)
    n_embd, n_tokens = ctx.hparams.n_embd, ctx.batch.n_tokens
    width = n_embd * (1 + ctx.hparams.stacked_inputs)
    if width != n_embd:
        current = graph.new("pad", (width, n_tokens), current)
    graph.build_forward_expand(current)
    # The graph can take tokens or embeddings, so llama.cpp allocates the inputs for both (`llm_graph_input_embd`).
    graph.build_forward_expand(graph.new_input("f32", width, n_tokens))
    if width != n_embd:
        current = graph.build_forward_expand(graph.view(current, (n_embd, n_tokens), current.nb[:2]))
    if ctx.hparams.scales_embeddings:
        current = graph.build_forward_expand(graph.scale(current))
    if ctx.style.input_scale:
        current = graph.scale(current)
    if "token_types" in outer:
        types = ctx.outer_weight(outer["token_types"], HOST)
        current = graph.add(current, graph.view(types, (ctx.hparams.n_embd,)))
    if ctx.style.position_table and "position_embd" in outer:
        embedded = graph.get_rows(ctx.outer_weight(outer["position_embd"], HOST), positions)
        current = graph.add(embedded, current) if ctx.style.embeds else graph.add(current, embedded)
    if ctx.style.input_norm:
        current = outer_norm(ctx, "token_embd_norm", first.buft, current, first.backend)
    return current


def outer_norm(ctx: GraphContext, name: str, buft: str, current: Tensor, backend: int = -1) -> Tensor:
    """Return `current` normalised, then multiplied by the norm weights `name` if the file has them.

    `name`: short name of weights that belong to no layer, such as `output_norm`.
    `buft`: buffer type of the weights.
    `backend`: index of the backend to which the node is pinned; -1 for none.
    """
    graph, outer = ctx.graph, ctx.outer
    current = ctx.raw_norm(current, layer_norm=ctx.style.layer_norm)
    current.backend = backend
    for stem, operation in ((name, graph.mul), (f"{name}.bias", graph.add)):
        if stem in outer:
            current = operation(current, ctx.outer_weight(outer[stem], buft))
    return current


def _first_of(outer: Weights, *names: str) -> str | None:
    return next((name for name in names if name in outer), None)


def finish(
    ctx: GraphContext, current: Tensor, on_logits: Callable[[GraphContext, Tensor], Tensor] | None = None
) -> Graph:
    """Build the operations after the last layer, and return the graph, which ends with logits or embeddings.

    `current`: output of the last layer.
    `on_logits`: builder of operations after the logits; None for no operations.
    """
    graph, outer, output = ctx.graph, ctx.outer, ctx.inputs.output
    if ctx.style.embeds:
        norm = _first_of(outer, "output_norm", "enc.output_norm")
        current = current if norm is None else outer_norm(ctx, norm, output, current)
        current.is_output = True
        graph.build_forward_expand(current)
        return graph
    # `llm_graph_result::set_outputs`: hidden states, embeddings and logits are outputs, which gallocr never frees.
    if ctx.style.out_ids == "before_norm":
        current.is_output = True
        current = graph.get_rows(current, ctx.inputs.inp_out_ids)
    if not ctx.style.bare_end:
        norm = _first_of(outer, "output_norm", "dec.output_norm") or "token_embd_norm"
        current = outer_norm(ctx, norm, output, current)
    if ctx.style.out_ids == "after_norm":
        current.is_output = True
        current = graph.get_rows(current, ctx.inputs.inp_out_ids)
    current.is_output = True
    if ctx.style.scaled_output:
        current = graph.scale(current)
    # Without `output.weight` llama.cpp multiplies with the token embedding (`TENSOR_DUPLICATED`).
    matrix = outer.get("output") or outer["token_embd"]
    logits = graph.mul_mat(ctx.outer_weight(matrix, HOST if ctx.style.reads_embedding else output), current)
    if "output.bias" in outer:
        logits = graph.add(logits, ctx.outer_weight(outer["output.bias"], output))
    if on_logits is not None:
        logits = on_logits(ctx, logits)
    logits.is_output = True
    graph.build_forward_expand(logits)
    return graph


_MODELS = "engine.planning.memory.compute_graph.models"

Step = Callable[[GraphContext, Tensor], Tensor]
"""Builder of a layer, or of the operations before the first or after the last layer."""


class Family(Struct, frozen=True):
    """The builder functions of one model.

    `record`: graph record of the model's architecture.
    `style`: the variant of the graph in src/models/llama.cpp: the record's style, with values from the model file.
    `embed`: builder of the input embeddings; None for `build_inp_embd`.
    `layer`: builder of a layer, which calls `attention` or `recurrence`.
    `before_layers`: builder of the operations before the first layer; None for no operations.
    `after_layers`: builder of the operations after the last layer; None for no operations.
    `logits`: builder of the operations after the logits; None for no operations.
    """

    record: GraphRecord
    style: Style
    embed: Callable[[GraphContext], Tensor] | None
    layer: Step
    attention: Mixer
    recurrence: Mixer | None
    before_layers: Step | None
    after_layers: Step | None
    logits: Step | None


@cache
def find_builder(name: Builder) -> Any:
    """Return the builder function with the name "module.function"; the module is imported on first use."""
    module, _, function = name.partition(".")
    return getattr(import_module(f"{_MODELS}.{module}"), function)


def find_family(model: ModelFile, architecture: Architecture) -> Family | None:
    """Return the builders of a model's graph; None if only a probe (a load without allocation) gives buffer sizes."""
    record = architecture.graph
    if record is None or _is_unmeasured(model):
        return None
    return Family(
        record=record,
        style=record.style_of(model),
        embed=_find_optional(record.embed),
        layer=find_builder(record.layer),
        attention=find_builder(record.attention),
        recurrence=_find_optional(record.recurrence),
        before_layers=_find_optional(record.before_layers),
        after_layers=_find_optional(record.after_layers),
        logits=_find_optional(record.logits),
    )


def _find_optional(name: Builder | None) -> Any:
    return None if name is None else find_builder(name)


def _is_unmeasured(model: ModelFile) -> bool:
    """Return whether the file is a variant of its architecture whose graph was not compared with that of llama.cpp."""
    mapping = model.hyper_parameter("deepstack_mapping")
    return isinstance(mapping, tuple) and any(isinstance(each, int) and each >= 0 for each in mapping)


def build_graph(
    ctx: GraphContext,
    family: Family,
    layers: Sequence[LayerInstance],
    output: str,
    *,
    sliding: bool,
    ends: bool = True,
    passed: Callable[[Tensor], None] = lambda _: None,
    inside: bool = False,
) -> Graph:
    """Return the graph of `layers`, with the embeddings before them.

    `output`: buffer type of the output layer.
    `sliding`: whether the model has sliding windows.
    `ends`: whether the graph continues to the output matrix after the last layer.
    `passed`: function that is called with the input of each layer, and with the output of the last one.
    `inside`: whether the model has layers before `layers`. The graph then has a single node in place of them.
    """
    # Made before the embeddings, because models with a table of positions read it there.
    positions = ctx.graph.new_input("i32", ctx.batch.n_tokens * ctx.hparams.n_pos_per_embd)
    current = build_inp_embd(ctx, layers[0], positions) if family.embed is None else family.embed(ctx)
    has_states = family.recurrence is not None
    ctx.begin(_make_inputs(ctx, positions, current, layers[-1], output, sliding=sliding, has_states=has_states))
    if family.before_layers is not None:
        current = family.before_layers(ctx, current)
    if inside:
        current = ctx.graph.like("left_out", current)
    for number, layer in enumerate(layers):
        passed(current)
        recurs = family.recurrence is not None and layer.hparams.is_recurrent
        ctx.enter(number, layer, family.recurrence if recurs and family.recurrence else family.attention)
        current = family.layer(ctx, current)
    passed(current)
    if not ends:
        return ctx.graph
    if family.after_layers is not None:
        current = family.after_layers(ctx, current)
    return finish(ctx, current, family.logits)


def _make_inputs(
    ctx: GraphContext,
    positions: Tensor,
    embeddings: Tensor,
    last: LayerInstance,
    output: str,
    *,
    sliding: bool,
    has_states: bool,
) -> GraphInputs:
    """Return the input tensors of all layers, made in llama.cpp's order.

    `last`: the last layer. `output`: buffer type of the output layer.
    `sliding`, `has_states`: whether the model has sliding windows, and whether it has recurrent states.
    """
    graph, batch = ctx.graph, ctx.batch
    if not ctx.has_cache:
        in_window = build_attn_inp_no_cache(ctx) if sliding else None
        inp_out_ids = graph.new_input("i32", batch.n_outputs)
        return GraphInputs(
            positions, embeddings, inp_out_ids, build_attn_inp_no_cache(ctx), in_window, last, output=output
        )
    rows = graph.new_input("i32", batch.n_states) if has_states else None
    # A model with windows and states has no rotation matrices (`self_k_rot`), whatever the type of its caches.
    rotates = rows is None or not sliding
    return GraphInputs(
        inp_pos=positions,
        inp_embd=embeddings,
        inp_out_ids=graph.new_input("i32", batch.n_outputs),
        inp_attn=build_attn_inp_kv(ctx, k_only=ctx.hparams.latent, rotate=rotates),
        inp_attn_swa=build_attn_inp_kv(ctx, swa=True, rotate=rotates) if sliding else None,
        last=last,
        inp_indexer=build_attn_inp_indexer(ctx) if ctx.hparams.indexer.n_head else None,
        q_scale=graph.new_input("f32", 1, 1, batch.n_tokens) if ctx.style.scales_nope_queries else None,
        state_rows=None if rows is None else graph.view(rows, (batch.n_sequences,)),
        unused_rows=None if rows is None else graph.view(rows, (batch.n_states - batch.n_sequences,)),
        output=output,
    )
