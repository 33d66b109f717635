"""Cached results of the scheduler's and allocator's passes, by section of the graph (consecutive nodes).

A result depends on the section and on a small state, the data that the pass carries from one section to the next.
Layers repeat, and the state is the same again after a layer or two, so most results for a new layout are in the cache.

The sections of one device are a `SectionGroup`. It has a short list of backends: those that its nodes can use. So a
result for one device is also valid for other devices with the same properties. Results for whole groups are cached too.

The cached state of the buffers consists of their free blocks and the tensors in them. The highest offset at which a
block of a buffer ends is stored separately (`BufferSizes`). It determines the size of the buffer, but no later result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count

from msgspec import Struct, field

from engine.planning.memory.compute_graph.ggml.allocator import (
    BufferSizes,
    DynTallocr,
    Gallocr,
    Leaf,
    TensorAlloc,
    joined,
    live_out_before,
    start,
)
from engine.planning.memory.compute_graph.ggml.backend_map import (
    BackendMap,
    SplitState,
    State,
    TensorBackends,
    backend_map,
    in_order,
)
from engine.planning.memory.compute_graph.ggml.cuda_fusion import keep_fused
from engine.planning.memory.compute_graph.ggml.names import Key, is_shared
from engine.planning.memory.compute_graph.ggml.scheduler import Assigned, Bound, LayerDevice, OpenSplit, Scheduler
from engine.planning.memory.compute_graph.ggml.sections import DistantReadError, Section
from engine.planning.memory.compute_graph.ggml.splits import SplitSection
from engine.planning.memory.compute_graph.ggml.vulkan_sections import (
    FollowingSection,
    NodePosition,
    following_sections,
    order_section,
)
from engine.planning.memory.work_limit import check_limits

SectionName = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], bool, int]
"""Name of a section of the graph: the arguments with which `SectionMaker.section` builds it."""


_numbers = count()
"""Counter for numbers of section groups and caches. Cache keys contain these numbers instead of the objects.

Keys with the objects themselves would be reference cycles, which are freed late.
"""


NO_BACKENDS: TensorBackends = ()


_NO_COPIES: frozenset[Key] = frozenset()


_Order = tuple[SplitSection, tuple[FollowingSection, ...], frozenset[NodePosition]]


_OrderOfMany = tuple[tuple[SplitSection, ...], tuple[FollowingSection, ...], frozenset[NodePosition]]


SplitResult = tuple[SplitSection, int, bool, frozenset[Key], tuple[frozenset[Key], ...]]
"""Result of pass 5 of the scheduler for one section of the graph.

(Section divided by splits, backend index of the open split, whether that split has inputs, names of the copies of
layers' tensors, names of the copies of inputs and shared weights for each backend).
"""


class PlacedSection(Struct, frozen=True, eq=False):
    """A section of the graph (consecutive nodes, mostly one layer's), with the device of each of its layers.

    `section`: the section, or the arguments for which a `SectionMaker` builds it. It has placeholders for devices.
    `devices`: the devices that the placeholders stand for, one for each of `Section.layers`.

    Objects are compared by identity, because comparing the contents takes longer.
    """

    section: SectionName | Section
    devices: tuple[LayerDevice, ...]


class SectionGroup(Struct, frozen=True, eq=False):
    """The sections of the graph on one device, which have their own list of backends and are simulated together.

    A section is consecutive nodes, mostly those of one layer. If the graph cannot be divided by devices, one group has
    all sections. Groups are compared by identity.

    `cache`: cached results of passes with these backends.
    `bufts`: buffer type of each backend.
    `placed_sections`: the sections of the group, with one more before the first and one after the last. These two are
    None at an end of the graph.
    """

    cache: PassCache
    bufts: tuple[str, ...]
    placed_sections: tuple[PlacedSection | None, ...]
    number: int = field(default_factory=_numbers.__next__)

    def backend_map(self, other: SectionGroup) -> BackendMap:
        """Return the translation of backend indices from this group to the group `other` of the same graph.

        A group is the sections of one device. A section is the nodes of one layer.
        """
        return backend_map(self.cache.names, self.bufts, other.cache.names, other.bufts)


class PassCache:
    """Runs ggml's scheduler and allocator on sections of a graph, and caches the results, for one list of backends.

    A section is consecutive nodes of the graph, mostly those of one layer.
    """

    def __init__(self, scheduler: Scheduler, section_of: Callable[[SectionName], Section]) -> None:
        self.scheduler = scheduler
        self._own_number = next(_numbers)
        self._section_of = section_of
        self._gallocr = Gallocr(scheduler.backends, scheduler.n_copies)
        self._bounds: dict[PlacedSection, Bound] = {}
        self._assigned: dict[tuple[Bound | None, Bound, Bound | None, int], tuple[Assigned, int]] = {}
        self._split_sections: dict[object, SplitResult] = {}
        self.reorders = any(backend.reorders for backend in scheduler.backends)
        self.fuses = any(backend.fuses for backend in scheduler.backends)
        self._fused: dict[SplitSection, SplitSection] = {}
        self._ordered: dict[_Order, tuple[SplitSection, frozenset[NodePosition]]] = {}
        self._ordered_groups: dict[_OrderOfMany, tuple[tuple[SplitSection, ...], frozenset[NodePosition]]] = {}
        self._live_outs_before: dict[tuple[SplitSection, int], int] = {}
        self._fills: dict[tuple[SplitSection, int, int], tuple[int, BufferSizes]] = {}
        self._starts: dict[tuple[tuple[Section, tuple[int, ...]], ...], tuple[int, BufferSizes]] = {}
        self._moved: dict[Assigned, frozenset[str]] = {}
        self._translated: dict[tuple[int, BackendMap, int], int] = {}
        self._assigned_groups: dict[tuple[int, int], tuple[tuple[Assigned, ...], int]] = {}
        self._split_groups: dict[
            tuple[tuple[Assigned, ...], SplitState], tuple[tuple[SplitSection, ...], SplitState]
        ] = {}
        self._live_out_groups: dict[tuple[tuple[SplitSection, ...], int], tuple[tuple[int, ...], int]] = {}
        self._filled_groups: dict[tuple[tuple[SplitSection, ...], tuple[int, ...], int], tuple[BufferSizes, int]] = {}
        self._numbers: dict[State, int] = {}
        self._states: list[State] = []
        self.names: tuple[str, ...] = tuple(backend.buft for backend in scheduler.backends)
        """Name of each backend's buffer type in this cache."""

    @property
    def n_remembered(self) -> int:
        return len(self._fills) + len(self._filled_groups)

    def number(self, state: State) -> int:
        """Return the number of a state in this cache; equal states have the same number.

        A state is the data that a pass of the scheduler or allocator carries from one section of the graph to the next.
        """
        # A state is hashed once here. All caches use its number, which is much faster to hash and compare.
        found = self._numbers.setdefault(state, len(self._states))
        if found == len(self._states):
            self._states.append(state)
        return found

    def translated(self, origin: PassCache, backend_map: BackendMap, state: int) -> int:
        """Convert a state of the cache `origin` to the backends of this cache; return the number of the result here.

        A state is the data that a pass of the scheduler or allocator carries from one section of the graph to the next.

        `backend_map`: translation from the backends of `origin` to those of this cache.
        `state`: number of the state in `origin`.
        """
        found = self._translated.get((origin._own_number, backend_map, state))
        if found is None:
            found = self._translated[origin._own_number, backend_map, state] = self.number(
                backend_map.of(origin._states[state])
            )
        return found

    def bound(self, placed: PlacedSection) -> Bound:
        """Return a section (mostly the nodes of one layer) after pass 1 of the scheduler; results are cached.

        Pass 1 assigns a backend to nodes that are pinned, have a buffer, or read weights.
        """
        found = self._bounds.get(placed)
        if found is None:
            section = placed.section if isinstance(placed.section, Section) else self._section_of(placed.section)
            devices = dict(zip(section.layers, placed.devices, strict=True))
            found = self._bounds[placed] = self.scheduler.bind(section, devices)
        return found

    # ------------------------------------------------------------------ one section group

    def assign(self, group: SectionGroup, state: int) -> tuple[tuple[Assigned, ...], int]:
        """Run passes 2 to 4 of the scheduler on the sections of a group; results are cached.

        A section is mostly the nodes of one layer. Return the sections with the backend of each tensor, and the state
        after the last section. A state is the backends of the tensors that earlier sections computed, represented by
        its number in this cache (`number`).

        `state`: number of the state before the first section.
        """
        found = self._assigned_groups.get((group.number, state))
        if found is None:
            found = self._assigned_groups[group.number, state] = self._assign_all(group.placed_sections, state)
        return found

    def _assign_all(
        self, placed_sections: Sequence[PlacedSection | None], state: int
    ) -> tuple[tuple[Assigned, ...], int]:
        bounds = [None if placed is None else self.bound(placed) for placed in placed_sections]
        found: list[Assigned] = []
        last: tuple[Bound | None, Bound | None, Bound | None] | None = None
        # Pass 2 expands across boundaries, so a section is assigned together with the one before and the one after it.
        for around in zip(bounds, bounds[1:], bounds[2:], strict=False):
            if last is None or around[0] is not last[0] or around[1] is not last[1] or around[2] is not last[2]:
                step = self._assigned.get((*around, state))  # type: ignore[arg-type]
                if step is None:
                    step = self._assigned[*around, state] = self._assign(*around, state)  # type: ignore[arg-type, index]
                assigned, after = step
                # A result that leaves the state as it was holds for all equal sections that follow.
                last = around if after == state else None
                state = after
            found.append(assigned)
        return tuple(found), state

    def _assign(self, before: Bound | None, bound: Bound, following: Bound | None, state: int) -> tuple[Assigned, int]:
        check_limits()
        # Sections are built separately. If the one before makes other tensors than this one was built after, names
        # would point to wrong tensors.
        if before is not None and before.section.shape != bound.section.shape_before:
            raise DistantReadError
        bounds = [each for each in (before, bound, following) if each is not None]
        known = dict(self._states[state])  # type: ignore[arg-type]
        assigned, passed = self.scheduler.assign(bounds, 0 if before is None else 1, known)
        return assigned, self.number(tuple(passed.items()))

    def split_graph(
        self, assigned: tuple[Assigned, ...], before: SplitState
    ) -> tuple[tuple[SplitSection, ...], SplitState]:
        """Run pass 5 of the scheduler on consecutive sections: divide them into splits. Results are cached.

        A section is mostly the nodes of one layer. Return the divided sections, and the `SplitState` after the last
        one: the split that continues in the next section, and the copies made so far.

        `before`: the `SplitState` before the first section.
        """
        found = self._split_groups.get((assigned, before))
        if found is None:
            found = self._split_groups[assigned, before] = self._split_all(assigned, before)
        return found

    def _split_all(
        self, assigned: Sequence[Assigned], before: SplitState
    ) -> tuple[tuple[SplitSection, ...], SplitState]:
        known = self._split_sections
        backend, has_inputs, passing = before.backend, before.has_inputs, before.passing
        lasting = dict(before.lasting)
        split_sections = []
        last: Assigned | None = None
        for each in assigned:
            if each is not last:
                # Copies for backends that have nothing to do here make no difference.
                involved = each.involved
                state = tuple([lasting.get(index, _NO_COPIES) for index in involved])
                key = (each, backend, has_inputs, passing, state)
                found = known.get(key)
                if found is None:
                    found = known[key] = self._split_graph(each, OpenSplit(backend, has_inputs, passing.union(*state)))
                split_section, *after, copies = found
                # A result that changes nothing holds for all equal sections that follow.
                last = each if copies == state and after == [backend, has_inputs, passing] else None
                _, backend, has_inputs, passing, _ = found
                lasting.update(zip(involved, copies, strict=True))
            split_sections.append(split_section)
        return tuple(split_sections), SplitState(backend, has_inputs, passing, in_order(lasting))

    def _split_graph(self, assigned: Assigned, before: OpenSplit) -> SplitResult:
        check_limits()
        split_section, cut = self.scheduler.split_graph(assigned, before)
        lasting: dict[int, set[Key]] = {index: set() for index in assigned.involved}
        passing: set[Key] = set()
        for key in cut.copies:
            # Copies of inputs and shared weights serve the rest of the graph. Copies of a layer's tensors are forgotten
            # with its neighbours.
            (lasting[key[2]] if is_shared(key) else passing).add(key)  # type: ignore[index]
        copies = tuple(frozenset(lasting[index]) for index in assigned.involved)
        return split_section, cut.backend, cut.has_inputs, frozenset(passing), copies

    def order(
        self,
        split_sections: tuple[SplitSection, ...],
        following: tuple[FollowingSection, ...],
        used: frozenset[NodePosition],
    ) -> tuple[tuple[SplitSection, ...], frozenset[NodePosition]]:
        """Apply the backends' `graph_optimize` to consecutive sections (mostly the nodes of one layer each).

        Vulkan moves nodes forward, also from a later section into an earlier one. CUDA adds allocation dependencies.
        Return the changed sections, and the former positions (section, index) of the nodes that were moved out of the
        sections after these.

        `following`: the sections after these, up to the end of the split that continues in them.
        `used`: former positions of the nodes that were already moved into sections before these.
        """
        if self.fuses:
            split_sections = tuple([self._with_fused(each) for each in split_sections])
        if not self.reorders:
            return split_sections, used
        found = self._ordered_groups.get((split_sections, following, used))
        if found is None:
            found = self._ordered_groups[split_sections, following, used] = self._order_all(
                split_sections, following, used
            )
        return found

    def _with_fused(self, split_section: SplitSection) -> SplitSection:
        found = self._fused.get(split_section)
        if found is None:
            check_limits()
            found = self._fused[split_section] = keep_fused(split_section, self.scheduler.backends)
        return found

    def _order_all(
        self,
        split_sections: tuple[SplitSection, ...],
        following: tuple[FollowingSection, ...],
        used: frozenset[NodePosition],
    ) -> tuple[tuple[SplitSection, ...], frozenset[NodePosition]]:
        ordered = []
        followed = (*((split_section, None) for split_section in split_sections), *following)
        for number, split_section in enumerate(split_sections, 1):
            ahead = following_sections(followed[number:])
            found = self._ordered.get((split_section, ahead, used))
            if found is None:
                check_limits()
                found = order_section(split_section, ahead, used, self.scheduler.backends)
                self._ordered[split_section, ahead, used] = found
            in_order, used = found
            ordered.append(in_order)
        return tuple(ordered), used

    def live_out_before(self, split_sections: tuple[SplitSection, ...], state: int) -> tuple[tuple[int, ...], int]:
        """Return which tensors must stay allocated after each section, and which before the first section.

        A section is mostly the nodes of one layer. Each set of tensors is a `LiveOut` object, represented by its number
        in this cache (`number`). The sections are processed backwards, because the tensors are those that later
        sections read.

        `state`: number of the `LiveOut` after the last section.
        """
        found = self._live_out_groups.get((split_sections, state))
        if found is None:
            found = self._live_out_groups[split_sections, state] = self._live_outs_all(split_sections, state)
        return found

    def _live_outs_all(self, split_sections: Sequence[SplitSection], state: int) -> tuple[tuple[int, ...], int]:
        known = self._live_outs_before
        live_outs: list[int] = []
        last: SplitSection | None = None
        # Backwards, because what later sections read decides what this one may free.
        for split_section in reversed(split_sections):
            live_outs.append(state)
            if split_section is not last:
                found = known.get((split_section, state))
                if found is None:
                    ahead = live_out_before(split_section, self._states[state], self.scheduler.backends)  # type: ignore[arg-type]
                    found = known[split_section, state] = self.number(ahead)
                last = split_section if found == state else None
                state = found
        return tuple(live_outs[::-1]), state

    def fill(
        self, split_sections: tuple[SplitSection, ...], live_outs: tuple[int, ...], state: int
    ) -> tuple[BufferSizes, int]:
        """Allocate the tensors of consecutive sections (mostly the nodes of one layer each).

        Return the buffer sizes that these sections need, and the state after the last section. A state is the free
        blocks of the buffers and the tensors in them, represented by its number in this cache (`number`).

        `live_outs`: number of the `LiveOut` (tensors that must stay allocated) after each section.
        `state`: number of the state before the first section.
        """
        found = self._filled_groups.get((split_sections, live_outs, state))
        if found is None:
            found = self._filled_groups[split_sections, live_outs, state] = self._fill_all(
                split_sections, live_outs, state
            )
        return found

    def _fill_all(
        self, split_sections: Sequence[SplitSection], live_outs: Sequence[int], state: int
    ) -> tuple[BufferSizes, int]:
        all_sizes: list[BufferSizes] = []
        known = self._fills
        last: tuple[SplitSection, int] | None = None
        for split_section, ahead in zip(split_sections, live_outs, strict=True):
            if last is None or split_section is not last[0] or ahead != last[1]:
                step = known.get((split_section, ahead, state))
                if step is None:
                    check_limits()
                    filled, sizes = self._gallocr.fill(split_section, self._states[ahead], self._states[state])  # type: ignore[arg-type]
                    step = known[split_section, ahead, state] = self.number(filled), sizes
                last = (split_section, ahead) if step[0] == state else None
                state, sizes = step
            all_sizes.append(sizes)
        return joined(all_sizes), state

    def start(self, assigned: Sequence[Assigned]) -> tuple[int, BufferSizes]:
        """Allocate the tensors that gallocr allocates before all nodes: inputs and empty leaf tensors.

        Return the state of the buffers after that, represented by its number in this cache (`number`), and the sizes of
        the buffers. Inputs are in host memory, even if their section (the nodes of one layer) is on another device.
        """
        by_section = {each.bound.section: each for each in assigned}
        sections = tuple(
            [(section, tuple([each.backends[n] for n in section.scratch])) for section, each in by_section.items()]
        )
        found = self._starts.get(sections)
        if found is None:
            filled, sizes = start(self.placed_leafs(assigned), self.scheduler.n_copies)
            found = self._starts[sections] = self.number(filled), sizes
        return found

    def placed_leafs(self, assigned: Sequence[Assigned]) -> Iterable[Leaf]:
        """Return the leaf tensors for which these sections need memory in a compute buffer, such as inputs.

        A section is mostly the nodes of one layer. A leaf that several sections read is returned once.
        """
        backends = self.scheduler.backends
        # Sections share inputs by name; each is allocated once, in the order of the first section that has it.
        placed: dict[Key, Leaf] = {}
        for each in assigned:
            section = each.bound.section
            for number in section.leafs:
                leaf, key = section.tensors[number], section.names[number]
                if leaf.buft is None and key not in placed:
                    assert key is not None
                    backend = backends[-1 if leaf.is_input else each.backends[number]]
                    placed[key] = key, leaf.is_input, backend.buft, backend.size_of(leaf)
        return placed.values()

    def allocate_into(
        self,
        split_sections: Sequence[SplitSection],
        live_outs: Sequence[int],
        held: Sequence[TensorAlloc],
        buffers: dict[str, DynTallocr],
    ) -> Sequence[TensorAlloc]:
        """Allocate the tensors of consecutive sections (mostly the nodes of one layer each) in `buffers`.

        Return the allocated tensors that later sections of the graph read.

        `live_outs`: number of the `LiveOut` (tensors that must stay allocated) after each section.
        `held`: tensors in `buffers` that earlier sections allocated.
        """
        for split_section, ahead in zip(split_sections, live_outs, strict=True):
            check_limits()
            held = self._gallocr.allocate_into(split_section, self._states[ahead], held, buffers)  # type: ignore[arg-type]
        return held

    def copies(self, split_sections: Sequence[SplitSection], live_outs: Sequence[int]) -> Iterator[tuple[str, int]]:
        """Yield (buffer type, bytes) of each tensor copied for the splits that begin in these sections.

        A section is mostly the nodes of one layer.

        `live_outs`: number of the `LiveOut` (tensors that must stay allocated) after each section.
        """
        for split_section, ahead in zip(split_sections, live_outs, strict=True):
            for part in split_section.parts if split_section.parts else ():
                following = self._states[ahead].copies if part is split_section.parts[-1] else ()  # type: ignore[union-attr]
                for copy in (*(each for each, _, _ in part.copies), *following) if part.is_new else ():
                    yield self.scheduler.backends[copy.backend].buft, copy.size_bytes

    def moved(self, assigned: Assigned) -> frozenset[str]:
        """Return names of fused operations, such as flash attention, that are not computed on their layer's device.

        `assigned`: a section (mostly the nodes of one layer) with the backend of each tensor.
        """
        found = self._moved.get(assigned)
        if found is None:
            backends, fused = self.scheduler.backends, assigned.bound.fused
            tensors = assigned.bound.section.tensors
            found = self._moved[assigned] = frozenset(
                tensors[number].op for number, buft in fused if backends[assigned.backends[number]].buft != buft
            )
        return found
