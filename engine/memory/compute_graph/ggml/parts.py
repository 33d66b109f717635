"""A graph in parts: sections for graphs whose layers read what others far away made.

Such layers have no neighbours that stand for all that comes before, so that a part holds for its place in one graph
only. What lies in memories goes by layers, as in other sections: the parts serve all layouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from engine.memory.compute_graph.ggml.graph import Graph, Tensor
from engine.memory.compute_graph.ggml.sections import (
    ON_CPU,
    Key,
    Section,
    number_tensors,
    place_of,
    stands_for_place,
)


def take_apart(graph: Graph, starts: Sequence[tuple[int, int]], common: Mapping[Tensor, Key]) -> tuple[Section, ...]:
    """Return the parts of a graph, given how many nodes and leafs come before each behind the first, and names of what
    layers have in common."""
    cuts = _cuts(graph, starts)
    nodes = [graph.nodes[start:end] for (start, _), (end, _) in pairwise(cuts)]
    of_part = {node: part for part, made in enumerate(nodes) for node in made}
    # What the host fills in, and what has no contents before something is put in it, is there from the start.
    first = dict.fromkeys((leaf for leaf in graph.leafs if leaf.home is None), 0) | of_part
    last: dict[Tensor, int] = {}
    read: list[dict[Tensor, None]] = []
    for part, made in enumerate(nodes):
        sources = [source for node in made for source in node.src]
        roots = (tensor.root for tensor in (*sources, *made) if tensor.root is not None)
        here = dict.fromkeys((*sources, *roots))
        read.append(here)
        for tensor in here:
            first.setdefault(tensor, part)
            last[tensor] = part
    keys = _keys(graph, first, last) | dict(common)
    known: list[list[tuple[Tensor, Key]]] = [[] for _ in cuts]
    shared: list[set[Key]] = [set() for _ in cuts]
    for tensor, end in last.items():
        for part in range(first[tensor] + 1, end + 1):
            shared[part].add(keys[tensor])
            if not tensor.is_leaf or (tensor.home is None and not tensor.is_input):
                known[part].append((tensor, keys[tensor]))
    order = {leaf: number for number, leaf in enumerate(graph.leafs)}
    found = []
    for part, made in enumerate(nodes):
        leafs = {*graph.leafs[cuts[part][1] : cuts[part + 1][1]], *(tensor for tensor in read[part] if tensor.is_leaf)}
        found.append(
            number_tensors(
                graph,
                made,
                sorted(leafs, key=order.__getitem__),
                keys,
                known[part],
                known[part + 1],
                _layers(graph, made, leafs),
                earlier=frozenset(shared[part]),
                later=frozenset(shared[part + 1]),
            )
        )
    return tuple(found)


def _cuts(graph: Graph, starts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return where parts begin and the last ends: each has a weight, and so a backend whatever is around it."""
    found = [(0, 0)]
    end = (len(graph.nodes), len(graph.leafs))
    for cut in (*starts, end):
        if any(source.is_weight for node in graph.nodes[found[-1][0] : cut[0]] for source in node.src):
            found.append(cut)
    return [*(found[:-1] or found), end]


def _keys(graph: Graph, first: dict[Tensor, int], last: dict[Tensor, int]) -> dict[Tensor, Key]:
    """Return names for all leafs, for what more than one part reads, and for the views of these."""
    named = {node for node in graph.nodes if last.get(node, -1) > first[node]}.union(graph.leafs)
    return {
        tensor: ("at", number)
        for number, tensor in enumerate((*graph.leafs, *graph.nodes))
        if tensor in named or tensor.root in named
    }


def _layers(graph: Graph, nodes: Sequence[Tensor], leafs: Iterable[Tensor]) -> tuple[int, ...]:
    """Return the places of the layers that a part refers to."""
    here = set(nodes)
    memories = {leaf.home for leaf in leafs} | {memory for node, memory in graph.fused if node in here}
    places = {place_of(memory) for memory in memories if memory is not None and stands_for_place(memory)}
    return tuple(sorted(places | {ON_CPU - 1 - node.backend for node in nodes if node.backend < ON_CPU}))
