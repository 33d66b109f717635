"""Which backend computes what, where the graph is cut, and what is copied over the cuts (ggml's scheduler).

It works on sections of a graph one after the other. What it finds for one depends on its neighbours and on what was
copied before, and on nothing else, so that callers may remember it. Tensors go by their numbers in their section.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from engine.planning.memory.compute_graph.ggml.graph import INPLACE_OPS, Tensor
from engine.planning.memory.compute_graph.ggml.sections import (
    EARLY,
    ON_CPU,
    Key,
    Node,
    Section,
    is_alike,
    memory_at,
    pin_at,
)

PIPELINE_COPIES = 4
"""`GGML_SCHED_MAX_COPIES`: under pipeline parallelism inputs of the graph and of its parts are kept this often."""
_GO_ALONG = ("rope", "flash_attn")
"""Operations that run where their neighbours do, whatever they read."""
HOST = "host"
"""Memory of host weights and caches that every CPU backend can use and that devices may copy from."""


@dataclass(frozen=True, slots=True)
class Backend:
    """One entry of the scheduler. `memory` names where its results go; entries of one device share it.

    `supports`: whether an operation can run there, None where all can; `unreadable`: memories that it can only read
    copies of; `offloads`: whether it takes over an operation whose weight is on the host; `alloc_size`: what a tensor
    takes in its memory; `reorders`: whether it computes in an order of its own; `most_bytes`: its largest buffer, None:
    any.
    """

    memory: str
    is_cpu: bool
    alignment: int
    supports: Callable[[Tensor], bool] | None
    unreadable: frozenset[str]
    offloads: bool
    alloc_size: Callable[[Tensor], int]
    reorders: bool = False
    most_bytes: int | None = None

    def size_of(self, tensor: Tensor) -> int:
        """Return what `tensor` takes in the backend's memory, rounded up to its alignment."""
        return (self.alloc_size(tensor) + self.alignment - 1) & ~(self.alignment - 1)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a layer is: its memory, the backend that its norms are pinned to (-1: none), and which sort of devices it
    is of, by the weights that they have no kernel for."""

    memory: str
    pin: int
    left_out: int


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """A section on devices. For each tensor: the memory of a leaf that has one, the backend where that is certain from
    the start (-1 where not), and a bit for each backend that cannot compute it. `fused`: operations that are one as
    long as they are on their layer's device, with the memory of that."""

    section: Section
    homes: list[str | None]
    natural: list[int]
    fused: tuple[tuple[int, str], ...]
    unable: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class Assigned:
    """A section with a backend for each tensor that it computes or reads (-1: none); `involved` are those that
    compute."""

    bound: Bound
    backends: list[int]
    involved: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy for a backend, of `size_bytes`; `root_key` names what it is a copy of, or what that is a view of: None
    where only one section knows it."""

    key: Key
    root_key: Key | None
    backend: int
    size_bytes: int


Work = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""A node at work: its slot (-1: its result has no place of its own), what that takes, the slots whose place it may
take, and the slots that it reads."""


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Nodes of one split inside a section; `is_new`: the split begins here, else in a section before; `copies` at its
    start, each with the slot of what is copied and its own."""

    backend: int
    is_new: bool
    copies: list[tuple[Copy, int, int]] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A section cut into spans. What needs a place has a slot: tensors that of their number, copies those behind.

    `reads`: how often each slot is read, and once more what is kept for good; `slots`: of what other sections know, by
    name; `passed`: those that the next one may know, with their names there; `names_before`: what the nodes and the
    copies of new splits read, by the names in the section before; `early`: slots that sections before this one fill.
    """

    section: Section
    spans: tuple[Span, ...]
    reads: tuple[int, ...]
    slots: dict[Key, int]
    passed: tuple[tuple[int, Key], ...]
    names_before: frozenset[Key]
    early: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Cut:
    """Where cutting stands between two sections: the backend of the split, whether it has inputs, and all copies."""

    backend: int = -1
    has_inputs: bool = False
    copies: frozenset[Key] = frozenset()


def offload_batch(node: Tensor) -> int:
    """Return the batch that a device compares with its minimum before it takes over an operation."""
    if node.op == "get_rows":
        return 0
    if node.op == "mul_mat":
        return node.ne[1]
    if node.op in ("mul_mat_id", "rope"):
        return node.ne[2]
    return node.ne[1] * node.ne[2] * node.ne[3]


class Scheduler:
    """Assigns and cuts sections for a list of backends, of which the last is the CPU; `pins`: backend of each device
    that norms are pinned to."""

    def __init__(
        self,
        backends: Sequence[Backend],
        *,
        pipeline: bool,
        op_offload: bool,
        offload_batch: int,
    ) -> None:
        self.backends = tuple(backends)
        self.n_copies = PIPELINE_COPIES if pipeline else 1
        self._last = len(backends) - 1
        self._op_offload = op_offload and any(backend.offloads for backend in backends)
        self._offload_batch = offload_batch
        self._repeats = len({backend.memory for backend in backends}) < len(backends)
        self._deciding: dict[Callable[[Tensor], bool], int] = {}
        self._unreadable: dict[str, int] = {}
        for index, backend in enumerate(backends):
            if backend.supports is not None:
                self._deciding[backend.supports] = self._deciding.get(backend.supports, 0) | 1 << index
            for memory in backend.unreadable:
                self._unreadable[memory] = self._unreadable.get(memory, 0) | 1 << index
        self._works: dict[tuple[Section, int], list[Work]] = {}
        self._incapable: dict[Section, list[int]] = {}
        self._certain: dict[Section, tuple[Node, ...]] = {}
        self._named: dict[Section, tuple[dict[Key, int], tuple[tuple[int, Key], ...]]] = {}
        self._holders: dict[str, list[int]] = {}
        for index, backend in enumerate(backends):
            self._holders.setdefault(HOST if backend.is_cpu else backend.memory, []).append(index)

    # ------------------------------------------------------------------ passes 1 to 4: assignment

    def bind(self, section: Section, places: Mapping[int, Place]) -> Bound:
        """Put a section on devices, given the places of the layers whose memories it uses."""
        named = {memory_at(number, place.left_out): place.memory for number, place in places.items()}
        pins = {pin_at(number): place.pin for number, place in places.items()}
        pins[ON_CPU] = self._last
        tensors = section.tensors
        homes: list[str | None] = [None] * len(tensors)
        natural = [-1] * len(tensors)
        for number in section.leafs:
            leaf = tensors[number]
            if leaf.home is not None:
                home = homes[number] = named.get(leaf.home, leaf.home)
                natural[number] = self._first_that_holds(home, 0)
            elif leaf.is_input:
                natural[number] = self._last
        unable = self._unable(section, homes)
        for node in self._may_be_certain(section):
            number = node.number
            place = tensors[number].backend
            place = pins.get(place, place)
            if place == -1:
                place = self._natural(section, number, node.weights, homes, unable[number])
            if place != -1:
                natural[number] = place
        fused = tuple((number, named.get(memory, memory)) for number, memory in section.fused)
        return Bound(section, homes, natural, fused, unable)

    def _unable(self, section: Section, homes: Sequence[str | None]) -> list[int]:
        incapable = self._incapable.get(section)
        if incapable is None:
            incapable = self._incapable[section] = [0] * len(homes)
            for node in section.nodes:
                for supports, backends in self._deciding.items():
                    if not supports(section.tensors[node.number]):
                        incapable[node.number] |= backends
        blind = self._unreadable
        if not blind:
            return incapable
        found = incapable.copy()
        for node in section.nodes:
            for source in node.sources:
                home = homes[source]
                if home is not None:
                    found[node.number] |= blind.get(home, 0)
        return found

    def _may_be_certain(self, section: Section) -> tuple[Node, ...]:
        """Return the nodes that may have a backend from the start: pinned ones, views of what has a memory, and those
        that read weights."""
        found = self._certain.get(section)
        if found is None:
            tensors, roots = section.tensors, section.roots
            found = self._certain[section] = tuple(
                node
                for node in section.nodes
                if tensors[node.number].backend != -1
                or tensors[roots[node.number]].home is not None
                or (node.weights and tensors[node.number].op not in _GO_ALONG)
            )
        return found

    def _holds(self, backend: int, home: str) -> bool:
        found = self.backends[backend]
        return found.is_cpu if home == HOST else found.memory == home

    def _first_that_holds(self, home: str, unable: int) -> int:
        """Return the first backend that can use the memory `home` and is not `unable`, -1 if there is none."""
        for index in self._holders.get(home, ()):
            if not unable >> index & 1:
                return index
        return -1

    def _natural(
        self, section: Section, number: int, weights: Sequence[int], homes: Sequence[str | None], unable: int
    ) -> int:
        home = homes[section.roots[number]]
        if home is not None:
            return self._first_that_holds(home, unable)
        node = section.tensors[number]
        if node.op in _GO_ALONG:
            return -1
        home = homes[weights[0]] if weights else None
        if home is None:
            return -1
        backend = self._first_that_holds(home, unable)
        op_offload = self._op_offload and backend == self._last and home == HOST
        if op_offload and offload_batch(node) >= self._offload_batch:
            takers = (index for index in range(self._last) if self.backends[index].offloads)
            return next((index for index in takers if not unable >> index & 1), backend)
        return backend

    def assign(self, bounds: Sequence[Bound], place: int, known: Mapping[Key, int]) -> tuple[Assigned, dict[Key, int]]:
        """Give every node of `bounds[place]` a backend, with those around it in sight. `known` are backends of what
        earlier sections made; returns what the next one has to know of them too."""
        # Neighbours may be the same section on other devices, so that each has a table of its own.
        rows = [(bound, bound.natural.copy()) for bound in bounds]
        for skip in (self._last, -1):
            _expand(rows, skip)
            _expand(rows[::-1], skip, backwards=True)
        bound, backends = rows[place]
        section = bound.section
        for number, key in section.known_before:
            if key in known:
                backends[number] = known[key]
        self._complete(bound, backends)
        passed = {named: backends[number] for number, named in section.known_after if backends[number] != -1}
        involved = tuple(sorted({backends[number] for number in section.operations}))
        return Assigned(bound, backends, involved), passed

    def _complete(self, bound: Bound, backends: list[int]) -> None:
        """Settle what no neighbour decides."""
        section, roots = bound.section, bound.section.roots
        for node in section.nodes:
            if node.is_view:
                continue
            if backends[node.number] == -1:
                self._assign_best(node.number, node.sources, backends, bound)
            elif self._repeats:
                self._upgrade(node.number, node.sources, backends, bound)
        for node in section.nodes:
            own = backends[node.number]
            if own == -1:
                own = backends[node.number] = backends[roots[node.number]]
            for source in node.sources:
                if backends[source] == -1:
                    backends[source] = own if roots[source] == source else backends[roots[source]]

    def _assign_best(self, number: int, sources: Sequence[int], backends: list[int], bound: Bound) -> None:
        most, unable, roots = -1, bound.unable[number], bound.section.roots
        for index in range(len(self.backends)):
            if unable >> index & 1:
                continue
            count = 0
            for source in sources:
                is_known = backends[source] != -1 or backends[roots[source]] != -1
                count += is_known and self._reaches(source, index, backends, bound)
            if count > most:
                most, backends[number] = count, index

    def _upgrade(self, number: int, sources: Sequence[int], backends: list[int], bound: Bound) -> None:
        memory, unable = self.backends[backends[number]].memory, bound.unable[number]
        for index in range(backends[number]):
            able = self.backends[index].memory == memory and not unable >> index & 1
            if able and all(self._reaches(source, index, backends, bound) for source in sources):
                backends[number] = index
                return

    def _reaches(self, number: int, backend: int, backends: Sequence[int], bound: Bound) -> bool:
        """Return whether `backend` can read a tensor where it is."""
        root = bound.section.roots[number]
        home = bound.homes[root]
        if home is not None:
            return self._holds(backend, home)
        owner = backends[number]
        if owner == -1:
            owner = backends[root]
        if owner == -1:
            return False
        found, own = self.backends[backend], self.backends[owner]
        return found.memory == own.memory or (found.is_cpu and own.is_cpu)

    # ------------------------------------------------------------------ passes 5 and 6: splits and copies

    def cut(self, assigned: Assigned, before: Cut) -> tuple[Piece, Cut]:
        """Return the section in spans, with copies of what a span cannot read, and where that leaves the next one."""
        bound, backends = assigned.bound, assigned.backends
        section, roots = bound.section, bound.section.roots
        current, has_inputs = before.backend, before.has_inputs
        made = set(before.copies)
        named, passed = self._names(section)
        slot_of = named.copy()
        spans, reads = [Span(current, is_new=False)], [*section.reads]
        rows, work = self._work(section, current), spans[-1].work
        for number, node in enumerate(section.nodes):
            if node.is_view:
                work.append(rows[number])
                continue
            backend = backends[node.number]
            if (
                current == -1
                or backend != current
                or (has_inputs and node.weights and self._wants_other_weights(node.weights, current, assigned))
            ):
                spans.append(Span(backend, is_new=True))
                current, has_inputs = backend, False
                rows, work = self._work(section, current), spans[-1].work
            slots: list[int] | None = None
            for place, source in enumerate(node.sources):
                if backends[source] == current or self._reaches(source, current, backends, bound):
                    continue
                key = _copy_key(bound, source, current)
                slot = slot_of.setdefault(key, len(reads))
                if slot == len(reads):
                    reads.append(0)
                if key not in made:
                    made.add(key)
                    root = roots[source]
                    copy = Copy(key, section.names[root], current, self._copy_bytes(section.tensors[source], current))
                    spans[-1].copies.append((copy, root, slot))
                    has_inputs = True
                slots = slots or [*node.roots]
                reads[slots[place]] -= 1
                reads[slot] += 1
                slots[place] = slot
            work.append(rows[number] if slots is None else (*rows[number][:2], _alike(section, node, slots), (*slots,)))
        copies = (section.name_after(key) for key in made if section.is_known_after(key))
        passed += _passed(section, islice(slot_of.items(), len(named), None))
        return (
            make_piece(section, tuple(spans), reads, slot_of, passed),
            Cut(current, has_inputs, frozenset([key for key in copies if key is not None])),
        )

    def _names(self, section: Section) -> tuple[dict[Key, int], tuple[tuple[int, Key], ...]]:
        """Return the slots of what other sections know, by name, and those that the next one may know."""
        found = self._named.get(section)
        if found is None:
            roots = section.roots
            slots = {name: number for number, name in enumerate(section.names) if name and roots[number] == number}
            found = self._named[section] = slots, _passed(section, slots.items())
        return found

    def _work(self, section: Section, backend: int) -> list[Work]:
        """Return the work of each node on a backend that needs no copies for it."""
        found = self._works.get((section, backend))
        if found is None:
            size_of, tensors = self.backends[backend].size_of, section.tensors
            found = self._works[section, backend] = [
                (node.number, size_of(tensors[node.number]), node.alike, node.roots)
                if node.is_placed
                else (-1, 0, (), node.roots)
                for node in section.nodes
            ]
        return found

    def _wants_other_weights(self, weights: Sequence[int], current: int, assigned: Assigned) -> bool:
        backends, bound = assigned.backends, assigned.bound
        return any(
            backends[weight] != current and not self._reaches(weight, current, backends, bound) for weight in weights
        )

    def _copy_bytes(self, original: Tensor, backend: int) -> int:
        copy = Tensor("none", original.type, original.ne, original.nb, [], n_bytes=original.n_bytes)
        copy.padding_bytes = original.padding_bytes
        return self.backends[backend].size_of(copy)


def _expand(rows: Sequence[tuple[Bound, list[int]]], skip: int, *, backwards: bool = False) -> None:
    """Give operations without a backend that of the ones before, of those behind if `backwards`, except for `skip`."""
    current = -1
    for bound, backends in rows:
        operations, unable = bound.section.operations, bound.unable
        for number in reversed(operations) if backwards else operations:
            found = backends[number]
            if found != -1:
                current = -1 if found == skip else found
            elif current != -1 and not unable[number] >> current & 1:
                backends[number] = current


def _passed(section: Section, slots: Iterable[tuple[Key, int]]) -> tuple[tuple[int, Key], ...]:
    """Return those of the named slots that the next section may know, with their names there."""
    behind = ((slot, section.name_after(name)) for name, slot in slots)
    return tuple([(slot, name) for slot, name in behind if name is not None])


def make_piece(
    section: Section,
    spans: tuple[Span, ...],
    reads: Sequence[int],
    slots: dict[Key, int],
    passed: tuple[tuple[int, Key], ...],
    early: tuple[int, ...] = (),
) -> Piece:
    """Return the piece of these parts, with what sections before it have to know."""
    copied = [(root, copy) for span in spans[1:] for copy, root, _ in span.copies]
    read = {name for name, slot in slots.items() if reads[slot]}
    read.update(copy.root_key for _, copy in copied if copy.root_key is not None)
    roots = {root for root, _ in copied}
    read.update((0, EARLY, slot) for slot in early if reads[slot] or slot in roots)
    before = (section.name_before(key) for key in read if section.is_known_before(key))
    return Piece(
        section=section,
        spans=spans,
        reads=tuple(reads),
        slots=slots,
        passed=passed,
        names_before=frozenset([name for name in before if name is not None]),
        early=early,
    )


def _alike(section: Section, node: Node, slots: Sequence[int]) -> tuple[int, ...]:
    """Return those of the slots that a node reads whose place its result may take; copies are no views."""
    tensors = section.tensors
    result = tensors[node.number]
    if not node.is_placed or result.op not in INPLACE_OPS:
        return ()
    return tuple(
        slot
        for source, slot in zip(node.sources, slots, strict=True)
        if (slot >= len(tensors) or section.roots[slot] == source) and is_alike(tensors[source], result)
    )


def _copy_key(bound: Bound, source: int, backend: int) -> Key:
    """Return the name of a copy; tensors that no other section knows have none but their number."""
    name = bound.section.names[source] or (None, source)
    return ("copy", ("weight", bound.homes[source]) if name[0] == "weight" else name, backend)
