"""What comes before the first layer and behind the last: embeddings and their norms, the output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.memory.compute_graph.building.facts import Weights
from engine.memory.compute_graph.building.placed import Placed
from engine.memory.compute_graph.building.sketch import Sketch
from engine.memory.compute_graph.ggml.graph import Graph, Tensor
from engine.memory.compute_graph.ggml.scheduler import HOST


@dataclass(frozen=True, slots=True)
class Tokens:
    """What the embeddings are looked up by."""

    ids: Tensor


def embed(sketch: Sketch, first: Placed, positions: Tensor) -> Tensor:
    """Return what the layer `first` gets: rows for the tokens, and whatever is made of them."""
    graph, outer = sketch.graph, sketch.outer
    tokens = Tokens(graph.new_input("i32", sketch.batch.n_tokens))
    sketch.shared.put(tokens)
    current = graph.get_rows(sketch.outer_weight(outer["token_embd"], HOST), tokens.ids)
    n_embd, n_tokens = sketch.numbers.n_embd, sketch.batch.n_tokens
    width = n_embd * (1 + sketch.numbers.stacked_inputs)
    if width != n_embd:
        current = graph.new("pad", (width, n_tokens), current)
    graph.expand(current)
    graph.expand(graph.new_input("f32", width, n_tokens))
    if width != n_embd:
        current = graph.expand(graph.view(current, (n_embd, n_tokens), current.nb[:2]))
    if sketch.numbers.scales_embeddings:
        current = graph.expand(graph.scale(current))
    if sketch.style.input_scale:
        current = graph.scale(current)
    if "token_types" in outer:
        types = sketch.outer_weight(outer["token_types"], HOST)
        current = graph.add(current, graph.view(types, (sketch.numbers.n_embd,)))
    if sketch.style.position_table and "position_embd" in outer:
        places = graph.get_rows(sketch.outer_weight(outer["position_embd"], HOST), positions)
        current = graph.add(places, current) if sketch.style.embeds else graph.add(current, places)
    if sketch.style.input_norm:
        current = outer_norm(sketch, "token_embd_norm", first.memory, current, first.backend)
    return current


def outer_norm(sketch: Sketch, name: str, memory: str, current: Tensor, backend: int = -1) -> Tensor:
    """Return `current` normalised with weights outside of the blocks, if the file has them."""
    graph, outer = sketch.graph, sketch.outer
    current = sketch.raw_norm(current, layer_norm=sketch.style.layer_norm)
    current.backend = backend
    for stem, operation in ((name, graph.mul), (f"{name}.bias", graph.add)):
        if stem in outer:
            current = operation(current, sketch.outer_weight(outer[stem], memory))
    return current


def _first_of(outer: Weights, *names: str) -> str | None:
    return next((name for name in names if name in outer), None)


def finish(sketch: Sketch, current: Tensor, on_logits: Callable[[Sketch, Tensor], Tensor] | None = None) -> Graph:
    """Return the graph with logits behind the last layer's `current`, or with what it makes of the tokens."""
    graph, outer, output = sketch.graph, sketch.outer, sketch.inputs.output
    if sketch.style.embeds:
        norm = _first_of(outer, "output_norm", "enc.output_norm")
        current = current if norm is None else outer_norm(sketch, norm, output, current)
        current.is_output = True
        graph.expand(current)
        return graph
    if sketch.style.late_rows == "before_norm":
        current.is_output = True
        current = graph.get_rows(current, sketch.inputs.output_rows)
    if not sketch.style.bare_end:
        norm = _first_of(outer, "output_norm", "dec.output_norm") or "token_embd_norm"
        current = outer_norm(sketch, norm, output, current)
    if sketch.style.late_rows == "after_norm":
        current.is_output = True
        current = graph.get_rows(current, sketch.inputs.output_rows)
    current.is_output = True
    if sketch.style.scaled_output:
        current = graph.scale(current)
    matrix = outer.get("output") or outer["token_embd"]
    logits = graph.mul_mat(sketch.outer_weight(matrix, HOST if sketch.style.reads_embedding else output), current)
    if "output.bias" in outer:
        logits = graph.add(logits, sketch.outer_weight(outer["output.bias"], output))
    if on_logits is not None:
        logits = on_logits(sketch, logits)
    logits.is_output = True
    graph.expand(logits)
    return graph
