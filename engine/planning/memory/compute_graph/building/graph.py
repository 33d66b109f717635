"""The graph of a model, from the embeddings to the logits, put together from the builders that its record names.

Mirrors `llama_model::build_graph`, and `build_inp_embd` and the inputs of llama-graph.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from engine.model.architectures.record import Architecture, Builder, GraphRecord, Style
from engine.model.gguf.model_file import ModelFile
from engine.planning.memory.compute_graph.building.attention import (
    build_attn_inp_indexer,
    build_attn_inp_kv,
    build_attn_inp_no_cache,
)
from engine.planning.memory.compute_graph.building.context import GraphContext, Inputs, Mixer
from engine.planning.memory.compute_graph.building.layer import Placed, Weights
from engine.planning.memory.compute_graph.ggml.graph import Graph, Tensor
from engine.planning.memory.compute_graph.ggml.scheduler import HOST


@dataclass(frozen=True, slots=True)
class Tokens:
    """What the embeddings are looked up by."""

    ids: Tensor


def build_inp_embd(ctx: GraphContext, first: Placed, positions: Tensor) -> Tensor:
    """Return what the layer `first` gets: rows for the tokens, and whatever is made of them."""
    graph, outer = ctx.graph, ctx.outer
    tokens = Tokens(graph.new_input("i32", ctx.batch.n_tokens))
    ctx.shared.put(tokens)
    current = graph.get_rows(ctx.outer_weight(outer["token_embd"], HOST), tokens.ids)
    n_embd, n_tokens = ctx.numbers.n_embd, ctx.batch.n_tokens
    width = n_embd * (1 + ctx.numbers.stacked_inputs)
    if width != n_embd:
        current = graph.new("pad", (width, n_tokens), current)
    graph.expand(current)
    graph.expand(graph.new_input("f32", width, n_tokens))
    if width != n_embd:
        current = graph.expand(graph.view(current, (n_embd, n_tokens), current.nb[:2]))
    if ctx.numbers.scales_embeddings:
        current = graph.expand(graph.scale(current))
    if ctx.style.input_scale:
        current = graph.scale(current)
    if "token_types" in outer:
        types = ctx.outer_weight(outer["token_types"], HOST)
        current = graph.add(current, graph.view(types, (ctx.numbers.n_embd,)))
    if ctx.style.position_table and "position_embd" in outer:
        places = graph.get_rows(ctx.outer_weight(outer["position_embd"], HOST), positions)
        current = graph.add(places, current) if ctx.style.embeds else graph.add(current, places)
    if ctx.style.input_norm:
        current = outer_norm(ctx, "token_embd_norm", first.memory, current, first.backend)
    return current


def outer_norm(ctx: GraphContext, name: str, memory: str, current: Tensor, backend: int = -1) -> Tensor:
    """Return `current` normalised with weights outside of the blocks, if the file has them."""
    graph, outer = ctx.graph, ctx.outer
    current = ctx.raw_norm(current, layer_norm=ctx.style.layer_norm)
    current.backend = backend
    for stem, operation in ((name, graph.mul), (f"{name}.bias", graph.add)):
        if stem in outer:
            current = operation(current, ctx.outer_weight(outer[stem], memory))
    return current


def _first_of(outer: Weights, *names: str) -> str | None:
    return next((name for name in names if name in outer), None)


def finish(
    ctx: GraphContext, current: Tensor, on_logits: Callable[[GraphContext, Tensor], Tensor] | None = None
) -> Graph:
    """Return the graph with logits behind the last layer's `current`, or with what it makes of the tokens."""
    graph, outer, output = ctx.graph, ctx.outer, ctx.inputs.output
    if ctx.style.embeds:
        norm = _first_of(outer, "output_norm", "enc.output_norm")
        current = current if norm is None else outer_norm(ctx, norm, output, current)
        current.is_output = True
        graph.expand(current)
        return graph
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
    matrix = outer.get("output") or outer["token_embd"]
    logits = graph.mul_mat(ctx.outer_weight(matrix, HOST if ctx.style.reads_embedding else output), current)
    if "output.bias" in outer:
        logits = graph.add(logits, ctx.outer_weight(outer["output.bias"], output))
    if on_logits is not None:
        logits = on_logits(ctx, logits)
    logits.is_output = True
    graph.expand(logits)
    return graph


_MODELS = "engine.planning.memory.compute_graph.models"

Step = Callable[[GraphContext, Tensor], Tensor]
"""Makes a part of the graph: a layer, or what comes before the first or behind the last, from what came before."""


@dataclass(frozen=True, slots=True)
class Family:
    """The builders of one model. `record`: what they look at besides; `style`: with what the file decides about it."""

    record: GraphRecord
    style: Style
    embed: Callable[[GraphContext], Tensor] | None
    layer: Step
    attention: Mixer
    recurrence: Mixer | None
    before: Step | None
    behind: Step | None
    logits: Step | None


@cache
def find_builder(name: Builder) -> Any:
    """Return the function of a name in a record; its module is imported now."""
    module, _, function = name.partition(".")
    return getattr(import_module(f"{_MODELS}.{module}"), function)


def find_family(model: ModelFile, architecture: Architecture) -> Family | None:
    """Return the builders of a model, None where only a probe can tell its compute buffers."""
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
        before=_find_optional(record.before),
        behind=_find_optional(record.behind),
        logits=_find_optional(record.logits),
    )


def _find_optional(name: Builder | None) -> Any:
    return None if name is None else find_builder(name)


def _is_unmeasured(model: ModelFile) -> bool:
    """Return whether the file asks for a variant of its architecture that was never compared with the engine's."""
    mapping = model.hyper_parameter("deepstack_mapping")
    return isinstance(mapping, tuple) and any(isinstance(each, int) and each >= 0 for each in mapping)


def build_graph(
    ctx: GraphContext,
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
    positions = ctx.graph.new_input("i32", ctx.batch.n_tokens * ctx.numbers.positions)
    current = build_inp_embd(ctx, layers[0], positions) if family.embed is None else family.embed(ctx)
    has_states = family.recurrence is not None
    ctx.begin(_make_inputs(ctx, positions, current, layers[-1], output, sliding=sliding, has_states=has_states))
    if family.before is not None:
        current = family.before(ctx, current)
    if inside:
        current = ctx.graph.like("left_out", current)
    for place, layer in enumerate(layers):
        passed(current)
        recurs = family.recurrence is not None and layer.numbers.is_recurrent
        ctx.enter(place, layer, family.recurrence if recurs and family.recurrence else family.attention)
        current = family.layer(ctx, current)
    passed(current)
    if not ends:
        return ctx.graph
    if family.behind is not None:
        current = family.behind(ctx, current)
    return finish(ctx, current, family.logits)


def _make_inputs(
    ctx: GraphContext,
    positions: Tensor,
    embeddings: Tensor,
    last: Placed,
    output: str,
    *,
    sliding: bool,
    has_states: bool,
) -> Inputs:
    """Return what all layers read, made in the engine's order."""
    graph, batch = ctx.graph, ctx.batch
    if not ctx.has_cache:
        in_window = build_attn_inp_no_cache(ctx) if sliding else None
        inp_out_ids = graph.new_input("i32", batch.n_outputs)
        return Inputs(positions, embeddings, inp_out_ids, build_attn_inp_no_cache(ctx), in_window, last, output=output)
    rows = graph.new_input("i32", batch.n_states) if has_states else None
    # A model with windows and states has no rotation matrices (`self_k_rot`), whatever the type of its caches.
    rotates = rows is None or not sliding
    return Inputs(
        positions=positions,
        embeddings=embeddings,
        inp_out_ids=graph.new_input("i32", batch.n_outputs),
        full=build_attn_inp_kv(ctx, k_only=ctx.numbers.latent, rotate=rotates),
        sliding=build_attn_inp_kv(ctx, swa=True, rotate=rotates) if sliding else None,
        last=last,
        indexer=build_attn_inp_indexer(ctx) if ctx.numbers.indexer.n_heads else None,
        q_scale=graph.new_input("f32", 1, 1, batch.n_tokens) if ctx.style.scales_nope_queries else None,
        state_rows=None if rows is None else graph.view(rows, (batch.n_sequences,)),
        unused_rows=None if rows is None else graph.view(rows, (batch.n_states - batch.n_sequences,)),
        output=output,
    )
