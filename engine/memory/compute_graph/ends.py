"""What comes before the first layer and behind the last: embeddings and their norms, the output."""

from __future__ import annotations

from engine.memory.compute_graph.facts import Weights
from engine.memory.compute_graph.graph import Graph, Tensor
from engine.memory.compute_graph.scheduler import HOST
from engine.memory.compute_graph.sketch import Placed, Sketch
from engine.memory.compute_graph.transformer import Inputs, Style


def embed(sketch: Sketch, style: Style, first: Placed, positions: Tensor) -> Tensor:
    """Return what the layer `first` gets: rows for the tokens, and whatever is made of them."""
    graph, outer = sketch.graph, sketch.outer
    tokens = sketch.shared["tokens"] = graph.new_input("i32", sketch.batch.n_tokens)
    current = graph.get_rows(sketch.outer_weight(outer["token_embd"], HOST), tokens)
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
    if style.input_scale:
        current = graph.scale(current)
    if "token_types" in outer:
        types = sketch.outer_weight(outer["token_types"], HOST)
        current = graph.add(current, graph.view(types, (sketch.numbers.n_embd,)))
    if style.position_table and "position_embd" in outer:
        places = graph.get_rows(sketch.outer_weight(outer["position_embd"], HOST), positions)
        current = graph.add(places, current) if style.embeds else graph.add(current, places)
    if style.input_norm:
        current = outer_norm(sketch, style, "token_embd_norm", first.memory, current, first.backend)
    return current


def outer_norm(sketch: Sketch, style: Style, name: str, memory: str, current: Tensor, backend: int = -1) -> Tensor:
    """Return `current` normalised with weights outside of the blocks, if the file has them."""
    graph, outer = sketch.graph, sketch.outer
    current = sketch.raw_norm(current, layer_norm=style.layer_norm)
    current.backend = backend
    for stem, operation in ((name, graph.mul), (f"{name}.bias", graph.add)):
        if stem in outer:
            current = operation(current, sketch.outer_weight(outer[stem], memory))
    return current


def _first_of(outer: Weights, *names: str) -> str | None:
    return next((name for name in names if name in outer), None)


def finish(sketch: Sketch, style: Style, inputs: Inputs, output: str, current: Tensor) -> Graph:
    """Return the graph with logits behind the last layer's `current`, or with what it makes of the tokens."""
    graph, outer = sketch.graph, sketch.outer
    if style.embeds:
        norm = _first_of(outer, "output_norm", "enc.output_norm")
        current = current if norm is None else outer_norm(sketch, style, norm, output, current)
        current.is_output = True
        graph.expand(current)
        return graph
    if style.late_rows == "before_norm":
        current.is_output = True
        current = graph.get_rows(current, inputs.output_rows)
    if not style.bare_end:
        norm = _first_of(outer, "output_norm", "dec.output_norm") or "token_embd_norm"
        current = outer_norm(sketch, style, norm, output, current)
    if style.late_rows == "after_norm":
        current.is_output = True
        current = graph.get_rows(current, inputs.output_rows)
    current.is_output = True
    if style.scaled_output:
        current = graph.scale(current)
    matrix = outer.get("output") or outer["token_embd"]
    logits = graph.mul_mat(sketch.outer_weight(matrix, HOST if style.reads_embedding else output), current)
    if "output.bias" in outer:
        logits = graph.add(logits, sketch.outer_weight(outer["output.bias"], output))
    logits.is_output = True
    graph.expand(logits)
    return graph
