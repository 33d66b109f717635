"""Passes over the sections of a graph: which backend, which cuts, which offsets, each step remembered.

A step of any of these passes depends on one section and a small state. Layers repeat and states recur after a layer or
two, so that a layout which was never seen is mostly made of steps that were. A step knows the backends that can matter
to its section and no others, by numbers among those (a segment's): what was found between the second and the third
device of a layout holds between any others of their sort. Segments are remembered with all of their steps.

What is remembered of buffers is what lies in them and what is free: how far they were ever filled is added up apart, as
nothing that follows depends on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise

from engine.planning.memory.compute_graph.ggml.allocator import (
    Ahead,
    Allocation,
    Buffer,
    DividedBuffer,
    Growth,
    Held,
    Leaf,
    Size,
    joined,
    look_back,
    n_parts,
    start,
    start_in,
)
from engine.planning.memory.compute_graph.ggml.backend_map import BackendMap, Places, State, backend_map
from engine.planning.memory.compute_graph.ggml.scheduler import Assigned, Bound, Cut, Piece, Place, Scheduler
from engine.planning.memory.compute_graph.ggml.sections import FarReachError, Key, Section, is_shared
from engine.planning.memory.compute_graph.ggml.vulkan_order import Followed, NodePlace, pieces_ahead, put_in_order
from engine.planning.memory.effort import go_on

SectionName = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], bool, int]
"""See `SectionMaker.section`."""

_numbers = count()
"""What segments and steps are remembered by: by themselves they would hold each other, and be freed long after use."""

NOTHING: Places = ()
_NO_COPIES: frozenset[Key] = frozenset()
_Order = tuple[Piece, tuple[Followed, ...], frozenset[NodePlace]]
_OrderOfMany = tuple[tuple[Piece, ...], tuple[Followed, ...], frozenset[NodePlace]]
PieceStep = tuple[Piece, int, bool, frozenset[Key], tuple[frozenset[Key], ...]]
"""A piece, the backend of the split behind it and whether that has inputs, copies of what layers made, and copies of
what all may read, by backend."""


@dataclass(frozen=True, slots=True)
class CutState:
    """Where cutting stands: see `PieceStep`; `lasting` has the backends for which there are copies, in order."""

    backend: int = -1
    has_inputs: bool = False
    passing: frozenset[Key] = _NO_COPIES
    lasting: tuple[tuple[int, frozenset[Key]], ...] = ()

    def mapped(self, backend_map: BackendMap) -> CutState:
        """Return the same in the next segment; what is of no backend there is nothing to it."""
        lasting = {
            index: backend_map.keys(keys) for old, keys in self.lasting if (index := backend_map.backend(old)) >= 0
        }
        return CutState(
            backend_map.backend(self.backend), self.has_inputs, backend_map.keys(self.passing), _in_order(lasting)
        )


def _in_order(lasting: Mapping[int, frozenset[Key]]) -> tuple[tuple[int, frozenset[Key]], ...]:
    return tuple(sorted((index, keys) for index, keys in lasting.items() if keys))


@dataclass(frozen=True, slots=True, eq=False)
class PlacedSection:
    """A section or its name, and the places of the layers whose memories it uses.

    Two are equal only if they are the same object, which is quicker to find out."""

    section: SectionName | Section
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Neighbouring sections on the devices of one scheduler. Two segments are equal only if they are the same object.

    `placed_sections` begin with the one before the segment and end with the one after it, None at an end of the graph.
    `memories`: the real memory of each backend."""

    steps: Steps
    memories: tuple[str, ...]
    placed_sections: tuple[PlacedSection | None, ...]
    number: int = field(default_factory=_numbers.__next__)

    def backend_map(self, other: Segment) -> BackendMap:
        """Return the map to another segment of the same graph."""
        return backend_map(self.steps.names, self.memories, other.steps.names, other.memories)


class Steps:
    """Steps among the backends of one scheduler, each remembered."""

    def __init__(self, scheduler: Scheduler, section_of: Callable[[SectionName], Section]) -> None:
        self.scheduler = scheduler
        self._own_number = next(_numbers)
        self._section_of = section_of
        self._allocation = Allocation(scheduler.backends, scheduler.n_copies)
        self._bounds: dict[PlacedSection, Bound] = {}
        self._assigned: dict[tuple[Bound | None, Bound, Bound | None, int], tuple[Assigned, int]] = {}
        self._pieces: dict[object, PieceStep] = {}
        self.reorders = any(backend.reorders for backend in scheduler.backends)
        self._ordered: dict[_Order, tuple[Piece, frozenset[NodePlace]]] = {}
        self._ordered_segments: dict[_OrderOfMany, tuple[tuple[Piece, ...], frozenset[NodePlace]]] = {}
        self._aheads: dict[tuple[Piece, int], int] = {}
        self._fills: dict[tuple[Piece, int, int], tuple[int, Growth]] = {}
        self._starts: dict[tuple[tuple[Section, tuple[int, ...]], ...], tuple[int, Growth]] = {}
        self._moved: dict[Assigned, frozenset[str]] = {}
        self._entered: dict[tuple[int, BackendMap, int], int] = {}
        self._assigned_segments: dict[tuple[int, int], tuple[tuple[Assigned, ...], int]] = {}
        self._cut_segments: dict[tuple[tuple[Assigned, ...], CutState], tuple[tuple[Piece, ...], CutState]] = {}
        self._aheads_of: dict[tuple[tuple[Piece, ...], int], tuple[tuple[int, ...], int]] = {}
        self._filled_segments: dict[tuple[tuple[Piece, ...], tuple[int, ...], int], tuple[Growth, int]] = {}
        self._numbers: dict[State, int] = {}
        self._states: list[State] = []
        self.names: tuple[str, ...] = tuple(backend.memory for backend in scheduler.backends)
        """What the backends' memories are called here."""

    @property
    def n_remembered(self) -> int:
        return len(self._fills) + len(self._filled_segments)

    def number(self, state: State) -> int:
        """Return a number that stands for `state`, the same for equal ones."""
        found = self._numbers.setdefault(state, len(self._states))
        if found == len(self._states):
            self._states.append(state)
        return found

    def entered(self, origin: Steps, backend_map: BackendMap, state: int) -> int:
        """Return the number here of a state of the segment `origin`."""
        found = self._entered.get((origin._own_number, backend_map, state))
        if found is None:
            found = self._entered[origin._own_number, backend_map, state] = self.number(
                backend_map.of(origin._states[state])
            )
        return found

    def bound(self, placed: PlacedSection) -> Bound:
        """Return a placed section bound to the backends."""
        found = self._bounds.get(placed)
        if found is None:
            section = placed.section if isinstance(placed.section, Section) else self._section_of(placed.section)
            places = dict(zip(section.layers, placed.places, strict=True))
            found = self._bounds[placed] = self.scheduler.bind(section, places)
        return found

    # ------------------------------------------------------------------ one segment

    def assign(self, segment: Segment, state: int) -> tuple[tuple[Assigned, ...], int]:
        """Return the sections with their backends, and what those passed on, given what came before."""
        found = self._assigned_segments.get((segment.number, state))
        if found is None:
            found = self._assigned_segments[segment.number, state] = self._assign_all(segment.placed_sections, state)
        return found

    def _assign_all(
        self, placed_sections: Sequence[PlacedSection | None], state: int
    ) -> tuple[tuple[Assigned, ...], int]:
        bounds = [None if placed is None else self.bound(placed) for placed in placed_sections]
        found: list[Assigned] = []
        last: tuple[Bound | None, Bound | None, Bound | None] | None = None
        for around in zip(bounds, bounds[1:], bounds[2:], strict=False):
            if last is None or around[0] is not last[0] or around[1] is not last[1] or around[2] is not last[2]:
                step = self._assigned.get((*around, state))  # type: ignore[arg-type]
                if step is None:
                    step = self._assigned[*around, state] = self._assign(*around, state)  # type: ignore[arg-type, index]
                assigned, after = step
                # A step that leaves the state as it was can be taken any number of times.
                last = around if after == state else None
                state = after
            found.append(assigned)
        return tuple(found), state

    def _assign(self, before: Bound | None, bound: Bound, behind: Bound | None, state: int) -> tuple[Assigned, int]:
        go_on()
        if before is not None and before.section.shape != bound.section.shape_before:
            raise FarReachError
        bounds = [each for each in (before, bound, behind) if each is not None]
        known = dict(self._states[state])  # type: ignore[arg-type]
        assigned, passed = self.scheduler.assign(bounds, 0 if before is None else 1, known)
        return assigned, self.number(tuple(passed.items()))

    def cut(self, assigned: tuple[Assigned, ...], before: CutState) -> tuple[tuple[Piece, ...], CutState]:
        """Return the sections in pieces, and where cutting stands behind them."""
        found = self._cut_segments.get((assigned, before))
        if found is None:
            found = self._cut_segments[assigned, before] = self._cut_all(assigned, before)
        return found

    def _cut_all(self, assigned: Sequence[Assigned], before: CutState) -> tuple[tuple[Piece, ...], CutState]:
        known = self._pieces
        backend, has_inputs, passing = before.backend, before.has_inputs, before.passing
        lasting = dict(before.lasting)
        pieces = []
        last: Assigned | None = None
        for each in assigned:
            if each is not last:
                # Copies for backends that have nothing to do here make no difference.
                involved = each.involved
                state = tuple([lasting.get(index, _NO_COPIES) for index in involved])
                key = (each, backend, has_inputs, passing, state)
                found = known.get(key)
                if found is None:
                    found = known[key] = self._cut(each, Cut(backend, has_inputs, passing.union(*state)))
                piece, *after, copies = found
                last = each if copies == state and after == [backend, has_inputs, passing] else None
                _, backend, has_inputs, passing, _ = found
                lasting.update(zip(involved, copies, strict=True))
            pieces.append(piece)
        return tuple(pieces), CutState(backend, has_inputs, passing, _in_order(lasting))

    def _cut(self, assigned: Assigned, before: Cut) -> PieceStep:
        go_on()
        piece, cut = self.scheduler.cut(assigned, before)
        lasting: dict[int, set[Key]] = {index: set() for index in assigned.involved}
        passing: set[Key] = set()
        for key in cut.copies:
            (lasting[key[2]] if is_shared(key) else passing).add(key)  # type: ignore[index]
        copies = tuple(frozenset(lasting[index]) for index in assigned.involved)
        return piece, cut.backend, cut.has_inputs, frozenset(passing), copies

    def order(
        self, pieces: tuple[Piece, ...], behind: tuple[Followed, ...], used: frozenset[NodePlace]
    ) -> tuple[tuple[Piece, ...], frozenset[NodePlace]]:
        """Return the pieces with their work in the order of the backends, and which nodes behind them are then
        computed, given those that were before."""
        if not self.reorders:
            return pieces, used
        found = self._ordered_segments.get((pieces, behind, used))
        if found is None:
            found = self._ordered_segments[pieces, behind, used] = self._order_all(pieces, behind, used)
        return found

    def _order_all(
        self, pieces: tuple[Piece, ...], behind: tuple[Followed, ...], used: frozenset[NodePlace]
    ) -> tuple[tuple[Piece, ...], frozenset[NodePlace]]:
        ordered = []
        followed = (*((piece, None) for piece in pieces), *behind)
        for number, piece in enumerate(pieces, 1):
            ahead = pieces_ahead(followed[number:])
            found = self._ordered.get((piece, ahead, used))
            if found is None:
                go_on()
                found = put_in_order(piece, ahead, used, self.scheduler.backends)
                self._ordered[piece, ahead, used] = found
            in_order, used = found
            ordered.append(in_order)
        return tuple(ordered), used

    def look_back(self, pieces: tuple[Piece, ...], state: int) -> tuple[tuple[int, ...], int]:
        """Return for each piece what it has to know of those behind it, and what the one before them has to."""
        found = self._aheads_of.get((pieces, state))
        if found is None:
            found = self._aheads_of[pieces, state] = self._look_back_all(pieces, state)
        return found

    def _look_back_all(self, pieces: Sequence[Piece], state: int) -> tuple[tuple[int, ...], int]:
        known = self._aheads
        aheads: list[int] = []
        last: Piece | None = None
        for piece in reversed(pieces):
            aheads.append(state)
            if piece is not last:
                found = known.get((piece, state))
                if found is None:
                    ahead = look_back(piece, self._states[state], self.scheduler.backends)  # type: ignore[arg-type]
                    found = known[piece, state] = self.number(ahead)
                last = piece if found == state else None
                state = found
        return tuple(aheads[::-1]), state

    def fill(self, pieces: tuple[Piece, ...], aheads: tuple[int, ...], state: int) -> tuple[Growth, int]:
        """Return what is asked of memories, and the state of the buffers behind the last piece."""
        found = self._filled_segments.get((pieces, aheads, state))
        if found is None:
            found = self._filled_segments[pieces, aheads, state] = self._fill_all(pieces, aheads, state)
        return found

    def _fill_all(self, pieces: Sequence[Piece], aheads: Sequence[int], state: int) -> tuple[Growth, int]:
        growths: list[Growth] = []
        known = self._fills
        last: tuple[Piece, int] | None = None
        for piece, ahead in zip(pieces, aheads, strict=True):
            if last is None or piece is not last[0] or ahead != last[1]:
                step = known.get((piece, ahead, state))
                if step is None:
                    go_on()
                    filled, growth = self._allocation.fill(piece, self._states[ahead], self._states[state])  # type: ignore[arg-type]
                    step = known[piece, ahead, state] = self.number(filled), growth
                last = (piece, ahead) if step[0] == state else None
                state, growth = step
            growths.append(growth)
        return joined(growths), state

    def start(self, assigned: Sequence[Assigned]) -> tuple[int, Growth]:
        """Return the buffers before the first section: what the engine places ahead of everything is in them. Those are
        inputs, which are in the host's memory, wherever their sections are, and what operations fill in place."""
        by_section = {each.bound.section: each for each in assigned}
        sections = tuple(
            [(section, tuple([each.backends[n] for n in section.scratch])) for section, each in by_section.items()]
        )
        found = self._starts.get(sections)
        if found is None:
            filled, growth = start(self.placed_leafs(assigned), self.scheduler.n_copies)
            found = self._starts[sections] = self.number(filled), growth
        return found

    def placed_leafs(self, assigned: Sequence[Assigned]) -> Iterable[Leaf]:
        """Return the leafs of these sections that the engine places."""
        backends = self.scheduler.backends
        placed: dict[Key, Leaf] = {}
        for each in assigned:
            section = each.bound.section
            for number in section.leafs:
                leaf, key = section.tensors[number], section.names[number]
                if leaf.home is None and key not in placed:
                    assert key is not None
                    backend = backends[-1 if leaf.is_input else each.backends[number]]
                    placed[key] = key, leaf.is_input, backend.memory, backend.size_of(leaf)
        return placed.values()

    def fill_on(
        self, pieces: Sequence[Piece], aheads: Sequence[int], held: Sequence[Held], buffers: dict[str, Buffer]
    ) -> Sequence[Held]:
        """Fill these buffers with one piece after another, and return what is read behind the last."""
        for piece, ahead in zip(pieces, aheads, strict=True):
            go_on()
            held = self._allocation.fill_on(piece, self._states[ahead], held, buffers)  # type: ignore[arg-type]
        return held

    def copies(self, pieces: Sequence[Piece], aheads: Sequence[int]) -> Iterator[tuple[str, int]]:
        """Yield memory and size of what is copied to the backends of new splits, in order."""
        for piece, ahead in zip(pieces, aheads, strict=True):
            for span in piece.spans if piece.spans else ():
                behind = self._states[ahead].copies if span is piece.spans[-1] else ()  # type: ignore[union-attr]
                for copy in (*(each for each, _, _ in span.copies), *behind) if span.is_new else ():
                    yield self.scheduler.backends[copy.backend].memory, copy.size_bytes

    def moved(self, assigned: Assigned) -> frozenset[str]:
        """Return which operations are not all on the device of their layer."""
        found = self._moved.get(assigned)
        if found is None:
            backends, fused = self.scheduler.backends, assigned.bound.fused
            tensors = assigned.bound.section.tensors
            found = self._moved[assigned] = frozenset(
                tensors[number].op for number, home in fused if backends[assigned.backends[number]].memory != home
            )
        return found


def _take(buffer: Buffer, size: int, count: int) -> None:
    for _ in range(count):
        buffer.take(size)


class Simulation:
    """Sizes the buffers of one layout's graph, segment by segment."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = segments
        self._backend_maps = [a.backend_map(b) for a, b in pairwise(segments)]

    def sizes(self) -> dict[str, Size]:
        """Return the size of the compute buffer in each memory.

        Raises:
            FarReachError: sections know too little of each other.
        """
        assigned = self._assign()
        pieces = self._order(self._cut(assigned))
        aheads = self._look_back(pieces)
        ends = {memory: 0 for segment in self._segments for memory in segment.memories}
        kept = dict.fromkeys(ends, 0)
        state, asked = self._segments[0].steps.start([each for of_segment in assigned for each in of_segment])
        for place, segment in enumerate(self._segments):
            state = self._entered(place, state) if place else state
            growth, state = segment.steps.fill(pieces[place], aheads[place], state)
            growth = growth if place else joined((asked, growth))
            names = dict(zip(segment.steps.names, segment.memories, strict=True))
            for memory, end in growth.ends:
                ends[names[memory]] = max(ends[names[memory]], end)
            for memory, size in growth.kept:
                kept[names[memory]] += size
        n_copies = self._segments[0].steps.scheduler.n_copies
        found = {
            memory: Size(end + kept[memory], kept[memory] - kept[memory] // n_copies) for memory, end in ends.items()
        }
        largest = self._largest()
        if any(size.size_bytes > largest.get(memory, size.size_bytes) for memory, size in found.items()):
            return self._divided(found, largest, assigned, pieces, aheads)
        return found

    def _largest(self) -> dict[str, int]:
        """Return the largest buffer of each memory that has such a limit."""
        return {
            memory: backend.most_bytes
            for segment in self._segments
            for memory, backend in zip(segment.memories, segment.steps.scheduler.backends, strict=True)
            if backend.most_bytes is not None
        }

    def _divided(
        self,
        sizes: dict[str, Size],
        largest: Mapping[str, int],
        assigned: Sequence[tuple[Assigned, ...]],
        pieces: Sequence[tuple[Piece, ...]],
        aheads: Sequence[tuple[int, ...]],
    ) -> dict[str, Size]:
        """Return the sizes again, with several buffers in a memory where one would be too large."""
        buffers = {memory: DividedBuffer(largest[memory]) if memory in largest else Buffer() for memory in sizes}
        leafs = tuple(self._segments[0].steps.placed_leafs([each for of_segment in assigned for each in of_segment]))
        n_copies = self._segments[0].steps.scheduler.n_copies
        named = [dict(zip(segment.steps.names, segment.memories, strict=True)) for segment in self._segments]
        # A pipeline's copies come before all else: those of inputs, then those that splits begin with.
        if n_copies > 1:
            for _, is_input, name, size in leafs:
                _take(buffers[named[0][name]], size, n_copies if is_input else 0)
            for place, segment in enumerate(self._segments):
                for name, size in segment.steps.copies(pieces[place], aheads[place]):
                    _take(buffers[named[place][name]], size, n_copies)
        held: Sequence[Held] = ()
        for place, segment in enumerate(self._segments):
            here = {name: buffers[memory] for name, memory in named[place].items()}
            held = self._backend_maps[place - 1].held(held) if place else start_in(leafs, n_copies, here, Counter())
            held = segment.steps.fill_on(pieces[place], aheads[place], held, here)
        return {
            memory: Size(found.size_bytes, sizes[memory].pipeline_bytes, n_parts(found))
            for memory, found in buffers.items()
        }

    def moved(self) -> frozenset[str]:
        """Return which operations do not all end up on the device of their layer.

        Raises:
            FarReachError: sections know too little of each other.
        """
        found: frozenset[str] = frozenset()
        for segment, assigned in zip(self._segments, self._assign(), strict=True):
            found = found.union(*map(segment.steps.moved, dict.fromkeys(assigned)))
        return found

    def _entered(self, place: int, state: int) -> int:
        """Return the number that a state of the segment before has in the one at `place`."""
        origin = self._segments[place - 1].steps
        return self._segments[place].steps.entered(origin, self._backend_maps[place - 1], state)

    def _assign(self) -> list[tuple[Assigned, ...]]:
        found = []
        state = self._segments[0].steps.number(NOTHING)
        for place, segment in enumerate(self._segments):
            state = self._entered(place, state) if place else state
            assigned, state = segment.steps.assign(segment, state)
            found.append(assigned)
        return found

    def _cut(self, assigned: Sequence[tuple[Assigned, ...]]) -> list[tuple[Piece, ...]]:
        found = []
        standing = CutState()
        for place, segment in enumerate(self._segments):
            standing = standing.mapped(self._backend_maps[place - 1]) if place else standing
            pieces, standing = segment.steps.cut(assigned[place], standing)
            found.append(pieces)
        return found

    def _order(self, pieces: Sequence[tuple[Piece, ...]]) -> Sequence[tuple[Piece, ...]]:
        if not any(segment.steps.reorders for segment in self._segments):
            return pieces
        found = []
        used: frozenset[NodePlace] = frozenset()
        for place, segment in enumerate(self._segments):
            ordered, used = segment.steps.order(pieces[place], pieces_ahead(self._behind(pieces, place)), used)
            found.append(ordered)
        return found

    def _behind(self, pieces: Sequence[tuple[Piece, ...]], place: int) -> Iterator[Followed]:
        """Yield the pieces of the segments behind one."""
        for before, segment in enumerate(self._segments[place + 1 :], place):
            first, *others = pieces[before + 1]
            yield first, segment.backend_map(self._segments[before])
            yield from ((piece, None) for piece in others)

    def _look_back(self, pieces: Sequence[tuple[Piece, ...]]) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        state = self._segments[-1].steps.number(Ahead())
        behind: Segment | None = None
        for place in reversed(range(len(self._segments))):
            segment = self._segments[place]
            if behind is not None:
                state = segment.steps.entered(behind.steps, behind.backend_map(segment), state)
            behind = segment
            aheads, state = segment.steps.look_back(pieces[place], state)
            found.append(aheads)
        return found[::-1]
