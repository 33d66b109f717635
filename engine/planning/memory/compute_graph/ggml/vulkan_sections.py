"""Vulkan's order of the nodes of a compute graph (`vulkan_order`), computed for one section after another.

A section is consecutive nodes, mostly those of one layer. `order_section` orders the nodes of one section. It may also
move nodes of later sections into it, because Vulkan computes them early. Sections refer to the result of a moved node
by a name with the mark `names.EARLY`.

The order depends only on the section, on the following sections of the same split, and on the nodes that were moved to
earlier sections. So callers can cache it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from engine.base.values import replace
from engine.planning.memory.compute_graph.ggml.backend_map import BackendMap
from engine.planning.memory.compute_graph.ggml.names import EARLY, Key, is_early
from engine.planning.memory.compute_graph.ggml.scheduler import Backend
from engine.planning.memory.compute_graph.ggml.splits import NodeAlloc, SplitPart, SplitSection, make_split_section
from engine.planning.memory.compute_graph.ggml.vulkan_order import Order, SeenNode, reorder

_REACH = 64
"""Largest number of nodes after a section of the graph that may be moved into the section.

No node moves forward by more than `_NUM_TO_CHECK` plus `_PULL_REACH` nodes.
"""


_BITS = 32
"""How many low bits of a tensor's number hold its index in a section. The higher bits hold the section's distance."""


NodePosition = tuple[int, int]
"""Position of a node: (number of sections from this one to the node's section, index of the node in its section)."""


FollowingSection = tuple[SplitSection, BackendMap | None]
"""A later section of the graph, with the translation of its backends to those of the section before it.

The translation is None if both have the same backends.
"""


def following_sections(following: Iterable[FollowingSection]) -> tuple[FollowingSection, ...]:
    """Return the sections (the nodes of one layer each) from which Vulkan may move nodes to an earlier section.

    These are the first ones in `following`: those that continue the current split of the scheduler, until they have
    `_REACH` nodes together.
    """
    found: list[FollowingSection] = []
    n_nodes = 0
    for split_section, backend_map in following:
        found.append((split_section, backend_map))
        n_nodes += len(split_section.parts[0].node_allocs)
        if len(split_section.parts) > 1 or n_nodes >= _REACH:
            break
    return tuple(found)


def order_section(
    split_section: SplitSection,
    ahead: Sequence[FollowingSection],
    used: frozenset[NodePosition],
    backends: Sequence[Backend],
) -> tuple[SplitSection, frozenset[NodePosition]]:
    """Return the section with its nodes in Vulkan's order, and the nodes that were moved out of later sections.

    A section is consecutive nodes, mostly one layer's. Vulkan moves nodes of later sections into this one or into
    earlier ones. The result names these nodes by `NodePosition`, in which the next section has the number 0.

    `ahead`: the later sections that continue the last split of this section (`following_sections`).
    `used`: nodes that were already moved out of this and later sections; here this section has the number 0.
    """
    return _Ordering(((split_section, None), *ahead), used).run(backends)


class _Ordering:
    def __init__(self, followed: Sequence[FollowingSection], used: frozenset[NodePosition]) -> None:
        self._split_sections = split_sections = [split_section for split_section, _ in followed]
        self._backend_maps = [backend_map for _, backend_map in followed]
        self._split_section = split_sections[0]
        self._used = used
        self._use_counts = [*self._split_section.use_counts]
        self._indices = self._split_section.indices.copy()
        self._passed = [*self._split_section.passed]
        self._names = [_names(split_section) for split_section in split_sections]
        self._uses = [
            Counter(source for node in split_section.section.nodes for source in node.sources)
            for split_section in split_sections
        ]
        self._numbers: list[dict[Key, int]] = []
        for split_section in split_sections:
            named = enumerate(split_section.section.names)
            self._numbers.append({name: number for number, name in named if name is not None})

    def run(self, backends: Sequence[Backend]) -> tuple[SplitSection, frozenset[NodePosition]]:
        used, parts = set(self._used), []
        early = self._drop_early_nodes()
        starts = accumulate((len(part.node_allocs) for part in self._split_section.parts), initial=0)
        for part, start in zip(self._split_section.parts, starts, strict=False):
            if part.backend < 0 or not backends[part.backend].reorders:
                parts.append(part)
                continue
            positions = list(self._positions(part, start))
            nodes = [self._seen_node(*position) for position in positions]
            before = {number for number, position in enumerate(positions) if position in self._used}
            order = reorder(nodes, end=len(part.node_allocs), used=before, goes_on=not part.is_new)
            used.update(positions[number] for number in order.indices)
            parts.append(replace(part, node_allocs=self._node_allocs(positions, order)))
        split_section = make_split_section(
            self._split_section.section, tuple(parts), self._use_counts, self._indices, tuple(self._passed), early
        )
        # As seen from the next section: each distance is one less, and nodes of this section no longer matter.
        return split_section, frozenset((distance - 1, node_index) for distance, node_index in used if distance)

    def _drop_early_nodes(self) -> tuple[int, ...]:
        """Lower the use counts of the tensors that the early nodes of this section (the nodes of one layer) read.

        Early nodes are nodes of this section that Vulkan moved to an earlier section. So they read nothing in this
        section. A use count is the number of uses of a tensor in this section.

        Return the indices of the tensors that the early nodes compute. Tensors without own memory are left out.
        """
        found = []
        node_allocs = [each for part in self._split_section.parts for each in part.node_allocs]
        for distance, node_index in sorted(self._used):
            if not distance:
                index, _, _, sources = node_allocs[node_index]
                for source in sources:
                    self._use_counts[source] -= 1
                if index >= 0:
                    found.append(index)
                    self._indices[0, EARLY, index] = index
        return tuple(found)

    def _positions(self, part: SplitPart, start: int) -> Iterator[NodePosition]:
        """Yield (section number, node index) for each node of one split (consecutive nodes on one backend).

        A section is the nodes of one layer. This section has the number 0, the next one has the number 1. The last
        split of this section continues in the following sections, so its nodes there are yielded too.

        `part`: the nodes of the split that are in this section.
        `start`: index in this section of the first node of `part`.
        """
        yield from ((0, start + number) for number in range(len(part.node_allocs)))
        if part is self._split_section.parts[-1]:
            for distance, split_section in enumerate(self._split_sections[1:], 1):
                yield from ((distance, number) for number in range(len(split_section.parts[0].node_allocs)))

    # ------------------------------------------------------------------ what the backend sees

    def _seen_node(self, distance: int, node_index: int) -> SeenNode:
        section = self._split_sections[distance].section
        node, (_, _, _, indices) = section.nodes[node_index], self._node_alloc_at(distance, node_index)
        sources, bases, available = [], [], []
        for source, base, index in zip(node.sources, node.bases, indices, strict=True):
            is_copy = index != base
            # A negative number: a copy is neither a node nor a view, so it must not equal any tensor.
            copy = -1 - (distance << _BITS | index)
            sources.append(copy if is_copy else self._number(distance, source))
            bases.append(copy if is_copy else self._number(distance, base))
            available.append(is_copy or section.tensors[source].op == "none")
        return SeenNode(
            section.tensors[node.number],
            self._number(distance, node.number),
            self._number(distance, section.bases[node.number]),
            tuple(sources),
            tuple(bases),
            tuple(available),
            self._uses[distance][node.number],
        )

    def _number(self, distance: int, number: int) -> int:
        """Return a number that identifies a tensor in all sections (the nodes of one layer each) of a split.

        The low `_BITS` bits are the tensor's index in the first section that refers to it. The higher bits are the
        number of sections from this one to that section.

        `number`: index of the tensor in a later section.
        `distance`: number of sections from this one to the later one.
        """
        while distance:
            name = self._split_sections[distance].section.names[number]
            key = None if name is None else self._name_before(distance, name)
            found = None if key is None else self._numbers[distance - 1].get(key)
            if found is None:
                break
            distance, number = distance - 1, found
        return distance << _BITS | number

    def _node_alloc_at(self, distance: int, node_index: int) -> NodeAlloc:
        for part in self._split_sections[distance].parts:
            if node_index < len(part.node_allocs):
                return part.node_allocs[node_index]
            node_index -= len(part.node_allocs)
        raise IndexError(node_index)

    # ------------------------------------------------------------------ work in order

    def _node_allocs(self, positions: Sequence[NodePosition], order: Order) -> list[NodeAlloc]:
        kept = dict(order.kept)
        found: list[NodeAlloc] = []
        for number in order.indices:
            found.append(self._moved(*positions[number]))
            if number in kept:
                indices = []
                for other, source in kept[number]:
                    index = self._index(positions[other][0], self._node_alloc_at(*positions[other])[3][source])
                    if index is not None:
                        indices.append(index)
                        self._use_counts[index] += 1
                # A node that needs no memory and only reads. ggml adds such a node with GGML_OP_NONE to keep its
                # sources allocated.
                found.append((-1, 0, (), tuple(indices)))
        return found

    def _moved(self, distance: int, node_index: int) -> NodeAlloc:
        """Return the `NodeAlloc` of a node that Vulkan moves from a later section (layer) into this one.

        It has the tensor indices of this section. The use counts of the tensors that it reads are raised.

        `distance`: number of sections from this one to the node's section. If it is 0, nothing is changed.
        `node_index`: index of the node in its section.
        """
        index, size, reusable, sources = node_allocs = self._node_alloc_at(distance, node_index)
        if not distance:
            return node_allocs
        own = -1 if index < 0 else self._index(distance, index)
        assert own is not None
        read = [found for source in sources if (found := self._index(distance, source)) is not None]
        for found in read:
            self._use_counts[found] += 1
        in_place = [found for source in reusable if (found := self._index(distance, source)) is not None]
        return own, size, tuple(in_place), tuple(read)

    def _index(self, distance: int, index: int) -> int | None:
        """Return the index in this section (the nodes of one layer) of a tensor of a later section.

        A tensor that has no index in this section yet gets the next free one.

        None if the tensor is a weight or a cache, because the allocator does not place these. Also None if this section
        has no name (`Key`) for the tensor.

        `distance`: number of sections from this one to the later one. If it is 0, `index` is returned.
        `index`: index of the tensor in the later section.
        """
        if not distance:
            return index
        section = self._split_sections[distance].section
        if index < len(section.tensors) and section.tensors[index].buft is not None:
            return None
        key: Key = (0, EARLY, index)
        for name in self._names[distance].get(index, ()):
            before = self._name_before(distance, name)
            if before is not None:
                return self._named(distance - 1, before)
        return self._named(distance, key)

    def _named(self, distance: int, key: Key) -> int | None:
        """Return the index in this section of the tensor that a later section (layer) calls `key`.

        If the tensor has no index here yet, it gets the next free one. None if it has no name in this section (`Key`).

        `distance`: number of sections from this one to the later one.
        """
        if distance:
            index = None if is_early(key) else self._split_sections[distance].indices.get(key)
            if index is not None:
                return self._index(distance, index)
            before = self._name_before(distance, key)
            return None if before is None else self._named(distance - 1, before)
        found = self._indices.get(key)
        if found is None:
            found = self._indices[key] = len(self._use_counts)
            self._use_counts.append(0)
            passed = self._split_section.section.name_after(key)
            if passed is not None:
                self._passed.append((found, passed))
        return found

    def _name_before(self, distance: int, key: Key) -> Key | None:
        """Translate `key`, a tensor's name in a later section (the nodes of one layer), to one in the section before.

        None if the section before has no name for the tensor.
        `distance`: number of sections from this one to the later one.
        """
        section, backend_map = self._split_sections[distance].section, self._backend_maps[distance]
        # Inputs of a split that is open at the end are copied at its begin, so all sections of the split know them.
        before = section.name_before(key) if key[0] == "copy" or section.is_known_before(key) else None
        return before if before is None or backend_map is None else backend_map.key(before)


def _names(split_section: SplitSection) -> dict[int, list[Key]]:
    """Return the names (`Key`) of a section's tensors in other sections (layers), by the index of the tensor."""
    found: dict[int, list[Key]] = {}
    for name, index in split_section.indices.items():
        found.setdefault(index, []).append(name)
    return found
