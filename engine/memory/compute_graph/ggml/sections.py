"""A graph in sections: what neighbouring layers of two kinds add to it, whatever devices they are on.

Layers of a kind make the same nodes, so a section is made once and stands for all layers of its kind behind a layer of
another. It is made of one layer, or of a few where layers leave their nodes to the next one. Memories and the backends
that norms are pinned to go by the place of the layer: see `memory_at` and `pin_at`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from engine.memory.compute_graph.ggml.graph import VIEW_OPS, Graph, Tensor

ON_CPU = -2

Key = tuple[object, ...]
"""Name of a tensor that more than one section uses: `("in", n)` an input, `("view", n, shape, offset)` a view of one,
`("weight", home)` a weight that layers share, `("embd", n)` what comes before the layers, `(0, n)` what the section's
layer makes and `(-1, n)` what the layer before made. `("copy", key, backend)` is a copy of one."""


Shape = tuple[tuple[object, ...], ...]
"""Operations and sizes of the tensors that a layer makes, in order."""


def memory_at(place: int, left_out: int = 0) -> str:
    """Return what stands for the memory of the layer at `place`, on a device of the sort `left_out`."""
    return f"@{place}.{left_out}"


def stands_for_place(memory: str) -> bool:
    """Return whether a name of a memory is one of `memory_at`."""
    return memory.startswith("@")


def pin_at(place: int) -> int:
    """Return what stands for the backend that norms of the layer at `place` are pinned to."""
    return ON_CPU - 1 - place


def pass_on(key: Key) -> Key | None:
    """Return what the next section calls `key`, None for what it cannot know."""
    if key[0] == "copy":
        original = pass_on(key[1])  # type: ignore[arg-type]
        return None if original is None else ("copy", original, key[2])
    if isinstance(key[0], str):
        return key
    if key[0] == 0:
        return (-1, key[1])
    return (-2, "out") if key == (-1, "out") else None


class FarReachError(Exception):
    """A layer reads what a layer made that is not its neighbour: the graph cannot be taken apart."""


@dataclass(frozen=True, slots=True, eq=False)
class Section:
    """Neighbouring nodes of a graph, in order.

    `operations`: those that compute something; `leafs`: what they read and nothing computes, in the order in which a
    walk finds it; `keys`: names of tensors that other sections know; `known_before`: those that sections before this
    one have backends for; `passed_on`: those whose backends the next one has to know, with their names there;
    `outputs`: names of what is kept for good, or the tensors themselves; `fused`: see `Graph`; `shape`: what the layer
    makes, and `shape_before`: what the layer before made, which tell whether two sections can be neighbours.
    """

    nodes: tuple[Tensor, ...]
    operations: tuple[Tensor, ...]
    leafs: tuple[Tensor, ...]
    keys: dict[Tensor, Key]
    known_before: tuple[tuple[Tensor, Key], ...]
    passed_on: tuple[tuple[Tensor, Key], ...]
    outputs: tuple[object, ...]
    fused: tuple[tuple[Tensor, str], ...]
    shape: Shape
    shape_before: Shape


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a layer begins in a graph: nodes and leafs that are there by then, `waiting` nodes that
    it will add, what it gets, and the inputs that are there."""

    n_nodes: int
    n_leafs: int
    waiting: tuple[Tensor, ...]
    current: Tensor | None
    n_inputs: int


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

    def first(self, shared: Mapping[Tensor, Key]) -> Section:
        """Return what comes before the first layer, and that layer: up to the second mark."""
        return self._cut(0, self.found[1].n_nodes, 0, shared)

    def last(self, shared: Mapping[Tensor, Key], *, open_end: bool) -> Section:
        """Return the last layer of the graph, from its mark on; `open_end`: what comes behind it does not count."""
        place = len(self.found) - 2 if open_end else len(self.found) - 1
        end = self.found[-1].n_nodes if open_end else len(self.graph.nodes)
        return self._cut(self.found[place].n_nodes, end, place, shared)

    def _cut(self, start: int, end: int, place: int, shared: Mapping[Tensor, Key]) -> Section:
        """Return the nodes from `start` to `end` as the section of the layer that begins at mark `place`."""
        graph = self.graph
        keys: dict[Tensor, Key] = {tensor: ("in", number) for number, tensor in enumerate(graph.inputs)}
        keys |= shared
        if any(tensor not in shared for tensor in graph.inputs[self.found[0].n_inputs :]):
            raise FarReachError
        made = [_made(graph, before, mark) for before, mark in zip([None, *self.found], self.found, strict=False)]
        made.append(_made(graph, self.found[-1], Mark(len(graph.nodes), 0, (), None, 0)))
        for owner in (place, place + 1):
            if owner:
                keys.update((tensor, (owner - 1 - place, number)) for number, tensor in enumerate(made[owner]))
        for owner, mark in enumerate(self.found[: place + 2]):
            assert mark.current is not None
            if mark.current.root is not None:
                raise FarReachError
            keys[mark.current] = (owner - 1 - place, "out")
        nodes = tuple(node for node in graph.nodes[start:end] if not _is_view_of_input(node))
        leafs = _leafs(nodes) if place else tuple(graph.leafs[: self.found[1].n_leafs])
        return _section(graph, nodes, leafs, keys, _shape(made[place + 1]), _shape(made[place]))


def whole(graph: Graph) -> Section:
    """Return a graph as one section, which has nothing in common with others."""
    return _section(graph, tuple(graph.nodes), tuple(graph.leafs), {}, (), ())


def _section(
    graph: Graph,
    nodes: tuple[Tensor, ...],
    leafs: tuple[Tensor, ...],
    keys: dict[Tensor, Key],
    shape: Shape,
    before: Shape,
) -> Section:
    here = set(nodes)
    if keys:
        _name_views_of_inputs(nodes, keys)
        for source in (source for node in nodes for source in node.src if source not in here and not source.is_leaf):
            if keys.get(source, (None,))[0] not in (-1, -2, "view") or _is_view_of_leaf(source):
                raise FarReachError
        if any(leaf.home is None and not leaf.is_input for leaf in leafs):
            raise FarReachError
    return Section(
        nodes=nodes,
        operations=tuple(node for node in nodes if node.op not in VIEW_OPS),
        leafs=leafs,
        keys=keys,
        known_before=tuple((tensor, key) for tensor, key in keys.items() if key[0] in (-1, -2)),
        passed_on=tuple(
            (tensor, named)
            for tensor, key in keys.items()
            if not isinstance(key[0], str) and (named := pass_on(key)) is not None
        ),
        outputs=tuple(keys.get(node, node) for node in {*nodes, *keys} if node.is_output),
        fused=tuple((node, memory) for node, memory in graph.fused if node in here),
        shape=shape,
        shape_before=before,
    )


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
    """Return what a walk from `current` would add to the graph, in order."""
    found: list[Tensor] = []
    seen: set[Tensor] = set()

    def visit(tensor: Tensor) -> None:
        seen.add(tensor)
        for source in tensor.src:
            if not source.visited and source not in seen:
                visit(source)
        if not tensor.is_leaf:
            found.append(tensor)

    if not current.visited:
        visit(current)
    return found


def _leafs(nodes: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the leafs that a walk over `nodes` finds, in its order."""
    here = set(nodes)
    found: dict[Tensor, None] = {}
    seen: set[Tensor] = set()

    def visit(tensor: Tensor) -> None:
        seen.add(tensor)
        if tensor.is_leaf:
            found[tensor] = None
        elif tensor in here or _is_view_of_input(tensor):
            for source in tensor.src:
                if source not in seen:
                    visit(source)

    for node in nodes:
        if node not in seen:
            visit(node)
    return tuple(found)


def _is_view_of_input(tensor: Tensor) -> bool:
    return tensor.op in VIEW_OPS and tensor.root is not None and tensor.root.is_input
