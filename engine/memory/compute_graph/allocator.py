"""The engine's graph allocator without memory: offsets in one buffer per memory, and how large each has to be.

Mirrors the rules of ggml-alloc: leaves first, results in place of a source where the operation allows, the best fitting
free block otherwise, and everything but outputs given back after its last reader.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.memory.compute_graph.graph import INPLACE_OPS, Tensor

_ENDLESS = 1 << 62


class Buffer:
    """Free blocks of a buffer that may grow without end; `size_bytes` is the highest end that was ever taken."""

    def __init__(self, alignment: int, alloc_size: Callable[[Tensor], int]) -> None:
        self._round = alignment - 1
        self._alloc_size = alloc_size
        self._offsets = [0]
        self._sizes = [_ENDLESS]
        self.size_bytes = 0

    def size_of(self, tensor: Tensor) -> int:
        """Return what `tensor` takes here, rounded up to the alignment."""
        return (self._alloc_size(tensor) + self._round) & ~self._round

    def take(self, size: int) -> int:
        """Return the offset of a new block: the smallest free one that is large enough, the end if there is none."""
        sizes = self._sizes
        last = len(sizes) - 1
        best, best_size = last, _ENDLESS
        for place in range(last):
            free = sizes[place]
            if size <= free <= best_size:
                best, best_size = place, free
        offset = self._offsets[best]
        if sizes[best] == size:
            del self._offsets[best], sizes[best]
        else:
            self._offsets[best] = offset + size
            sizes[best] -= size
        self.size_bytes = max(self.size_bytes, offset + size)
        return offset

    def give_back(self, offset: int, size: int) -> None:
        """Return a block. It is joined with the first neighbour found and that one's other neighbour, which leaves
        gaps where blocks of no size lie between, as the engine's does."""
        offsets, sizes = self._offsets, self._sizes
        end = offset + size
        for place, start in enumerate(offsets):
            if start + sizes[place] == offset:
                sizes[place] += size
                if place + 1 < len(offsets) and end == offsets[place + 1]:
                    sizes[place] += sizes[place + 1]
                    del offsets[place + 1], sizes[place + 1]
                return
            if end == start:
                offsets[place] = offset
                sizes[place] += size
                if place > 0 and offsets[place - 1] + sizes[place - 1] == offset:
                    sizes[place - 1] += sizes[place]
                    del offsets[place], sizes[place]
                return
        # Blocks of no size may have left the list out of order: it is searched from the start, not halved.
        place = next((place for place, start in enumerate(offsets) if start >= offset), len(offsets))
        offsets.insert(place, offset)
        sizes.insert(place, size)


class Allocation:
    """Places the tensors of one graph; `buffers` has one entry per backend, shared where the memory is."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._buffers = buffers

    def run(self, nodes: Sequence[tuple[Tensor, int]], leafs: Sequence[tuple[Tensor, int]]) -> None:
        """Place everything; each tensor comes with the backend that it belongs to."""
        place, free = self._place, self._free
        for leaf, backend in leafs:
            place(leaf, backend)
        for node, backend in nodes:
            if node.root is not None and node.op != "none":
                node.root.n_views += 1
            if node.is_input:
                place(node, backend)
            for source in node.src:
                source.n_children += 1
                if source.is_input:
                    place(source, backend)
        for node, backend in nodes:
            place(node, backend)
            for source in node.src:
                source.n_children -= 1
                if source.n_children == 0 and source.n_views == 0:
                    root = source.root
                    if root is None:
                        if source.allocated:
                            free(source)
                        continue
                    root.n_views -= 1
                    if root.n_views == 0 and root.n_children == 0 and root.allocated:
                        free(root)

    def _place(self, tensor: Tensor, backend: int) -> None:
        if tensor.allocated or tensor.home is not None or tensor.root is not None:
            return
        tensor.allocated = True
        if tensor.op in INPLACE_OPS and self._reuse(tensor):
            return
        buffer = self._buffers[backend]
        tensor.where = backend
        tensor.address = buffer.take(buffer.size_of(tensor))

    def _reuse(self, tensor: Tensor) -> bool:
        """Put `tensor` in the place of a source of the same layout that nothing else reads; views do not qualify."""
        for source in tensor.src:
            if not source.allocated or source.is_output or source.n_children != 1 or source.n_views != 0:
                continue
            if source.type != tensor.type or source.ne != tensor.ne or source.nb != tensor.nb:
                continue
            source.allocated = False
            buffer = self._buffers[source.where]
            tensor.where, tensor.address = source.where, source.address
            whole, used = buffer.size_of(source), buffer.size_of(tensor)
            if whole > used:
                buffer.give_back(source.address + used, whole - used)
            return True
        return False

    def _free(self, tensor: Tensor) -> None:
        if tensor.is_output:
            return
        buffer = self._buffers[tensor.where]
        buffer.give_back(tensor.address, buffer.size_of(tensor))
        tensor.allocated = False
