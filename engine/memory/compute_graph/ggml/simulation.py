"""Walks over the sections of a graph: which backend, which cuts, which offsets, each remembered.

A step of any of these walks depends on one section and a small state. Layers repeat and states recur after a layer or
two, so that a layout which was never seen is mostly made of steps that were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.memory.compute_graph.ggml.allocator import Ahead, Allocation, Filled, is_shared, look_back, start
from engine.memory.compute_graph.ggml.scheduler import Assigned, Bound, Cut, Piece, Place, Scheduler
from engine.memory.compute_graph.ggml.sections import FarReachError, Key, Section

_MOST_REMEMBERED = 20000

SectionName = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], bool]
"""See `Chains.section`."""

Places = tuple[tuple[Key, int], ...]
"""Backends of tensors that a section passes on."""
State = Places | Ahead | Filled
NOTHING: Places = ()
_NO_COPIES: frozenset[Key] = frozenset()
PieceStep = tuple[Piece, int, bool, frozenset[Key], tuple[frozenset[Key], ...]]
"""A piece, the backend of the split behind it and whether that has inputs, copies of what layers made, and copies of
what all may read, by backend."""


@dataclass(frozen=True, slots=True, eq=False)
class Stop:
    """A section of the walk: its name, and the places of the layers that it was made with. Two stops are equal only if
    they are one, which is quicker to find out."""

    section: SectionName
    places: tuple[Place, ...]


class Simulation:
    """Sizes buffers of graphs whose sections `section_of` makes, on the backends of one scheduler."""

    def __init__(self, scheduler: Scheduler, section_of: Callable[[SectionName], Section]) -> None:
        self._scheduler = scheduler
        self._section_of = section_of
        self._allocation = Allocation(scheduler.backends, scheduler.n_copies)
        self._forget()

    def _forget(self) -> None:
        self._bounds: dict[Stop, Bound] = {}
        self._assigned: dict[tuple[Bound | None, Bound, Bound | None, int], tuple[Assigned, int]] = {}
        self._pieces: dict[object, PieceStep] = {}
        self._aheads: dict[tuple[Piece, int], int] = {}
        self._fills: dict[tuple[Piece, int, int], tuple[int, dict[str, int]]] = {}
        self._starts: dict[tuple[Section, ...], int] = {}
        self._moved: dict[Assigned, frozenset[str]] = {}
        self._numbers: dict[State, int] = {}
        self._states: list[State] = []

    def _number(self, state: State) -> int:
        """Return a number that stands for `state`, the same for equal ones."""
        found = self._numbers.setdefault(state, len(self._states))
        if found == len(self._states):
            self._states.append(state)
        return found

    # ------------------------------------------------------------------ walks

    def assign(self, stops: Sequence[Stop]) -> list[Assigned]:
        """Return every section with its backends."""
        if len(self._fills) > _MOST_REMEMBERED:
            self._forget()
        known = self._bounds
        bounds = [known.get(stop) or self._bind(stop) for stop in stops]
        state = self._number(NOTHING)
        found: list[Assigned] = []
        last: tuple[Bound | None, Bound, Bound | None] | None = None
        for around in zip([None, *bounds], bounds, [*bounds[1:], None], strict=False):
            if last is None or around[0] is not last[0] or around[1] is not last[1] or around[2] is not last[2]:
                key = (*around, state)
                step = self._assigned.get(key)
                if step is None:
                    step = self._assigned[key] = self._assign(*around, state)
                assigned, after = step
                # A step that leaves the state as it was can be taken any number of times.
                last = around if after == state else None
                state = after
            found.append(assigned)
        return found

    def sizes(self, stops: Sequence[Stop]) -> dict[str, int]:
        """Return the bytes of the compute buffer in each memory.

        Raises:
            FarReachError: sections know too little of each other.
        """
        assigned = self.assign(stops)
        pieces = self._cut(assigned)
        aheads = self._look_back(pieces)
        return self._fill(assigned, pieces, aheads)

    def moved(self, stops: Sequence[Stop]) -> frozenset[str]:
        """Return which operations do not all end up on the device of their layer.

        Raises:
            FarReachError: sections know too little of each other.
        """
        known = self._moved
        found: frozenset[str] = frozenset()
        for each in self.assign(stops):
            moved = known.get(each)
            if moved is None:
                moved = known[each] = self._moved_in(each)
            if moved:
                found |= moved
        return found

    # ------------------------------------------------------------------ steps

    def _bind(self, stop: Stop) -> Bound:
        found = self._scheduler.bind(self._section_of(stop.section), stop.places)
        self._bounds[stop] = found
        return found

    def _assign(self, before: Bound | None, bound: Bound, behind: Bound | None, state: int) -> tuple[Assigned, int]:
        if before is not None and before.section.shape != bound.section.shape_before:
            raise FarReachError
        bounds = [each for each in (before, bound, behind) if each is not None]
        known = dict(self._states[state])  # type: ignore[arg-type]
        assigned, passed = self._scheduler.assign(bounds, 0 if before is None else 1, known)
        return assigned, self._number(tuple(passed.items()))

    def _cut(self, assigned: Sequence[Assigned]) -> list[Piece]:
        known = self._pieces
        backend, has_inputs, passing = -1, False, _NO_COPIES
        lasting: dict[int, frozenset[Key]] = {}
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
                    found = known[key] = self._cut_one(each, Cut(backend, has_inputs, passing.union(*state)))
                piece, *after, copies = found
                last = each if copies == state and after == [backend, has_inputs, passing] else None
                _, backend, has_inputs, passing, _ = found
                lasting.update(zip(involved, copies, strict=True))
            pieces.append(piece)
        return pieces

    def _cut_one(self, assigned: Assigned, before: Cut) -> PieceStep:
        piece, cut = self._scheduler.cut(assigned, before)
        lasting: dict[int, set[Key]] = {index: set() for index in assigned.involved}
        passing: set[Key] = set()
        for key in cut.copies:
            (lasting[key[2]] if is_shared(key) else passing).add(key)  # type: ignore[index]
        copies = tuple(frozenset(lasting[index]) for index in assigned.involved)
        return piece, cut.backend, cut.has_inputs, frozenset(passing), copies

    def _look_back(self, pieces: Sequence[Piece]) -> list[int]:
        known = self._aheads
        state = self._number(Ahead())
        aheads = [state]
        last: Piece | None = None
        for piece in reversed(pieces):
            if piece is not last:
                found = known.get((piece, state))
                if found is None:
                    ahead = look_back(piece, self._states[state], self._scheduler.backends)  # type: ignore[arg-type]
                    found = known[piece, state] = self._number(ahead)
                last = piece if found == state else None
                state = found
            aheads.append(state)
        aheads.pop()
        aheads.reverse()
        return aheads

    def _fill(self, assigned: Sequence[Assigned], pieces: Sequence[Piece], aheads: Sequence[int]) -> dict[str, int]:
        sizes = {backend.memory: 0 for backend in self._scheduler.backends}
        known = self._fills
        state = self._start(assigned)
        last: tuple[Piece, int] | None = None
        for piece, ahead in zip(pieces, aheads, strict=True):
            if last is not None and piece is last[0] and ahead == last[1]:
                continue
            found = known.get((piece, ahead, state))
            if found is None:
                filled, done = self._allocation.fill(piece, self._states[ahead], self._states[state])  # type: ignore[arg-type]
                found = known[piece, ahead, state] = self._number(filled), done
            last = (piece, ahead) if found[0] == state and not found[1] else None
            state, done = found
            if done:
                sizes |= done
        return sizes

    def _start(self, assigned: Sequence[Assigned]) -> int:
        """Return the buffers before the first section: what the engine places ahead of everything is in them."""
        sections = tuple(dict.fromkeys(each.bound.section for each in assigned))
        found = self._starts.get(sections)
        if found is None:
            backends = self._scheduler.backends
            placed: dict[object, tuple[object, bool, str, int]] = {}
            for each in assigned:
                section = each.bound.section
                for leaf in section.leafs:
                    key = section.keys.get(leaf, leaf)
                    if leaf.home is None and key not in placed:
                        backend = backends[each.backends[leaf]]
                        placed[key] = key, leaf.is_input, backend.memory, backend.size_of(leaf)
            found = self._starts[sections] = self._number(start(placed.values(), self._scheduler.n_copies))
        return found

    def _moved_in(self, assigned: Assigned) -> frozenset[str]:
        backends = self._scheduler.backends
        fused = assigned.bound.fused
        return frozenset(node.op for node, home in fused if backends[assigned.backends[node]].memory != home)
