"""A graph in sections: what neighbouring layers of two kinds add to it, whatever devices they are on.

Layers of a kind make the same nodes, so a section is made once and stands for all layers of its kind after a layer of
another. It is made of one layer, or of a few if layers leave their nodes to the next one. Memories and the backends
that norms are pinned to go by the place of the layer: see `memory_at` and `pin_at`.

Layers that read what others far away made have no neighbours that stand for all that comes before: their graph is
taken apart into sections that hold for one place only (`take_apart`), and serve all layouts all the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from engine.planning.memory.compute_graph.ggml.graph import INPLACE_OPS, VIEW_OPS, Graph, Tensor

ON_CPU = -2

Key = tuple[object, ...]
"""Name of a tensor that more than one section uses: `("in", n)` an input, `("view", n, shape, offset)` a view of one,
`("weight", home)` a weight that layers share, `("embd", n)` what comes before the layers, `(0, n)` what the section's
layer makes and `(-1, n)` what the layer before made. `("copy", key, backend)` is a copy of one. `(n, EARLY, slot)`
is made by the section `n` places further on, and computed before it (see `vulkan_order`)."""
EARLY = "early"


Shape = tuple[tuple[object, ...], ...]
"""Operations and sizes of the tensors that a layer makes, in order."""


def memory_at(place: int, left_out: int = 0) -> str:
    """Return what stands for the memory of the layer at `place`, on a device of the sort `left_out`."""
    return f"@{place}.{left_out}"


def stands_for_place(memory: str) -> bool:
    """Return whether a name of a memory is one of `memory_at`."""
    return memory.startswith("@")


def place_of(memory: str) -> int:
    """Return the place of the layer whose memory `memory_at` calls so."""
    return int(memory[1:].partition(".")[0])


def pin_at(place: int) -> int:
    """Return what stands for the backend that norms of the layer at `place` are pinned to."""
    return ON_CPU - 1 - place


def name_after(key: Key) -> Key | None:
    """Return what the next section calls `key`, None for what it cannot know."""
    if key[0] == "copy":
        original = name_after(key[1])  # type: ignore[arg-type]
        return None if original is None else ("copy", original, key[2])
    if isinstance(key[0], str):
        return key
    if key[1] == EARLY:
        return (key[0] - 1, *key[1:]) if key[0] else None  # type: ignore[operator]
    if key[0] == 0:
        return (-1, key[1])
    return (-2, "out") if key == (-1, "out") else None


def is_shared(key: Key) -> bool:
    """Return whether a name means the same tensor in all sections."""
    return is_shared(key[1]) if key[0] == "copy" else isinstance(key[0], str)  # type: ignore[arg-type]


def is_early(key: Key) -> bool:
    """Return whether a name is that of something which is computed before the turn of its section."""
    return key[1] == EARLY


def _name_before(key: Key) -> Key | None:
    if key[0] == "copy":
        original = _name_before(key[1])  # type: ignore[arg-type]
        return None if original is None else ("copy", original, key[2])
    if isinstance(key[0], str):
        return key
    return (key[0] + 1, *key[1:]) if key[0] in (-1, -2) or key[1] == EARLY else None  # type: ignore[operator]


def _original(key: Key) -> object:
    return key[1] if key[0] == "copy" else key


def _is_weight(key: object) -> bool:
    return isinstance(key, tuple) and key[0] == "weight"


class FarReachError(Exception):
    """A layer reads what a layer made that is not its neighbour: the graph cannot be taken apart."""


class Node(NamedTuple):
    """One node of a section, by the numbers of its tensors: itself, what it reads, and whether it is only a view.

    `roots`: of what it reads; `weights`: those of its sources that are weights; `alike`: those whose place its result
    may take; `is_placed`: whether that has a place of its own.
    """

    number: int
    sources: tuple[int, ...]
    is_view: bool
    roots: tuple[int, ...]
    weights: tuple[int, ...]
    alike: tuple[int, ...]
    is_placed: bool


@dataclass(frozen=True, slots=True, eq=False)
class Section:
    """Neighbouring nodes of a graph, in order. Everything goes by the numbers of its `tensors`.

    `roots`: what each tensor is a view of (`view_src`), itself if it is none.
    `names`: what other sections know each tensor by; None if they do not.
    `operations`: nodes that compute something.
    `leafs`: what nodes read and nothing computes, in the order in which `ggml_build_forward_expand` finds it.
    `scratch`: leafs that have no memory before something is put in them.
    `known_before`: tensors that sections before this one have backends for.
    `known_after`: tensors whose backends the next section has to know, with their names there.
    `reads`: how often each tensor is read, views of it included, and once more if it is an output.
    `fused`: see `Graph`.
    `shape`, `shape_before`: what the layer and the one before it make; they tell whether sections can be neighbours.
    `layers`: the places of the layers whose memories it uses.
    `earlier`, `later`: for sections that hold for one place in one graph, the names that they share with the sections
    before and after; None if names are the same, or follow from the distance, everywhere.
    """

    tensors: tuple[Tensor, ...]
    roots: tuple[int, ...]
    names: tuple[Key | None, ...]
    nodes: tuple[Node, ...]
    operations: tuple[int, ...]
    leafs: tuple[int, ...]
    scratch: tuple[int, ...]
    known_before: tuple[tuple[int, Key], ...]
    known_after: tuple[tuple[int, Key], ...]
    reads: tuple[int, ...]
    fused: tuple[tuple[int, str], ...]
    layers: tuple[int, ...]
    shape: Shape = ()
    shape_before: Shape = ()
    earlier: frozenset[Key] | None = None
    later: frozenset[Key] | None = None

    def name_after(self, key: Key) -> Key | None:
        """Return what the section behind calls `key`, None for what it cannot know."""
        return name_after(key) if self.later is None or is_early(key) else key

    def name_before(self, key: Key) -> Key | None:
        """Return what the section before calls `key`, None for what it cannot know."""
        return _name_before(key) if self.earlier is None or is_early(key) else key

    def is_known_after(self, key: Key) -> bool:
        """Return whether the sections behind may ask for `key`."""
        return self.later is None or (original := _original(key)) in self.later or _is_weight(original)

    def is_known_before(self, key: Key) -> bool:
        """Return whether the sections before have to do with `key`."""
        if self.earlier is None or is_early(key):
            return True
        return (original := _original(key)) in self.earlier or _is_weight(original)


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a layer begins in a graph: nodes and leafs that are there by then, `waiting` nodes that
    it will add, what it gets, and the inputs that are there."""

    n_nodes: int
    n_leafs: int
    waiting: tuple[Tensor, ...]
    current: Tensor | None
    n_inputs: int

    @property
    def handed(self) -> frozenset[Tensor]:
        """What the layer can read of what the one before made: what the nodes that it will add do."""
        read = [source for node in self.waiting for source in node.src]
        return frozenset((*read, *(source.root for source in read if source.root is not None)))


class Marks:
    """Watches a graph while it is built. `starts`: the places of the layers at which sections begin or end."""

    def __init__(self, graph: Graph, starts: Collection[int]) -> None:
        self.graph = graph
        self.found: list[Mark] = []
        self._starts = starts
        self._n_passed = 0

    def __call__(self, current: Tensor) -> None:
        """Note that the next layer begins, which gets `current`."""
        self._n_passed += 1
        if self._n_passed - 1 not in self._starts:
            return
        self.found.append(
            Mark(
                len(self.graph.nodes), len(self.graph.leafs), tuple(_waiting(current)), current, len(self.graph.inputs)
            )
        )

    def first(self, shared: Mapping[Tensor, Key], layers: Collection[int]) -> Section:
        """Return what comes before the first layer, and that layer: up to the second mark."""
        return self._cut(0, self.found[1].n_nodes, 0, shared, layers)

    def last(self, shared: Mapping[Tensor, Key], layers: Collection[int], *, open_end: bool) -> Section:
        """Return the last layer of the graph, from its mark on; `open_end`: what comes behind it does not count."""
        place = len(self.found) - 2 if open_end else len(self.found) - 1
        end = self.found[-1].n_nodes if open_end else len(self.graph.nodes)
        return self._cut(self.found[place].n_nodes, end, place, shared, layers)

    def _cut(self, start: int, end: int, place: int, shared: Mapping[Tensor, Key], layers: Collection[int]) -> Section:
        """Return the nodes from `start` to `end` as the section of the layer that begins at mark `place`."""
        graph = self.graph
        keys: dict[Tensor, Key] = {tensor: ("in", number) for number, tensor in enumerate(graph.inputs)}
        keys |= shared
        if any(tensor not in shared for tensor in graph.inputs[self.found[0].n_inputs :]):
            raise FarReachError
        made = [_made(graph, before, mark) for before, mark in zip([None, *self.found], self.found, strict=False)]
        made.append(_made(graph, self.found[-1], Mark(len(graph.nodes), 0, (), None, 0)))
        for owner in (place, place + 1):
            if owner and owner < len(self.found):
                handed = self.found[owner].handed
                numbered = enumerate(made[owner])
                keys.update((tensor, (owner - 1 - place, number)) for number, tensor in numbered if tensor in handed)
        for owner, mark in enumerate(self.found[: place + 2]):
            assert mark.current is not None
            if mark.current.root is not None:
                raise FarReachError
            keys[mark.current] = (owner - 1 - place, "out")
        # Layers share views of inputs, which are nodes of the first one.
        nodes = tuple(node for node in graph.nodes[start:end] if not (place and _is_view_of_input(node)))
        leafs = _leafs(nodes) if place else tuple(graph.leafs[: self.found[1].n_leafs])
        _check_reach(nodes, leafs, keys)
        shapes = {"shape": _shape(made[place + 1]), "shape_before": _shape(made[place])}
        known = [(tensor, key) for tensor, key in keys.items() if key[0] in (-1, -2)]
        passed = [(tensor, found) for tensor, key in keys.items() if key[0] in (0, -1) and (found := name_after(key))]
        return number_tensors(graph, nodes, leafs, keys, known, passed, tuple(layers), **shapes)


def number_tensors(
    graph: Graph,
    nodes: Sequence[Tensor],
    leafs: Sequence[Tensor],
    keys: Mapping[Tensor, Key],
    known_before: Iterable[tuple[Tensor, Key]],
    known_after: Iterable[tuple[Tensor, Key]],
    layers: tuple[int, ...],
    **others: Any,
) -> Section:
    """Return a section of these tensors; `others`: fields of it that need no numbers."""
    known_before, known_after = tuple(known_before), tuple(known_after)
    numbers: dict[Tensor, int] = {}
    there: list[Tensor] = [*leafs, *nodes]
    for node in nodes:
        there += node.src
    there += [tensor for tensor, _ in (*known_before, *known_after)]
    there += [tensor.root for tensor in there if tensor.root is not None]
    for tensor in there:
        numbers.setdefault(tensor, len(numbers))
    tensors = tuple(numbers)
    roots = tuple([numbers[tensor.root or tensor] for tensor in tensors])
    numbered = tuple([_number_node(node, numbers, roots) for node in nodes])
    reads = [int(tensor.is_output) for tensor in tensors]
    for found in numbered:
        for root in found.roots:
            reads[root] += 1
    here = set(nodes)
    return Section(
        tensors=tensors,
        roots=roots,
        names=tuple([keys.get(tensor) for tensor in tensors]),
        nodes=numbered,
        operations=tuple([node.number for node in numbered if not node.is_view]),
        leafs=tuple([numbers[leaf] for leaf in leafs]),
        scratch=tuple([numbers[leaf] for leaf in leafs if leaf.home is None and not leaf.is_input]),
        known_before=tuple([(numbers[tensor], key) for tensor, key in known_before]),
        known_after=tuple([(numbers[tensor], key) for tensor, key in known_after]),
        reads=tuple(reads),
        fused=tuple([(numbers[node], memory) for node, memory in graph.fused if node in here]),
        layers=layers,
        **others,
    )


def _number_node(node: Tensor, numbers: Mapping[Tensor, int], roots: Sequence[int]) -> Node:
    # One loop: half of what a first step takes is spent on numbering.
    sources, source_roots, weights, alike = [], [], [], []
    may_reuse = node.root is None and node.op in INPLACE_OPS
    for source in node.src:
        number = numbers[source]
        sources.append(number)
        source_roots.append(roots[number])
        if source.is_weight:
            weights.append(number)
        # Views do not qualify.
        if may_reuse and source.root is None and is_alike(source, node):
            alike.append(number)
    return Node(
        numbers[node],
        tuple(sources),
        node.op in VIEW_OPS,
        tuple(source_roots),
        tuple(weights),
        tuple(alike),
        node.root is None,
    )


def is_alike(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors have the same layout."""
    return first.type == second.type and first.ne == second.ne and first.nb == second.nb


def _check_reach(nodes: Sequence[Tensor], leafs: Sequence[Tensor], keys: dict[Tensor, Key]) -> None:
    """Name the views of inputs among what `nodes` read.

    Raises:
        FarReachError: they read what is no neighbour's.
    """
    here = set(nodes)
    _name_views_of_inputs(nodes, keys)
    for source in (source for node in nodes for source in node.src if source not in here and not source.is_leaf):
        if keys.get(source, (None,))[0] not in (-1, -2, "view") or _is_view_of_leaf(source):
            raise FarReachError
    if any(leaf.home is None and not leaf.is_input for leaf in leafs):
        raise FarReachError


def _name_views_of_inputs(nodes: Sequence[Tensor], keys: dict[Tensor, Key]) -> None:
    for node in nodes:
        for source in node.src:
            if _is_view_of_input(source):
                assert source.root is not None
                keys[source] = ("view", *keys[source.root], source.ne, source.nb)


def _is_view_of_leaf(tensor: Tensor) -> bool:
    return tensor.root is not None and tensor.root.is_leaf and not tensor.root.is_input


def _shape(made: Sequence[Tensor]) -> Shape:
    return tuple((tensor.op, tensor.type, tensor.ne) for tensor in made)


def _made(graph: Graph, before: Mark | None, mark: Mark) -> list[Tensor]:
    """Return the nodes of what lies between two marks, those that are still waiting last."""
    waited = set(before.waiting) if before else set()
    start = before.n_nodes if before else 0
    nodes = [*graph.nodes[start : mark.n_nodes], *mark.waiting]
    return [node for node in nodes if node not in waited and not _is_view_of_input(node)]


def _waiting(current: Tensor) -> list[Tensor]:
    """Return the nodes that expanding `current` would add to the graph, in order."""
    found: list[Tensor] = []
    if not current.visited:
        _visit_waiting(current, set(), found)
    return found


def _visit_waiting(tensor: Tensor, seen: set[Tensor], found: list[Tensor]) -> None:
    # No function inside another: one that calls itself holds itself, and with it the whole graph.
    seen.add(tensor)
    for source in tensor.src:
        if not source.visited and source not in seen:
            _visit_waiting(source, seen, found)
    if not tensor.is_leaf:
        found.append(tensor)


def _leafs(nodes: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the leafs of `nodes`, in the order in which `ggml_build_forward_expand` finds them."""
    here, seen, found = set(nodes), set[Tensor](), dict[Tensor, None]()
    for node in nodes:
        if node not in seen:
            _visit_leafs(node, here, seen, found)
    return tuple(found)


def _visit_leafs(tensor: Tensor, here: set[Tensor], seen: set[Tensor], found: dict[Tensor, None]) -> None:
    seen.add(tensor)
    if tensor.is_leaf:
        found[tensor] = None
    elif tensor in here or _is_view_of_input(tensor):
        for source in tensor.src:
            if source not in seen:
                _visit_leafs(source, here, seen, found)


def _is_view_of_input(tensor: Tensor) -> bool:
    return tensor.op in VIEW_OPS and tensor.root is not None and tensor.root.is_input


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
                _layers_of(graph, made, leafs),
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


def _layers_of(graph: Graph, nodes: Sequence[Tensor], leafs: Iterable[Tensor]) -> tuple[int, ...]:
    """Return the places of the layers that a part refers to."""
    here = set(nodes)
    memories = {leaf.home for leaf in leafs} | {memory for node, memory in graph.fused if node in here}
    places = {place_of(memory) for memory in memories if memory is not None and stands_for_place(memory)}
    return tuple(sorted(places | {ON_CPU - 1 - node.backend for node in nodes if node.backend < ON_CPU}))
