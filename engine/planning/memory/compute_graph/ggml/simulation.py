"""Computes the sizes of compute buffers by running scheduler and allocator over the graph of a layout, without data.

The graph is a list of sections: consecutive nodes, mostly those of one layer (`sections.py`). `Simulation` runs these
passes over the list: assign backends, divide into splits, reorder nodes (Vulkan) or add allocation dependencies (CUDA),
collect backwards which tensors later sections read, and allocate.

`PassCache` (`pass_cache.py`) caches the result of each pass for each section, so that similar layouts are fast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from engine.planning.memory.compute_graph.ggml.allocator import (
    ChunkedTallocr,
    DynTallocr,
    LiveOut,
    Size,
    TensorAlloc,
    joined,
    n_chunks,
    start_in,
)
from engine.planning.memory.compute_graph.ggml.backend_map import (
    SplitState,
)
from engine.planning.memory.compute_graph.ggml.pass_cache import NO_BACKENDS, SectionGroup
from engine.planning.memory.compute_graph.ggml.scheduler import Assigned
from engine.planning.memory.compute_graph.ggml.splits import SplitSection
from engine.planning.memory.compute_graph.ggml.vulkan_sections import (
    FollowingSection,
    NodePosition,
    following_sections,
)


def _take(buffer: DynTallocr, size: int, count: int) -> None:
    for _ in range(count):
        buffer.alloc(size)


class Simulation:
    """Simulates llama.cpp's scheduler and allocator for one layout, to get the sizes of the compute buffers.

    `groups`: the graph in sections (consecutive nodes, mostly one layer's), grouped by device.
    """

    def __init__(self, groups: Sequence[SectionGroup]) -> None:
        self._groups = groups
        self._backend_maps = [a.backend_map(b) for a, b in pairwise(groups)]

    def sizes(self) -> dict[str, Size]:
        """Return the size of each compute buffer, by buffer type.

        Raises:
            DistantReadError: a layer reads a tensor of a layer that is not its neighbour.
        """
        assigned = self._assign()
        split_sections = self._order(self._split_graph(assigned))
        live_outs = self._live_outs(split_sections)
        ends = {buft: 0 for group in self._groups for buft in group.bufts}
        kept = dict.fromkeys(ends, 0)
        state, asked = self._groups[0].cache.start([each for of_group in assigned for each in of_group])
        for index, group in enumerate(self._groups):
            state = self._translated(index, state) if index else state
            sizes, state = group.cache.fill(split_sections[index], live_outs[index], state)
            # Inputs and empty leafs are allocated before the first node, so they count with the first group.
            sizes = sizes if index else joined((asked, sizes))
            names = dict(zip(group.cache.names, group.bufts, strict=True))
            for buft, end in sizes.ends:
                ends[names[buft]] = max(ends[names[buft]], end)
            for buft, size in sizes.kept:
                kept[names[buft]] += size
        n_copies = self._groups[0].cache.scheduler.n_copies
        # One of the `n_copies` copies would be there without a pipeline too.
        found = {buft: Size(end + kept[buft], kept[buft] - kept[buft] // n_copies) for buft, end in ends.items()}
        largest = self._largest()
        # Rare, so it does not matter that the second allocation uses no caches.
        if any(size.size_bytes > largest.get(buft, size.size_bytes) for buft, size in found.items()):
            return self._divided(found, largest, assigned, split_sections, live_outs)
        return found

    def _largest(self) -> dict[str, int]:
        """Return the largest possible buffer in bytes by buffer type (`get_max_size`), for types that have a limit."""
        return {
            buft: backend.max_buffer_bytes
            for group in self._groups
            for buft, backend in zip(group.bufts, group.cache.scheduler.backends, strict=True)
            if backend.max_buffer_bytes is not None
        }

    def _divided(
        self,
        sizes: dict[str, Size],
        largest: Mapping[str, int],
        assigned: Sequence[tuple[Assigned, ...]],
        split_sections: Sequence[tuple[SplitSection, ...]],
        live_outs: Sequence[tuple[int, ...]],
    ) -> dict[str, Size]:
        """Return `sizes` with each buffer above its limit divided into chunks (backend buffers).

        All tensors are allocated again. The cache is not used, because its results are for buffers without a limit.

        `largest`: largest possible buffer in bytes, by buffer type.
        `assigned`: backends of the nodes, for each group (the part of the graph on one device).
        `split_sections`: sections (nodes of one layer or a few) divided at the scheduler's splits, for each group.
        `live_outs`: numbers of the sets of tensors that later sections read, for each group.
        """
        buffers = {buft: ChunkedTallocr(largest[buft]) if buft in largest else DynTallocr() for buft in sizes}
        leafs = tuple(self._groups[0].cache.placed_leafs([each for of_group in assigned for each in of_group]))
        n_copies = self._groups[0].cache.scheduler.n_copies
        named = [dict(zip(group.cache.names, group.bufts, strict=True)) for group in self._groups]
        # A pipeline's copies come before all else: those of inputs, then those that splits begin with.
        if n_copies > 1:
            for _, is_input, name, size in leafs:
                _take(buffers[named[0][name]], size, n_copies if is_input else 0)
            for index, group in enumerate(self._groups):
                for name, size in group.cache.copies(split_sections[index], live_outs[index]):
                    _take(buffers[named[index][name]], size, n_copies)
        held: Sequence[TensorAlloc] = ()
        for index, group in enumerate(self._groups):
            here = {name: buffers[buft] for name, buft in named[index].items()}
            held = self._backend_maps[index - 1].held(held) if index else start_in(leafs, n_copies, here, Counter())
            held = group.cache.allocate_into(split_sections[index], live_outs[index], held, here)
        return {
            buft: Size(found.size_bytes, sizes[buft].pipeline_bytes, n_chunks(found)) for buft, found in buffers.items()
        }

    def moved(self) -> frozenset[str]:
        """Return the names of fused operations with a node that is not on the device of its layer.

        Raises:
            DistantReadError: a layer reads a tensor of a layer that is not its neighbour.
        """
        found: frozenset[str] = frozenset()
        for group, assigned in zip(self._groups, self._assign(), strict=True):
            found = found.union(*map(group.cache.moved, dict.fromkeys(assigned)))
        return found

    def _translated(self, index: int, state: int) -> int:
        """Translate the result so far of a pass from the group `index` - 1 to the backends of the group `index`.

        A pass, such as the assignment of backends, goes through the groups (parts of the graph on one device) in order.
        Each group numbers backends differently. Return the number of the translated result in the cache of `index`.

        `state`: number of the result in the cache of the group `index` - 1.
        """
        origin = self._groups[index - 1].cache
        return self._groups[index].cache.translated(origin, self._backend_maps[index - 1], state)

    def _assign(self) -> list[tuple[Assigned, ...]]:
        found = []
        state = self._groups[0].cache.number(NO_BACKENDS)
        for index, group in enumerate(self._groups):
            state = self._translated(index, state) if index else state
            assigned, state = group.cache.assign(group, state)
            found.append(assigned)
        return found

    def _split_graph(self, assigned: Sequence[tuple[Assigned, ...]]) -> list[tuple[SplitSection, ...]]:
        found = []
        state = SplitState()
        for index, group in enumerate(self._groups):
            state = state.mapped(self._backend_maps[index - 1]) if index else state
            split_sections, state = group.cache.split_graph(assigned[index], state)
            found.append(split_sections)
        return found

    def _order(self, split_sections: Sequence[tuple[SplitSection, ...]]) -> Sequence[tuple[SplitSection, ...]]:
        if not any(group.cache.reorders or group.cache.fuses for group in self._groups):
            return split_sections
        found = []
        used: frozenset[NodePosition] = frozenset()
        for index, group in enumerate(self._groups):
            ordered, used = group.cache.order(
                split_sections[index], following_sections(self._following(split_sections, index)), used
            )
            found.append(ordered)
        return found

    def _following(self, split_sections: Sequence[tuple[SplitSection, ...]], index: int) -> Iterator[FollowingSection]:
        """Yield the nodes after the group `index` in sections (nodes of one layer or a few).

        A group is the part of the graph on one device. The first section of each group comes with the map from the
        group's backends to those of the group before; other sections come with None.

        `split_sections`: sections of each group, divided at the scheduler's splits.
        """
        for before, group in enumerate(self._groups[index + 1 :], index):
            first, *others = split_sections[before + 1]
            yield first, group.backend_map(self._groups[before])
            yield from ((split_section, None) for split_section in others)

    def _live_outs(self, split_sections: Sequence[tuple[SplitSection, ...]]) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        state = self._groups[-1].cache.number(LiveOut())
        following: SectionGroup | None = None
        for index in reversed(range(len(self._groups))):
            group = self._groups[index]
            if following is not None:
                state = group.cache.translated(following.cache, following.backend_map(group), state)
            following = group
            live_outs, state = group.cache.live_out_before(split_sections[index], state)
            found.append(live_outs)
        return found[::-1]
