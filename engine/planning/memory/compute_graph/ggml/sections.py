"""Sections of a graph: consecutive nodes, mostly those of one layer, with placeholders for devices.

Layers of one kind have the same nodes. So a section is built once for each combination of a layer's kind and the kind
of the layer before it, and is used for all layers with the same combination. A section contains several layers if nodes
of a layer are added to the graph only with the next layer (`ggml_build_forward_expand`). Buffer types and pinned
backends are placeholders that contain the layer's number in the section: see `buft_at` and `pin_at`. Tensors that
several sections read have a name (`Key`), which depends on the number of sections between maker and reader.

Some layers read tensors of layers that are not their neighbours. Then the whole graph is built, and `partition_graph`
cuts it into sections. Such a section is used for one layer only, but on any devices.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from itertools import pairwise
from typing import Any, NamedTuple

from msgspec import Struct

from engine.base.values import replace
from engine.planning.memory.compute_graph.ggml.graph import INPLACE_OPS, VIEW_OPS, Graph, Tensor
from engine.planning.memory.compute_graph.ggml.names import (
    ON_CPU,
    Key,
    is_early,
    is_placeholder,
    layer_of,
    name_after,
    name_before,
    original_name,
)

Shape = tuple[tuple[object, ...], ...]
"""(Operation, type, shape) of each tensor that a layer makes, in order."""


def _is_weight(key: object) -> bool:
    return isinstance(key, tuple) and key[0] == "weight"


class DistantReadError(Exception):
    """A layer reads a tensor of a layer that is not its neighbour, so the graph cannot be built layer by layer."""


class Node(NamedTuple):
    """One node of a section (consecutive nodes of a graph). Tensors are indices in `Section.tensors`.

    `number`: index of the node's result.
    `bases`: for each source its `view_src`, or the source itself if it is no view.
    `weights`: sources that are weights.
    `reusable`: sources whose memory the result may reuse (`ggml_op_can_inplace`).
    `is_placed`: whether the result needs memory of its own.
    """

    number: int
    sources: tuple[int, ...]
    is_view: bool
    bases: tuple[int, ...]
    weights: tuple[int, ...]
    reusable: tuple[int, ...]
    is_placed: bool


class Section(Struct, frozen=True, eq=False):
    """Consecutive nodes of a graph, mostly those of one layer.

    `tensors`: the tensors of the section; all other fields refer to a tensor by its index in this tuple.
    `bases`: for each tensor its `view_src`, or the tensor itself if it is no view.
    `names`: name of each tensor for other sections; None if no other section uses it.
    `operations`: nodes that are no views.
    `leafs`: leaf tensors in the order in which `ggml_build_forward_expand` finds them.
    `scratch`: leaf tensors with undefined contents, which an operation overwrites.
    `known_before`: (tensor, name) of tensors whose backend was chosen in an earlier section.
    `known_after`: (tensor, name in the next section) of tensors whose backend the next section needs.
    `use_counts`: uses of each tensor (`n_children` and `n_views` of ggml-alloc), plus one for an output.
    `read_counts`: number of times that nodes have each tensor as a source.
    `ops`: operation of each node.
    `fused`: (tensor, buffer type of its layer's device) of fused operations (`Graph.fused`).
    `layers`: numbers of the layers whose devices have placeholders in the section (`buft_at`).
    `shape`, `shape_before`: operation, type and shape of the tensors that this layer makes, and that the layer before
    makes. A section's `shape_before` must be the `shape` of the section before it.
    `earlier`, `later`: names of tensors that earlier and later sections also use; None if the graph was built section
    by section.
    `plain`: the original, if this section is a copy with some weights in other buffer types; None if it is no copy.
    """

    tensors: tuple[Tensor, ...]
    bases: tuple[int, ...]
    names: tuple[Key | None, ...]
    nodes: tuple[Node, ...]
    operations: tuple[int, ...]
    leafs: tuple[int, ...]
    scratch: tuple[int, ...]
    known_before: tuple[tuple[int, Key], ...]
    known_after: tuple[tuple[int, Key], ...]
    use_counts: tuple[int, ...]
    read_counts: tuple[int, ...]
    ops: tuple[str, ...]
    fused: tuple[tuple[int, str], ...]
    layers: tuple[int, ...]
    shape: Shape = ()
    shape_before: Shape = ()
    earlier: frozenset[Key] | None = None
    later: frozenset[Key] | None = None
    plain: Section | None = None

    @property
    def form(self) -> Section:
        """The section (the nodes of one layer) as it is without overrides, which move weights to other buffer types.

        If overrides move none of its weights, this is the section itself. It is the cache key of results that do not
        depend on the buffer types of weights.
        """
        return self.plain or self

    def with_bufts(self, bufts: Iterable[tuple[int, str]]) -> Section:
        """Return a copy with some weights in other buffer types. `bufts`: (index of the weight, buffer type)."""
        tensors = [*self.tensors]
        for number, buft in bufts:
            tensors[number] = copy(tensors[number])
            tensors[number].buft = buft
        return replace(self, tensors=tuple(tensors), plain=self.form)

    def name_after(self, key: Key) -> Key | None:
        """Translate `key`, the name of a tensor in this section (layer), to the tensor's name in the next section.

        None if the next section has no name for the tensor.
        """
        return name_after(key) if self.later is None or is_early(key) else key

    def name_before(self, key: Key) -> Key | None:
        """Translate `key`, the name of a tensor in this section (layer), to the tensor's name in the section before.

        None if the section before has no name for the tensor.
        """
        return name_before(key) if self.earlier is None or is_early(key) else key

    def is_known_after(self, key: Key) -> bool:
        """Return whether nodes of later layers may read the tensor that this section names `key`."""
        return self.later is None or (original := original_name(key)) in self.later or _is_weight(original)

    def is_known_before(self, key: Key) -> bool:
        """Return whether nodes of earlier layers may make or read the tensor that this section names `key`."""
        if self.earlier is None or is_early(key):
            return True
        return (original := original_name(key)) in self.earlier or _is_weight(original)


class LayerStart(Struct, frozen=True):
    """The graph at the moment when the builder begins a layer.

    `n_nodes`, `n_leafs`, `n_inputs`: numbers of nodes, leaf tensors and inputs in the graph so far.
    `waiting`: nodes that exist, but are not in the graph yet (`build_forward_expand`); they become part of the layer.
    `current`: input of the layer.
    """

    n_nodes: int
    n_leafs: int
    waiting: tuple[Tensor, ...]
    current: Tensor | None
    n_inputs: int

    @property
    def handed(self) -> frozenset[Tensor]:
        """Tensors that the nodes in `waiting` read, and the `view_src` of each that is a view.

        The previous layer made some of these tensors. This layer reads them in addition to the previous layer's output.
        """
        read = [source for node in self.waiting for source in node.src]
        return frozenset((*read, *(source.view_src for source in read if source.view_src is not None)))


class LayerRecorder:
    """Records where layers begin while a graph is built, and cuts sections (consecutive nodes) out of the graph there.

    A builder calls the object with the input of each layer.

    `starts`: numbers of the layers at which a section begins or ends.
    """

    def __init__(self, graph: Graph, starts: Collection[int]) -> None:
        self.graph = graph
        self.found: list[LayerStart] = []
        self._starts = starts
        self._n_passed = 0

    def __call__(self, current: Tensor) -> None:
        """Record that the next layer begins, with the input `current`."""
        self._n_passed += 1
        if self._n_passed - 1 not in self._starts:
            return
        self.found.append(
            LayerStart(
                len(self.graph.nodes), len(self.graph.leafs), tuple(_waiting(current)), current, len(self.graph.inputs)
            )
        )

    def first(self, shared: Mapping[Tensor, Key], layers: Collection[int]) -> Section:
        """Return the first section of the graph: all nodes from the embeddings to the start of the second section.

        `shared`: name of each tensor that has the same name in all sections, such as an input.
        `layers`: numbers of the layers whose devices have placeholders in the section (`buft_at`).
        """
        return self._cut(0, self.found[1].n_nodes, 0, shared, layers)

    def last(self, shared: Mapping[Tensor, Key], layers: Collection[int], *, open_end: bool) -> Section:
        """Return the section with the nodes of the last layer.

        `shared`: name of each tensor that has the same name in all sections, such as an input.
        `layers`: numbers of the layers whose devices have placeholders in the section (`buft_at`).
        `open_end`: whether to leave out the nodes after the layer, such as the output matrix.
        """
        index = len(self.found) - 2 if open_end else len(self.found) - 1
        end = self.found[-1].n_nodes if open_end else len(self.graph.nodes)
        return self._cut(self.found[index].n_nodes, end, index, shared, layers)

    def _cut(self, start: int, end: int, index: int, shared: Mapping[Tensor, Key], layers: Collection[int]) -> Section:
        """Return the nodes `start` to `end` - 1 of the graph as a section.

        `index`: index of the section in `found`, the list of the starts of sections.
        `shared`: name of each tensor that has the same name in all sections, such as an input.
        `layers`: numbers of the layers whose devices have placeholders in the section (`buft_at`).
        """
        graph = self.graph
        keys: dict[Tensor, Key] = {tensor: ("in", number) for number, tensor in enumerate(graph.inputs)}
        keys |= shared
        # An input that a layer makes has a number that depends on the layer, so the section would not be valid for
        # others.
        if any(tensor not in shared for tensor in graph.inputs[self.found[0].n_inputs :]):
            raise DistantReadError
        made = [_made(graph, before, mark) for before, mark in zip([None, *self.found], self.found, strict=False)]
        made.append(_made(graph, self.found[-1], LayerStart(len(graph.nodes), 0, (), None, 0)))
        for owner in (index, index + 1):
            if owner and owner < len(self.found):
                handed = self.found[owner].handed
                numbered = enumerate(made[owner])
                keys.update((tensor, (owner - 1 - index, number)) for number, tensor in numbered if tensor in handed)
        for owner, mark in enumerate(self.found[: index + 2]):
            assert mark.current is not None
            # Memory belongs to `view_src`, so a view cannot be named as the output of a layer.
            if mark.current.view_src is not None:
                raise DistantReadError
            keys[mark.current] = (owner - 1 - index, "out")
        # Layers share views of inputs. ggml adds such a view once, as a node of the first layer that reads it.
        nodes = tuple(node for node in graph.nodes[start:end] if not (index and _is_view_of_input(node)))
        leafs = _leafs(nodes) if index else tuple(graph.leafs[: self.found[1].n_leafs])
        _check_reach(nodes, leafs, keys)
        shapes = {"shape": _shape(made[index + 1]), "shape_before": _shape(made[index])}
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
    """Return the section that consists of `nodes` and `leafs`, with the tensors replaced by indices.

    A section is consecutive nodes of the graph, mostly those of one layer.
    `keys`: name of each tensor that other sections use.
    `known_before`: (tensor, name) of tensors whose backend was chosen in an earlier section.
    `known_after`: (tensor, name in the next section) of tensors whose backend the next section needs.
    `layers`: numbers of the layers whose devices have placeholders in the section (`buft_at`).
    `others`: further fields of the `Section`, by name.
    """
    known_before, known_after = tuple(known_before), tuple(known_after)
    numbers: dict[Tensor, int] = {}
    there: list[Tensor] = [*leafs, *nodes]
    for node in nodes:
        there += node.src
    there += [tensor for tensor, _ in (*known_before, *known_after)]
    there += [tensor.view_src for tensor in there if tensor.view_src is not None]
    for tensor in there:
        numbers.setdefault(tensor, len(numbers))
    tensors = tuple(numbers)
    bases = tuple([numbers[tensor.view_src or tensor] for tensor in tensors])
    numbered = tuple([_number_node(node, numbers, bases) for node in nodes])
    use_counts = [int(tensor.is_output) for tensor in tensors]
    read_counts = [0] * len(tensors)
    for found in numbered:
        for base in found.bases:
            use_counts[base] += 1
        for source in found.sources:
            read_counts[source] += 1
    here = set(nodes)
    return Section(
        tensors=tensors,
        bases=bases,
        names=tuple([keys.get(tensor) for tensor in tensors]),
        nodes=numbered,
        operations=tuple([node.number for node in numbered if not node.is_view]),
        leafs=tuple([numbers[leaf] for leaf in leafs]),
        scratch=tuple([numbers[leaf] for leaf in leafs if leaf.buft is None and not leaf.is_input]),
        known_before=tuple([(numbers[tensor], key) for tensor, key in known_before]),
        known_after=tuple([(numbers[tensor], key) for tensor, key in known_after]),
        use_counts=tuple(use_counts),
        read_counts=tuple(read_counts),
        ops=tuple([node.op for node in nodes]),
        fused=tuple([(numbers[node], buft) for node, buft in graph.fused if node in here]),
        layers=layers,
        **others,
    )


def _number_node(node: Tensor, numbers: Mapping[Tensor, int], bases: Sequence[int]) -> Node:
    """Return a node with its tensors replaced by their indices.

    `numbers`: index of each tensor.
    `bases`: for each tensor, the index of its `view_src`; its own index if it is no view.
    """
    # One loop instead of five comprehensions: numbering is half of the time that a new section costs.
    sources, source_bases, weights, reusable = [], [], [], []
    can_inplace = node.view_src is None and node.op in INPLACE_OPS
    for source in node.src:
        number = numbers[source]
        sources.append(number)
        source_bases.append(bases[number])
        if source.is_weight:
            weights.append(number)
        # gallocr also reuses a view that is the only use of its `view_src`. This is not modelled; the recorded numbers
        # in tests/zoo agree without it.
        if can_inplace and source.view_src is None and are_same_layout(source, node):
            reusable.append(number)
    return Node(
        numbers[node],
        tuple(sources),
        node.op in VIEW_OPS,
        tuple(source_bases),
        tuple(weights),
        tuple(reusable),
        node.view_src is None,
    )


def are_same_layout(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors have the same type, shape and strides (`ggml_are_same_layout`)."""
    return first.type == second.type and first.ne == second.ne and first.nb == second.nb


def _check_reach(nodes: Sequence[Tensor], leafs: Sequence[Tensor], keys: dict[Tensor, Key]) -> None:
    """Check that `nodes` read only inputs, and tensors of their own or of neighbouring layers.

    Views of inputs that `nodes` read get names, which are added to `keys`.

    Raises:
        DistantReadError: a node reads a tensor of a layer that is not its neighbour.
    """
    here = set(nodes)
    _name_views_of_inputs(nodes, keys)
    for source in (source for node in nodes for source in node.src if source not in here and not source.is_leaf):
        if keys.get(source, (None,))[0] not in (-1, -2, "view") or _is_view_of_leaf(source):
            raise DistantReadError
    if any(leaf.buft is None and not leaf.is_input for leaf in leafs):
        raise DistantReadError


def _name_views_of_inputs(nodes: Sequence[Tensor], keys: dict[Tensor, Key]) -> None:
    for node in nodes:
        for source in node.src:
            if _is_view_of_input(source):
                assert source.view_src is not None
                keys[source] = ("view", *keys[source.view_src], source.ne, source.nb)


def _is_view_of_leaf(tensor: Tensor) -> bool:
    return tensor.view_src is not None and tensor.view_src.is_leaf and not tensor.view_src.is_input


def _shape(made: Sequence[Tensor]) -> Shape:
    return tuple((tensor.op, tensor.type, tensor.ne) for tensor in made)


def _made(graph: Graph, before: LayerStart | None, mark: LayerStart) -> list[Tensor]:
    """Return the nodes that the builder creates for a layer, in the order of the graph.

    Nodes that are added to the graph only with the next layer (`LayerStart.waiting`) come last.

    `before`: the graph at the start of the layer; None for the nodes before the first layer.
    `mark`: the graph at the start of the next layer.
    """
    waited = set(before.waiting) if before else set()
    start = before.n_nodes if before else 0
    nodes = [*graph.nodes[start : mark.n_nodes], *mark.waiting]
    return [node for node in nodes if node not in waited and not _is_view_of_input(node)]


def _waiting(current: Tensor) -> list[Tensor]:
    """Return the nodes that `build_forward_expand(current)` would add to the graph, in order."""
    found: list[Tensor] = []
    if not current.visited:
        _visit_waiting(current, set(), found)
    return found


def _visit_waiting(tensor: Tensor, seen: set[Tensor], found: list[Tensor]) -> None:
    # Not a nested function: a closure that calls itself is a reference cycle and would keep the whole graph alive.
    seen.add(tensor)
    for source in tensor.src:
        if not source.visited and source not in seen:
            _visit_waiting(source, seen, found)
    if not tensor.is_leaf:
        found.append(tensor)


def _leafs(nodes: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the leaf tensors that `nodes` read, in the order in which `ggml_build_forward_expand` finds them."""
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
    return tensor.op in VIEW_OPS and tensor.view_src is not None and tensor.view_src.is_input


def partition_graph(
    graph: Graph, starts: Sequence[tuple[int, int]], common: Mapping[Tensor, Key]
) -> tuple[Section, ...]:
    """Cut a whole graph into sections (consecutive nodes, mostly those of one layer), and return these.

    `starts`: (number of nodes, number of leaf tensors) in the graph before each section except the first.
    `common`: names of tensors that layers share.
    """
    cuts = _cuts(graph, starts)
    nodes = [graph.nodes[start:end] for (start, _), (end, _) in pairwise(cuts)]
    of_part = {node: part for part, made in enumerate(nodes) for node in made}
    # gallocr allocates inputs and empty leafs before the first node, so they exist from the first section on.
    first = dict.fromkeys((leaf for leaf in graph.leafs if leaf.buft is None), 0) | of_part
    last: dict[Tensor, int] = {}
    read: list[dict[Tensor, None]] = []
    for part, made in enumerate(nodes):
        sources = [source for node in made for source in node.src]
        bases = (tensor.view_src for tensor in (*sources, *made) if tensor.view_src is not None)
        # A dict and not a set: the order decides the indices of tensors, and must be the same in every run.
        here = dict.fromkeys((*sources, *bases))
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
            if not tensor.is_leaf or (tensor.buft is None and not tensor.is_input):
                known[part].append((tensor, keys[tensor]))
    # gallocr allocates leafs in the order of the graph, and offsets depend on the order.
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
    """Return (number of nodes, number of leaf tensors) in the graph before each section, and in the whole graph.

    A section is mostly the nodes of one layer. Nodes that read no weights are joined with a neighbouring section,
    because the scheduler chooses their backend by their neighbours.
    """
    found = [(0, 0)]
    end = (len(graph.nodes), len(graph.leafs))
    for cut in (*starts, end):
        if any(source.is_weight for node in graph.nodes[found[-1][0] : cut[0]] for source in node.src):
            found.append(cut)
    return [*(found[:-1] or found), end]


def _keys(graph: Graph, first: dict[Tensor, int], last: dict[Tensor, int]) -> dict[Tensor, Key]:
    """Return a name (`Key`) for each tensor that several sections (the nodes of one layer each) use.

    Leaf tensors, and views of all these tensors, also get names.

    `first`, `last`: numbers of the first and last section that use a tensor.
    """
    named = {node for node in graph.nodes if last.get(node, -1) > first[node]}.union(graph.leafs)
    return {
        tensor: ("at", number)
        for number, tensor in enumerate((*graph.leafs, *graph.nodes))
        if tensor in named or tensor.view_src in named
    }


def _layers_of(graph: Graph, nodes: Sequence[Tensor], leafs: Iterable[Tensor]) -> tuple[int, ...]:
    """Return the numbers of the layers whose devices have placeholders in `nodes` and `leafs` (`buft_at`, `pin_at`)."""
    here = set(nodes)
    bufts = {leaf.buft for leaf in leafs} | {buft for node, buft in graph.fused if node in here}
    layers = {layer_of(buft) for buft in bufts if buft is not None and is_placeholder(buft)}
    return tuple(sorted(layers | {ON_CPU - 1 - node.backend for node in nodes if node.backend < ON_CPU}))
