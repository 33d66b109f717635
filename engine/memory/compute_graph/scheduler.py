"""Which backend computes what, where the graph is cut, and what is copied over the cuts (ggml's scheduler)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.memory.compute_graph.allocator import Allocation, Buffer
from engine.memory.compute_graph.graph import VIEW_OPS, Graph, Tensor

PIPELINE_COPIES = 4
"""`GGML_SCHED_MAX_COPIES`: under pipeline parallelism inputs of the graph and of its parts are kept this often."""
HOST = "host"
"""Memory of host weights and caches that every CPU backend can use and that devices may copy from."""


@dataclass(frozen=True, slots=True)
class Backend:
    """One entry of the scheduler. `memory` names where its results go; entries of one device share it.

    `supports`: whether an operation can run there; `offloads`: whether it takes over an operation whose weight is on
    the host, given the tokens of the batch; `alloc_size`: what a tensor takes in its memory.
    """

    memory: str
    is_cpu: bool
    alignment: int
    supports: Callable[[Tensor], bool]
    offloads: bool
    alloc_size: Callable[[Tensor], int]


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
    """Assigns, splits and allocates one graph. The last backend is the CPU."""

    def __init__(self, backends: Sequence[Backend], *, pipeline: bool, op_offload: bool, offload_batch: int) -> None:
        self._backends = backends
        self._last = len(backends) - 1
        self._copies = PIPELINE_COPIES if pipeline else 1
        self._op_offload = op_offload and any(backend.offloads for backend in backends)
        self._offload_batch = offload_batch
        self._repeats = len({backend.memory for backend in backends}) < len(backends)
        self._home_backends: dict[str, int] = {}

    def buffer_sizes(self, graph: Graph) -> dict[str, int]:
        """Return the bytes of the compute buffer in each memory."""
        self.assign(graph)
        return self.assigned_sizes(graph)

    def assigned_sizes(self, graph: Graph) -> dict[str, int]:
        """Return the same for a graph whose nodes have their backends; it can be asked for once."""
        nodes, leafs = self._split(graph)
        shared: dict[str, Buffer] = {}
        buffers = [
            shared.setdefault(backend.memory, Buffer(backend.alignment, backend.alloc_size))
            for backend in self._backends
        ]
        Allocation(buffers).run(nodes, leafs)
        return {memory: buffer.size_bytes for memory, buffer in shared.items()}

    # ------------------------------------------------------------------ passes 1 to 4: assignment

    def _holds(self, backend: int, home: str) -> bool:
        found = self._backends[backend]
        return found.is_cpu if home == HOST else found.memory == home

    def _from_home(self, tensor: Tensor, node: Tensor) -> int:
        """Return the first backend that can use the memory of `tensor` and compute `node`, -1 if there is none."""
        root = tensor.root or tensor
        if root.home is None:
            return -1
        for index, backend in enumerate(self._backends):
            if self._holds(index, root.home) and backend.supports(node):
                return index
        return -1

    def _natural(self, node: Tensor) -> int:
        home = (node.root or node).home
        if home is not None:
            return self._from_home(node, node)
        if node.is_input:
            return self._last
        if node.op in ("rope", "flash_attn"):
            return -1
        weight = next((source for source in node.src if source.is_weight), None)
        if weight is None:
            return -1
        backend = self._from_home(weight, node)
        lends = self._op_offload and backend == self._last and weight.home == HOST
        if lends and offload_batch(node) >= self._offload_batch:
            takers = (index for index in range(self._last) if self._backends[index].offloads)
            return next((index for index in takers if self._backends[index].supports(node)), backend)
        return backend

    def assign(self, graph: Graph) -> None:
        """Give every node a backend."""
        for leaf in graph.leafs:
            if leaf.backend == -1:
                leaf.backend = self._natural(leaf)
        for node in graph.nodes:
            if node.backend == -1:
                node.backend = self._natural(node)
        nodes = [node for node in graph.nodes if node.op not in VIEW_OPS]
        self._expand(nodes, skip=self._last)
        self._expand(nodes[::-1], skip=self._last)
        self._expand(nodes, skip=-1)
        self._expand(nodes[::-1], skip=-1)
        for node in nodes:
            if node.backend == -1:
                self._assign_best(node)
            elif self._repeats:
                self._upgrade(node)
        for node in graph.nodes:
            if node.backend == -1 and node.root is not None:
                node.backend = node.root.backend
            for source in node.src:
                if source.backend == -1:
                    source.backend = source.root.backend if source.root is not None else node.backend

    def _expand(self, nodes: Sequence[Tensor], *, skip: int) -> None:
        current = -1
        backends = self._backends
        for node in nodes:
            if node.backend != -1:
                current = -1 if node.backend == skip else node.backend
            elif current != -1 and backends[current].supports(node):
                node.backend = current

    def _assign_best(self, node: Tensor) -> None:
        most = -1
        for index, backend in enumerate(self._backends):
            if not backend.supports(node):
                continue
            count = sum(
                (source.backend != -1 or (source.root is not None and source.root.backend != -1))
                and self._reaches(source, index)
                for source in node.src
            )
            if count > most:
                most, node.backend = count, index

    def _upgrade(self, node: Tensor) -> None:
        memory = self._backends[node.backend].memory
        for index in range(node.backend):
            backend = self._backends[index]
            able = backend.memory == memory and backend.supports(node)
            if able and all(self._reaches(source, index) for source in node.src):
                node.backend = index
                return

    def _reaches(self, tensor: Tensor, backend: int) -> bool:
        """Return whether `backend` can read `tensor` where it is."""
        root = tensor.root or tensor
        if root.home is not None:
            return self._holds(backend, root.home)
        owner = tensor.backend if tensor.backend != -1 else root.backend
        if owner == -1:
            return False
        found, own = self._backends[backend], self._backends[owner]
        return found.memory == own.memory or (found.is_cpu and own.is_cpu)

    # ------------------------------------------------------------------ passes 5 and 6: splits and copies

    def _split(self, graph: Graph) -> tuple[list[tuple[Tensor, int]], list[tuple[Tensor, int]]]:
        """Return nodes and leaves in the order of allocation, copies of inputs among them."""
        ordered: list[tuple[Tensor, int]] = []
        leafs: list[tuple[Tensor, int]] = []
        pending: list[Tensor] = []
        split_inputs: list[tuple[Tensor, Tensor]] = []
        current = -1
        n_inputs = 0

        def close() -> None:
            """Put what the finished split needs in front of its nodes."""
            for original, copy in split_inputs:
                dependency = Tensor("none", "f32", (0, 0, 0, 0), (0, 0, 0, 0), [original], original.root or original)
                ordered.append((dependency, original.backend))
                ordered.append((copy, current))
            ordered.extend((node, node.backend) for node in pending)
            pending.clear()

        copied: list[tuple[Tensor, int]] = []
        for node in graph.nodes:
            if node.op in VIEW_OPS:
                pending.append(node)
                continue
            backend = node.backend
            if current == -1:
                current = backend
            starts = backend != current
            if not starts and n_inputs:
                starts = any(
                    source.is_weight and source.backend != current and not self._reaches(source, current)
                    for source in node.src
                )
            if starts:
                close()
                split_inputs, n_inputs, current = [], 0, backend
            for place, source in enumerate(node.src):
                if source.backend == current or self._reaches(source, current):
                    continue
                copy = None if source.copies is None else source.copies.get(current)
                if copy is None:
                    copy = self._copy(source, current, split_inputs, copied)
                    n_inputs += 1
                node.src[place] = copy
            pending.append(node)
        close()
        if self._copies > 1:
            for leaf in graph.leafs:
                if not leaf.is_input:
                    continue
                leaf.is_output = True
                leafs.append((leaf, leaf.backend))
                leafs.extend((_duplicate(leaf, kept=True), leaf.backend) for _ in range(self._copies - 1))
            leafs.extend(copied)
        leafs.extend((leaf, leaf.backend) for leaf in graph.leafs)
        return ordered, leafs

    def _copy(
        self, source: Tensor, backend: int, split_inputs: list[tuple[Tensor, Tensor]], copied: list[tuple[Tensor, int]]
    ) -> Tensor:
        kept = self._copies > 1
        copies = [_duplicate(source, kept=kept) for _ in range(self._copies)]
        if source.copies is None:
            source.copies = {}
        source.copies[backend] = copies[0]
        split_inputs.append((source, copies[0]))
        copied.extend((copy, backend) for copy in copies)
        return copies[0]


def _duplicate(source: Tensor, *, kept: bool) -> Tensor:
    copy = Tensor("none", source.type, source.ne, source.nb, [], n_bytes=source.n_bytes)
    copy.is_input = copy.is_output = kept
    return copy
