"""Which backend computes what, where the graph is cut, and what is copied over the cuts (ggml's scheduler).

It works on sections of a graph one after the other. What it finds for one depends on its neighbours and on what was
copied before, and on nothing else, so that callers may remember it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from engine.memory.compute_graph.ggml.graph import VIEW_OPS, Tensor
from engine.memory.compute_graph.ggml.sections import ON_CPU, Key, Section, memory_at, pass_on, pin_at

PIPELINE_COPIES = 4
"""`GGML_SCHED_MAX_COPIES`: under pipeline parallelism inputs of the graph and of its parts are kept this often."""
HOST = "host"
"""Memory of host weights and caches that every CPU backend can use and that devices may copy from."""


@dataclass(frozen=True, slots=True)
class Backend:
    """One entry of the scheduler. `memory` names where its results go; entries of one device share it.

    `supports`: whether an operation can run there, None where all can; `blind_to`: memories that it can only read
    copies of; `offloads`: whether it takes over an operation whose weight is on the host; `alloc_size`: what a tensor
    takes in its memory.
    """

    memory: str
    is_cpu: bool
    alignment: int
    supports: Callable[[Tensor], bool] | None
    blind_to: frozenset[str]
    offloads: bool
    alloc_size: Callable[[Tensor], int]

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
    """A section on devices: the memory of each leaf that has one, the backends that are certain from the start,
    attention that is one operation with the memory of its layer, and for operations that some backend cannot compute
    a bit for each that cannot."""

    section: Section
    homes: dict[Tensor, str]
    natural: dict[Tensor, int]
    fused: tuple[tuple[Tensor, str], ...]
    unable: dict[Tensor, int]


@dataclass(frozen=True, slots=True, eq=False)
class Assigned:
    """A section with a backend for each tensor that it computes or reads; `involved` are those that compute."""

    bound: Bound
    backends: dict[Tensor, int]
    involved: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of `original` (named `original_key` by those who share it, None where only one section knows it) for a
    backend, of `size_bytes`; `root_key` names what `original` is a view of, or itself."""

    key: Key
    original: Tensor
    root_key: object
    backend: int
    size_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Nodes of one split inside a section, each with what it reads (a tensor or a copy); `is_new`: the split begins
    here, else in a section before."""

    backend: int
    is_new: bool
    copies: list[Copy] = field(default_factory=list)
    nodes: list[tuple[Tensor, list[Tensor | Copy]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A section cut into spans; `reads`: how often its nodes read what, by name, copies apart from their originals."""

    assigned: Assigned
    spans: tuple[Span, ...]
    reads: Counter[object]


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
        self._blind: dict[str, int] = {}
        for index, backend in enumerate(backends):
            if backend.supports is not None:
                self._deciding[backend.supports] = self._deciding.get(backend.supports, 0) | 1 << index
            for memory in backend.blind_to:
                self._blind[memory] = self._blind.get(memory, 0) | 1 << index
        self._holders: dict[str, list[int]] = {}
        for index, backend in enumerate(backends):
            self._holders.setdefault(HOST if backend.is_cpu else backend.memory, []).append(index)

    # ------------------------------------------------------------------ passes 1 to 4: assignment

    def bind(self, section: Section, places: Sequence[Place]) -> Bound:
        """Put a section on devices, given those of the layers that it was made with."""
        named = {memory_at(number, place.left_out): place.memory for number, place in enumerate(places)}
        pins = {pin_at(number): place.pin for number, place in enumerate(places)}
        pins[ON_CPU] = self._last
        homes = {leaf: named.get(leaf.home, leaf.home) for leaf in section.leafs if leaf.home is not None}
        unable = self._unable(section, homes)
        natural: dict[Tensor, int] = {}
        for leaf in section.leafs:
            if leaf.home is not None:
                natural[leaf] = self._first_that_holds(homes[leaf], 0)
            elif leaf.is_input:
                natural[leaf] = self._last
        for node in section.nodes:
            place = pins.get(node.backend, node.backend)
            if place == -1:
                place = self._natural(node, homes, unable.get(node, 0))
            if place != -1:
                natural[node] = place
        fused = tuple((node, named.get(memory, memory)) for node, memory in section.fused)
        return Bound(section, homes, natural, fused, unable)

    def _unable(self, section: Section, homes: dict[Tensor, str]) -> dict[Tensor, int]:
        found = {}
        for node in section.nodes:
            bits = 0
            for supports, backends in self._deciding.items():
                if not supports(node):
                    bits |= backends
            if self._blind:
                for source in node.src:
                    if source in homes:
                        bits |= self._blind.get(homes[source], 0)
            if bits:
                found[node] = bits
        return found

    def _holds(self, backend: int, home: str) -> bool:
        found = self.backends[backend]
        return found.is_cpu if home == HOST else found.memory == home

    def _first_that_holds(self, home: str, unable: int) -> int:
        """Return the first backend that can use the memory `home` and is not `unable`, -1 if there is none."""
        return next((index for index in self._holders.get(home, ()) if not unable >> index & 1), -1)

    def _natural(self, node: Tensor, homes: dict[Tensor, str], unable: int) -> int:
        home = homes.get(node.root or node)
        if home is not None:
            return self._first_that_holds(home, unable)
        if node.op in ("rope", "flash_attn"):
            return -1
        weight = next((source for source in node.src if source.is_weight), None)
        if weight is None:
            return -1
        home = homes[weight]
        backend = self._first_that_holds(home, unable)
        lends = self._op_offload and backend == self._last and home == HOST
        if lends and offload_batch(node) >= self._offload_batch:
            takers = (index for index in range(self._last) if self.backends[index].offloads)
            return next((index for index in takers if not unable >> index & 1), backend)
        return backend

    def assign(self, bounds: Sequence[Bound], place: int, known: dict[Key, int]) -> tuple[Assigned, dict[Key, int]]:
        """Give every node of `bounds[place]` a backend, with those around it in sight. `known` are backends of what
        earlier sections made; returns what the next one has to know of them too."""
        # Neighbours may be the same section on other devices, so that each has a table of its own.
        tables = [dict(bound.natural) for bound in bounds]
        rows = list(zip(bounds, tables, strict=True))
        for skip in (self._last, -1):
            self._expand(rows, skip)
            self._expand(rows[::-1], skip, backwards=True)
        backends = tables[place]
        section = bounds[place].section
        for tensor, key in section.known_before:
            if key in known:
                backends[tensor] = known[key]
        self._complete(bounds[place], backends)
        passed = {named: backends[tensor] for tensor, named in section.passed_on if tensor in backends}
        involved = tuple(sorted({backends[node] for node in section.operations}))
        return Assigned(bounds[place], backends, involved), passed

    def _complete(self, bound: Bound, backends: dict[Tensor, int]) -> None:
        """Settle what no neighbour decides."""
        section = bound.section
        for node in section.operations:
            if node not in backends:
                self._assign_best(node, backends, bound)
            elif self._repeats:
                self._upgrade(node, backends, bound)
        for node in section.nodes:
            if node not in backends and node.root is not None:
                backends[node] = backends.get(node.root, -1)
            for source in node.src:
                if backends.get(source, -1) == -1:
                    backends[source] = backends[node] if source.root is None else backends.get(source.root, -1)

    def _expand(self, rows: Sequence[tuple[Bound, dict[Tensor, int]]], skip: int, *, backwards: bool = False) -> None:
        current = -1
        for bound, backends in rows:
            operations, unable = bound.section.operations, bound.unable
            get = backends.get
            for node in reversed(operations) if backwards else operations:
                found = get(node, -1)
                if found != -1:
                    current = -1 if found == skip else found
                elif current != -1 and (node not in unable or not unable[node] >> current & 1):
                    backends[node] = current

    def _assign_best(self, node: Tensor, backends: dict[Tensor, int], bound: Bound) -> None:
        most, unable, homes = -1, bound.unable.get(node, 0), bound.homes
        for index in range(len(self.backends)):
            if unable >> index & 1:
                continue
            count = sum(
                (backends.get(source, -1) != -1 or (source.root is not None and backends.get(source.root, -1) != -1))
                and self._reaches(source, index, backends, homes)
                for source in node.src
            )
            if count > most:
                most, backends[node] = count, index

    def _upgrade(self, node: Tensor, backends: dict[Tensor, int], bound: Bound) -> None:
        memory, homes = self.backends[backends[node]].memory, bound.homes
        for index in range(backends[node]):
            able = self.backends[index].memory == memory and not bound.unable.get(node, 0) >> index & 1
            if able and all(self._reaches(source, index, backends, homes) for source in node.src):
                backends[node] = index
                return

    def _reaches(self, tensor: Tensor, backend: int, backends: dict[Tensor, int], homes: dict[Tensor, str]) -> bool:
        """Return whether `backend` can read `tensor` where it is."""
        root = tensor.root or tensor
        home = homes.get(root)
        if home is not None:
            return self._holds(backend, home)
        owner = backends.get(tensor, -1)
        if owner == -1:
            owner = backends.get(root, -1)
        if owner == -1:
            return False
        found, own = self.backends[backend], self.backends[owner]
        return found.memory == own.memory or (found.is_cpu and own.is_cpu)

    # ------------------------------------------------------------------ passes 5 and 6: splits and copies

    def cut(self, assigned: Assigned, before: Cut) -> tuple[Piece, Cut]:
        """Return the section in spans, with copies of what a span cannot read, and where that leaves the next one."""
        section, backends = assigned.bound.section, assigned.backends
        current, has_inputs = before.backend, before.has_inputs
        known: dict[object, Copy] = {}
        made = set(before.copies)
        spans = [Span(current, is_new=False)]
        for node in section.nodes:
            if node.op in VIEW_OPS:
                spans[-1].nodes.append((node, list(node.src)))
                continue
            backend = backends[node]
            if (
                current == -1
                or backend != current
                or (has_inputs and self._wants_other_weights(node, current, assigned))
            ):
                spans.append(Span(backend, is_new=True))
                current, has_inputs = backend, False
            sources: list[Tensor | Copy] = list(node.src)
            for place, source in enumerate(node.src):
                if backends[source] == current or self._reaches(source, current, backends, assigned.bound.homes):
                    continue
                copy = self._copy(assigned, source, current, known)
                if copy.key not in made:
                    made.add(copy.key)
                    spans[-1].copies.append(copy)
                    has_inputs = True
                sources[place] = copy
            spans[-1].nodes.append((node, sources))
        passed = (pass_on(key) for key in made)
        return Piece(assigned, tuple(spans), Counter(_read_keys(section, spans))), Cut(
            current, has_inputs, frozenset(key for key in passed if key)
        )

    def _wants_other_weights(self, node: Tensor, current: int, assigned: Assigned) -> bool:
        backends, homes = assigned.backends, assigned.bound.homes
        return any(
            source.is_weight and backends[source] != current and not self._reaches(source, current, backends, homes)
            for source in node.src
        )

    def _copy(self, assigned: Assigned, source: Tensor, backend: int, known: dict[object, Copy]) -> Copy:
        keys, homes = assigned.bound.section.keys, assigned.bound.homes
        name = keys.get(source, (source,))
        key: Key = ("copy", ("weight", homes[source]) if name[0] == "weight" else name, backend)
        copy = known.get(key)
        if copy is None:
            duplicate = Tensor("none", source.type, source.ne, source.nb, [], n_bytes=source.n_bytes)
            duplicate.padding_bytes = source.padding_bytes
            size = self.backends[backend].size_of(duplicate)
            root = source.root or source
            copy = known[key] = Copy(key, source, keys.get(root, root), backend, size)
        return copy


def _read_keys(section: Section, spans: Iterable[Span]) -> Iterator[object]:
    keys = section.keys
    for span in spans:
        for _, sources in span.nodes:
            for source in sources:
                if isinstance(source, Copy):
                    yield source.key
                else:
                    root = source.root or source
                    yield keys.get(root, root)
