"""Mirror of the scheduler in ggml-backend.cpp: the backend of each node, the splits, and their inputs (copies).

It runs the five passes of `ggml_backend_sched_split_graph`. ggml runs them on the whole graph; here they run on one
section after another. A section is consecutive nodes of the graph, mostly those of one layer, and refers to tensors by
index. The result depends only on the neighbouring sections and on the split that is open before the section
(`OpenSplit`), so callers can cache it. A split can begin in one section and end in another; its nodes in one section
are a `SplitPart`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

from msgspec import Struct

from engine.planning.memory.compute_graph.ggml.graph import INPLACE_OPS, Tensor
from engine.planning.memory.compute_graph.ggml.names import ON_CPU, Key, buft_at, pin_at
from engine.planning.memory.compute_graph.ggml.sections import Node, Section, are_same_layout
from engine.planning.memory.compute_graph.ggml.splits import (
    Copy,
    NodeAlloc,
    SplitPart,
    SplitSection,
    make_split_section,
)

SCHED_MAX_COPIES = 4
"""Number of copies of each input, of the graph or a split, in pipeline parallelism (`GGML_SCHED_MAX_COPIES`)."""
_IGNORE_WEIGHTS = ("rope", "flash_attn")
"""Operations whose backend does not follow from the weights that they read.

RoPE factors and attention sinks are small (`ggml_backend_sched_backend_id_from_cur`).
"""
HOST = "host"
"""Name of the buffer type of host memory. CPU backends can use it, and devices can copy from it."""


class Backend(Struct, frozen=True):
    """One backend of the scheduler. There is one for each entry of llama.cpp's device list; the CPU is the last.

    `buft`: buffer type of its results. If the list has a device several times, its backends have the same type.
    `is_cpu`: whether it is the CPU backend.
    `alignment`: alignment of tensors in this buffer type, in bytes.
    `supports_op`: function that returns whether the backend can compute a node; None if it can compute all.
    `unreadable`: buffer types that it cannot read without a copy (the inverse of `supports_buft`).
    `offload_op`: whether it computes nodes whose weight is in host memory.
    `alloc_size`: function that returns the bytes of a tensor in `buft`, before alignment (`get_alloc_size`).
    `reorders`: whether it changes the order of the nodes in a split (`graph_optimize` of Vulkan).
    `fuses`: whether it keeps the sources of fused expert nodes allocated (`graph_optimize` of CUDA).
    `max_buffer_bytes`: largest buffer (`get_max_size`); None for any size.
    """

    buft: str
    is_cpu: bool
    alignment: int
    supports_op: Callable[[Tensor], bool] | None
    unreadable: frozenset[str]
    offload_op: bool
    alloc_size: Callable[[Tensor], int]
    reorders: bool = False
    fuses: bool = False
    max_buffer_bytes: int | None = None

    def size_of(self, tensor: Tensor) -> int:
        """Return the bytes of `tensor` in the backend's buffer type, rounded up to its alignment."""
        return (self.alloc_size(tensor) + self.alignment - 1) & ~(self.alignment - 1)


class LayerDevice(Struct, frozen=True):
    """The device of a layer, as the scheduler sees it.

    `buft`: buffer type of the device.
    `pin`: index of the backend to which norms are pinned (`llama_context::graph_get_cb`); -1 for none.
    `kernel_class`: number of the device's kernel class, a group of devices that lack kernels for the same weights.
    """

    buft: str
    pin: int
    kernel_class: int


class Bound(Struct, frozen=True, eq=False):
    """A section of the graph with the devices of its layers, after pass 1 of the scheduler.

    A section is consecutive nodes, mostly those of one layer.

    `bufts`: buffer type of each weight and cache of the section, by tensor index; None for other tensors.
    `backend_ids`: backend index of each tensor; -1 if pass 1 assigns none.
    `fused`: (tensor index, buffer type of its layer's device) of fused operations (`Graph.fused`).
    `unsupported`: for each tensor, a bit mask of the backends that cannot compute it.
    """

    section: Section
    bufts: list[str | None]
    backend_ids: list[int]
    fused: tuple[tuple[int, str], ...]
    unsupported: list[int]


class Assigned(Struct, frozen=True, eq=False):
    """The backend of each tensor of a section, as pass 4 of `ggml_backend_sched_split_graph` leaves it.

    A section is consecutive nodes of the graph, mostly those of one layer.

    `backends`: backend index of each tensor that the section computes or reads.
    `involved`: indices of the backends that compute nodes of the section.
    """

    bound: Bound
    backends: list[int]
    involved: tuple[int, ...]


class OpenSplit(Struct, frozen=True):
    """The split to which the last nodes of a section belong, and which may continue in the next section.

    A section is consecutive nodes of the graph, mostly those of one layer.

    `backend`: index of the split's backend; -1 at the start of the graph.
    `has_inputs`: whether the split has inputs (copies).
    `copies`: names of all copies made so far in the graph.
    """

    backend: int = -1
    has_inputs: bool = False
    copies: frozenset[Key] = frozenset()


def offload_batch(node: Tensor) -> int:
    """Return the batch size of a node (usually in tokens), which a device compares with `GGML_OP_OFFLOAD_MIN_BATCH`.

    Mirrors `get_op_batch_size` in ggml-cuda.cu.
    """
    if node.op == "get_rows":
        return 0
    if node.op == "mul_mat":
        return node.ne[1]
    if node.op in ("mul_mat_id", "rope"):
        return node.ne[2]
    return node.ne[1] * node.ne[2] * node.ne[3]


class Scheduler:
    """Runs the five passes of `ggml_backend_sched_split_graph`, each on one section of the graph at a time.

    A section is consecutive nodes, mostly those of one layer. The last backend is the CPU.

    `offload_batch`: threshold of op offload, in tokens.
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        *,
        pipeline: bool,
        op_offload: bool,
        offload_batch: int,
    ) -> None:
        self.backends = tuple(backends)
        self.n_copies = SCHED_MAX_COPIES if pipeline else 1
        # `ggml_backend_sched_new` asserts that the last backend is the CPU. It has the lowest priority and computes
        # every operation.
        self._last = len(backends) - 1
        self._op_offload = op_offload and any(backend.offload_op for backend in backends)
        self._offload_batch = offload_batch
        self._repeats = len({backend.buft for backend in backends}) < len(backends)
        self._supports_op: dict[Callable[[Tensor], bool], int] = {}
        self._unreadable: dict[str, int] = {}
        for index, backend in enumerate(backends):
            if backend.supports_op is not None:
                # Devices of one kind share a function, so a node is checked once for each kind and not for each device.
                self._supports_op[backend.supports_op] = self._supports_op.get(backend.supports_op, 0) | 1 << index
            for buft in backend.unreadable:
                self._unreadable[buft] = self._unreadable.get(buft, 0) | 1 << index
        self._node_allocs_of: dict[tuple[Section, int], list[NodeAlloc]] = {}
        self._unsupported_ops: dict[Section, list[int]] = {}
        self._assignable: dict[Section, tuple[Node, ...]] = {}
        self._named: dict[Section, tuple[dict[Key, int], tuple[tuple[int, Key], ...]]] = {}
        self._backends_by_buft: dict[str, list[int]] = {}
        for index, backend in enumerate(backends):
            self._backends_by_buft.setdefault(HOST if backend.is_cpu else backend.buft, []).append(index)

    # ------------------------------------------------------------------ passes 1 to 4: assignment

    def bind(self, section: Section, devices: Mapping[int, LayerDevice]) -> Bound:
        """Run pass 1 on a graph section: assign a backend to nodes that are pinned, have a buffer, or read weights.

        `devices`: device of each layer that the section refers to, by the layer's number in the section.
        """
        named = {buft_at(number, device.kernel_class): device.buft for number, device in devices.items()}
        pins = {pin_at(number): device.pin for number, device in devices.items()}
        pins[ON_CPU] = self._last
        tensors = section.tensors
        bufts: list[str | None] = [None] * len(tensors)
        backend_ids = [-1] * len(tensors)
        for number in section.leafs:
            leaf = tensors[number]
            # Pass 1 for leafs: weights and caches go to the backend of their buffer, inputs to the last backend (the
            # CPU).
            if leaf.buft is not None:
                buft = bufts[number] = named.get(leaf.buft, leaf.buft)
                backend_ids[number] = self._backend_from_buffer(buft, 0)
            elif leaf.is_input:
                backend_ids[number] = self._last
        unsupported = self._find_unsupported(section, bufts)
        for node in self._assignable_nodes(section):
            number = node.number
            backend_id = tensors[number].backend
            backend_id = pins.get(backend_id, backend_id)
            if backend_id == -1:
                backend_id = self._backend_id_from_cur(section, number, node.weights, bufts, unsupported[number])
            if backend_id != -1:
                backend_ids[number] = backend_id
        fused = tuple((number, named.get(buft, buft)) for number, buft in section.fused)
        return Bound(section, bufts, backend_ids, fused, unsupported)

    def _find_unsupported(self, section: Section, bufts: Sequence[str | None]) -> list[int]:
        """Return a bit mask for each tensor of a section of the graph (the nodes of one layer).

        A set bit is a backend that cannot compute the tensor.
        """
        # Whether there is a kernel depends on shapes and types, so it is found once for a section. The buffers that a
        # node reads change from layout to layout.
        incapable = self._unsupported_ops.get(section.form)
        if incapable is None:
            incapable = self._unsupported_ops[section.form] = [0] * len(bufts)
            for node in section.nodes:
                for supports_op, backends in self._supports_op.items():
                    if not supports_op(section.tensors[node.number]):
                        incapable[node.number] |= backends
        blind = self._unreadable
        if not blind:
            return incapable
        # A copy, because all placements of the section share `incapable`.
        found = incapable.copy()
        for node in section.nodes:
            for source in node.sources:
                buft = bufts[source]
                if buft is not None:
                    found[node.number] |= blind.get(buft, 0)
        return found

    def _assignable_nodes(self, section: Section) -> tuple[Node, ...]:
        """Return the nodes of a section (the nodes of one layer) to which pass 1 of the scheduler may assign a backend.

        These are pinned nodes, views of weights or caches, and nodes that read weights.
        """
        found = self._assignable.get(section.form)
        if found is None:
            tensors, bases = section.tensors, section.bases
            found = self._assignable[section.form] = tuple(
                node
                for node in section.nodes
                if tensors[node.number].backend != -1
                or tensors[bases[node.number]].buft is not None
                or (node.weights and tensors[node.number].op not in _IGNORE_WEIGHTS)
            )
        return found

    def _supports_buft(self, backend: int, buft: str) -> bool:
        """Return whether a backend can use tensors in a buffer type without a copy (`ggml_backend_supports_buft`)."""
        found = self.backends[backend]
        return found.is_cpu if buft == HOST else found.buft == buft

    def _backend_from_buffer(self, buft: str, unsupported: int) -> int:
        """Return the first backend that can use `buft` and is not in the bit mask `unsupported`; -1 if there is none.

        Mirrors `ggml_backend_sched_backend_from_buffer`.
        """
        for index in self._backends_by_buft.get(buft, ()):
            if not unsupported >> index & 1:
                return index
        return -1

    def _backend_id_from_cur(
        self, section: Section, number: int, weights: Sequence[int], bufts: Sequence[str | None], unsupported: int
    ) -> int:
        """Return the backend index of a node by its own buffer type or by that of its first weight.

        -1 if neither the node nor a weight has a buffer type.

        Mirrors `ggml_backend_sched_backend_id_from_cur`.

        `number`: index of the node's result in the section (the nodes of one layer).
        `weights`: indices of the weights that the node reads.
        `bufts`: buffer type of each tensor in the section; None for tensors without one.
        `unsupported`: bit mask of the backends that cannot compute the node.
        """
        buft = bufts[section.bases[number]]
        if buft is not None:
            return self._backend_from_buffer(buft, unsupported)
        node = section.tensors[number]
        if node.op in _IGNORE_WEIGHTS:
            return -1
        buft = bufts[weights[0]] if weights else None
        if buft is None:
            return -1
        backend = self._backend_from_buffer(buft, unsupported)
        # `offload_op`: a weight in host memory is computed on the first device that wants it, if the batch is large
        # enough.
        op_offload = self._op_offload and backend == self._last and buft == HOST
        if op_offload and offload_batch(node) >= self._offload_batch:
            takers = (index for index in range(self._last) if self.backends[index].offload_op)
            return next((index for index in takers if not unsupported >> index & 1), backend)
        return backend

    def assign(self, bounds: Sequence[Bound], index: int, known: Mapping[Key, int]) -> tuple[Assigned, dict[Key, int]]:
        """Run passes 2 to 4 of the scheduler for the section `bounds[index]` (the nodes of one layer).

        Return the section with the backend of each tensor. Also return the backend index of each tensor whose backend
        the next section needs, by the tensor's name in that section.

        `bounds`: the section and its neighbours, because pass 2 expands backends from one section to the next.
        `known`: backend index of each tensor of earlier sections, by name.
        """
        # A neighbour may be the same section on another device, so each one has its own list of backends.
        rows = [(bound, bound.backend_ids.copy()) for bound in bounds]
        # Pass 2 expands GPU backends down and up first, without the CPU, and then the rest. So the CPU gets a node only
        # if weights are there, or if no GPU node is next to it.
        for skip in (self._last, -1):
            _expand(rows, skip)
            _expand(rows[::-1], skip, backwards=True)
        bound, backends = rows[index]
        section = bound.section
        for number, key in section.known_before:
            if key in known:
                backends[number] = known[key]
        self._assign_remaining(bound, backends)
        passed = {named: backends[number] for number, named in section.known_after if backends[number] != -1}
        # Only these backends can need copies. The cache key of pass 5 leaves out all others.
        involved = tuple(sorted({backends[number] for number in section.operations}))
        return Assigned(bound, backends, involved), passed

    def _assign_remaining(self, bound: Bound, backends: list[int]) -> None:
        """Run passes 3 and 4: assign a backend to all remaining tensors, and move nodes to backends of higher priority.

        `bound`: the section (the nodes of one layer) with the result of pass 1 of the scheduler.
        `backends`: backend index of each tensor, which is changed.
        """
        section, bases = bound.section, bound.section.bases
        for node in section.nodes:
            if node.is_view:
                continue
            if backends[node.number] == -1:
                self._assign_most_supported(node.number, node.sources, backends, bound)
            # Two backends share a buffer type only if a device is in the list twice; nothing can be upgraded otherwise.
            elif self._repeats:
                self._upgrade(node.number, node.sources, backends, bound)
        for node in section.nodes:
            # A view is always on the backend of its source. A source without a backend gets that of its reader.
            own = backends[node.number]
            if own == -1:
                own = backends[node.number] = backends[bases[node.number]]
            for source in node.sources:
                if backends[source] == -1:
                    backends[source] = own if bases[source] == source else backends[bases[source]]

    def _assign_most_supported(self, number: int, sources: Sequence[int], backends: list[int], bound: Bound) -> None:
        """Run pass 3 of the scheduler for a node without a backend: choose a backend for it.

        It is the backend that can read most of the node's sources without a copy.

        `number`, `sources`: indices of the node's result and of its sources.
        `backends`: backend index of each tensor in the section, which is changed.
        `bound`: the section (the nodes of one layer) with the result of pass 1 of the scheduler.
        """
        # Of backends that can read equally many sources the first one wins, which has the highest priority.
        most, unsupported, bases = -1, bound.unsupported[number], bound.section.bases
        for index in range(len(self.backends)):
            if unsupported >> index & 1:
                continue
            count = 0
            for source in sources:
                is_known = backends[source] != -1 or backends[bases[source]] != -1
                count += is_known and self._buffer_supported(source, index, backends, bound)
            if count > most:
                most, backends[number] = count, index

    def _upgrade(self, number: int, sources: Sequence[int], backends: list[int], bound: Bound) -> None:
        """Run pass 3 for a node that has a backend: move it to a suitable backend of higher priority, if there is one.

        A suitable backend has the same buffer type, supports the node, and reads all its sources without a copy.

        `number`, `sources`: indices of the node's result and of its sources.
        `backends`: backend index of each tensor in the section, which is changed.
        `bound`: the section (the nodes of one layer) with the result of pass 1 of the scheduler.
        """
        buft, unsupported = self.backends[backends[number]].buft, bound.unsupported[number]
        # Only backends of higher priority, which have lower indices.
        for index in range(backends[number]):
            able = self.backends[index].buft == buft and not unsupported >> index & 1
            if able and all(self._buffer_supported(source, index, backends, bound) for source in sources):
                backends[number] = index
                return

    def _buffer_supported(self, number: int, backend: int, backends: Sequence[int], bound: Bound) -> bool:
        """Return whether `backend` can read a tensor without a copy (`ggml_backend_sched_buffer_supported`).

        `number`: index of the tensor in the section.
        `backends`: backend index of each tensor.
        `bound`: the section (the nodes of one layer) with the result of pass 1 of the scheduler.
        """
        base = bound.section.bases[number]
        buft = bound.bufts[base]
        if buft is not None:
            return self._supports_buft(backend, buft)
        owner = backends[number]
        if owner == -1:
            owner = backends[base]
        if owner == -1:
            return False
        found, own = self.backends[backend], self.backends[owner]
        return found.buft == own.buft or (found.is_cpu and own.is_cpu)

    # ------------------------------------------------------------------ passes 5 and 6: splits and copies

    def split_graph(self, assigned: Assigned, before: OpenSplit) -> tuple[SplitSection, OpenSplit]:
        """Run pass 5 of the scheduler on a section of the graph: divide its nodes into splits.

        A split is consecutive nodes on one backend. Sources that the backend cannot read are copied.

        Return the divided section, and the split that is open at its end.

        `before`: the split that is open at the section's start.
        """
        bound, backends = assigned.bound, assigned.backends
        section, bases = bound.section, bound.section.bases
        current, has_inputs = before.backend, before.has_inputs
        # A tensor is copied once for each backend, not once for each split: `tensor_id_copy` holds for the whole graph.
        made = set(before.copies)
        named, passed = self._names(section)
        index_of = named.copy()
        parts, use_counts = [SplitPart(current, is_new=False)], [*section.use_counts]
        rows, node_allocs = self._node_allocs(section, current), parts[-1].node_allocs
        for number, node in enumerate(section.nodes):
            if node.is_view:
                node_allocs.append(rows[number])
                continue
            backend = backends[node.number]
            if (
                # The second reason for a new split: memory of an offloaded weight can be reused after it. Only a split
                # that already has inputs needs that.
                current == -1
                or backend != current
                or (has_inputs and node.weights and self._need_new_split(node.weights, current, assigned))
            ):
                parts.append(SplitPart(backend, is_new=True))
                current, has_inputs = backend, False
                rows, node_allocs = self._node_allocs(section, current), parts[-1].node_allocs
            indices: list[int] | None = None
            for position, source in enumerate(node.sources):
                if backends[source] == current or self._buffer_supported(source, current, backends, bound):
                    continue
                key = _copy_key(bound, source, current)
                index = index_of.setdefault(key, len(use_counts))
                if index == len(use_counts):
                    use_counts.append(0)
                if key not in made:
                    made.add(key)
                    base = bases[source]
                    copy = Copy(key, section.names[base], current, self._copy_bytes(section.tensors[source], current))
                    parts[-1].copies.append((copy, base, index))
                    has_inputs = True
                indices = indices or [*node.bases]
                # From here on the node reads the copy and not the original.
                use_counts[indices[position]] -= 1
                use_counts[index] += 1
                indices[position] = index
            node_allocs.append(
                rows[number] if indices is None else (*rows[number][:2], _reusable(section, node, indices), (*indices,))
            )
        copies = (section.name_after(key) for key in made if section.is_known_after(key))
        passed += _passed(section, islice(index_of.items(), len(named), None))
        return (
            make_split_section(section, tuple(parts), use_counts, index_of, passed),
            OpenSplit(current, has_inputs, frozenset([key for key in copies if key is not None])),
        )

    def _names(self, section: Section) -> tuple[dict[Key, int], tuple[tuple[int, Key], ...]]:
        """Return the tensors of a section (the nodes of one layer), and those that the next section may read.

        The first value maps the name of each tensor in this section to its index. The second value has pairs (index,
        name in the next section), without copies for other backends.
        """
        found = self._named.get(section.form)
        if found is None:
            bases = section.bases
            indices = {name: number for number, name in enumerate(section.names) if name and bases[number] == number}
            found = self._named[section.form] = indices, _passed(section, indices.items())
        return found

    def _node_allocs(self, section: Section, backend: int) -> list[NodeAlloc]:
        """Return size and sources of each node of a section (the nodes of one layer), for the allocator (`NodeAlloc`).

        The values are valid for nodes that run on `backend` and read no copies. Results are cached.
        """
        found = self._node_allocs_of.get((section.form, backend))
        if found is None:
            size_of, tensors = self.backends[backend].size_of, section.tensors
            found = self._node_allocs_of[section.form, backend] = [
                (node.number, size_of(tensors[node.number]), node.reusable, node.bases)
                if node.is_placed
                else (-1, 0, (), node.bases)
                for node in section.nodes
            ]
        return found

    def _need_new_split(self, weights: Sequence[int], current: int, assigned: Assigned) -> bool:
        """Return whether one of these weights must be copied to the backend `current` (`need_new_split`).

        `weights`: indices of the weights that a node reads.
        `current`: index of the open split's backend.
        `assigned`: the section (the nodes of one layer), with the backend of each tensor.
        """
        backends, bound = assigned.backends, assigned.bound
        return any(
            backends[weight] != current and not self._buffer_supported(weight, current, backends, bound)
            for weight in weights
        )

    def _copy_bytes(self, original: Tensor, backend: int) -> int:
        """Return the bytes of a copy of `original` in the memory of a backend (`ggml_dup_tensor_layout`)."""
        copy = Tensor("none", original.type, original.ne, original.nb, [], n_bytes=original.n_bytes)
        # A copy of a quantised weight is padded like the weight, because `get_alloc_size` sees type and shape only.
        copy.padding_bytes = original.padding_bytes
        return self.backends[backend].size_of(copy)


def _expand(rows: Sequence[tuple[Bound, list[int]]], skip: int, *, backwards: bool = False) -> None:
    """Run one sweep of pass 2: give each node without a backend the backend of the node before it.

    `rows`: neighbouring sections (the nodes of one layer each) with the backend index of each tensor, which is changed.
    `skip`: index of the backend that is not passed on; -1 for none.
    `backwards`: whether to sweep from the last node to the first, and pass backends from a node to the one before.
    """
    current = -1
    for bound, backends in rows:
        operations, unsupported = bound.section.operations, bound.unsupported
        for number in reversed(operations) if backwards else operations:
            found = backends[number]
            if found != -1:
                # A node of the skipped backend ends the expansion.
                current = -1 if found == skip else found
            # An unsupported node is left for pass 3, and the expansion goes on after it
            # (`ggml_backend_sched_set_if_supported`).
            elif current != -1 and not unsupported[number] >> current & 1:
                backends[number] = current


def _passed(section: Section, indices: Iterable[tuple[Key, int]]) -> tuple[tuple[int, Key], ...]:
    """Return the tensors of `indices` that the next section (the nodes of the next layer) may read.

    Each result is (index in this section, name in the next section).

    `indices`: (name, index) of each tensor in this section.
    """
    following = ((index, section.name_after(name)) for name, index in indices)
    return tuple([(index, name) for index, name in following if name is not None])


def _reusable(section: Section, node: Node, indices: Sequence[int]) -> tuple[int, ...]:
    """Return the indices of the sources whose memory the node's result may reuse.

    A source may be a copy from another backend, but not a view.

    `indices`: for each source, the index of the tensor whose memory the node reads: the copy of the source, or the
    source's `view_src`, or the source itself.
    """
    tensors = section.tensors
    result = tensors[node.number]
    if not node.is_placed or result.op not in INPLACE_OPS:
        return ()
    return tuple(
        index
        for source, index in zip(node.sources, indices, strict=True)
        if (index >= len(tensors) or section.bases[index] == source) and are_same_layout(tensors[source], result)
    )


def _copy_key(bound: Bound, source: int, backend: int) -> Key:
    """Return the name of a tensor's copy in the memory of `backend`.

    A section is mostly the nodes of one layer. If only this section can read the tensor, the name of the copy contains
    the tensor's index.

    `bound`: the section that reads the tensor. `source`: index of the tensor in this section.
    """
    name = bound.section.names[source] or (None, source)
    return ("copy", ("weight", bound.bufts[source]) if name[0] == "weight" else name, backend)
