"""Mirror of ggml-alloc.c without memory: the offset of each tensor in its buffer, and the size of each compute buffer.

`DynTallocr` mirrors `ggml_dyn_tallocr` with one chunk, `ChunkedTallocr` with several. `Gallocr` mirrors
`ggml_gallocr_alloc_graph_impl`: inputs come first, a result reuses the memory of a parent if the operation allows it
(`ggml_gallocr_allocate_node`), and a tensor is freed after its last use unless it is an output.

ggml allocates a whole graph. `Gallocr` allocates one section after another; a section is consecutive nodes of the
graph, mostly those of one layer. The result depends only on the section, on the buffers before it (`GallocrState`), and
on the tensors that later sections read (`LiveOut`). So callers can cache it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import Struct

from engine.base.values import replace
from engine.planning.memory.compute_graph.ggml.names import EARLY, Key, is_early, is_shared
from engine.planning.memory.compute_graph.ggml.scheduler import Backend
from engine.planning.memory.compute_graph.ggml.sections import DistantReadError
from engine.planning.memory.compute_graph.ggml.splits import Copy, NodeAlloc, SplitSection

_ENDLESS = 1 << 62
"""Bytes of the free block at the end of an empty buffer; more than any graph needs."""


class DynTallocr:
    """Free blocks of one buffer, sorted by offset (`ggml_dyn_tallocr`).

    `size_bytes`: highest end of an allocated block so far (`max_size` of a `tallocr_chunk`).

    Offsets, sizes and ends are three parallel lists, because `min` and `index` on a list of integers are faster than a
    loop over blocks. The search runs for every tensor of every graph.
    """

    __slots__ = ("_ends", "offsets", "size_bytes", "sizes")

    def __init__(self, offsets: Sequence[int] = (0,), sizes: Sequence[int] = (_ENDLESS,), size_bytes: int = 0) -> None:
        self.offsets = list(offsets)
        self.sizes = list(sizes)
        self._ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
        self.size_bytes = size_bytes

    def alloc(self, size: int) -> int:
        """Allocate a block of `size` bytes and return its offset (`ggml_dyn_tallocr_alloc`).

        The block is in the smallest gap that is large enough. If there is none, it is at the end, and the buffer grows.
        """
        sizes = self.sizes
        # The last block is the free space after everything. ggml leaves it out of its search for the best fit
        # (`n_free_blocks - 1`), because taking it may grow the buffer.
        best = last = len(sizes) - 1
        if last:
            # ggml compares with `<=`, so the last of several blocks of the same size wins.
            backwards = sizes[last - 1 :: -1]
            fitting = [free for free in backwards if free >= size]
            if fitting:
                best -= 1 + backwards.index(min(fitting))
        offset = self.offsets[best]
        # An exact fit leaves an empty block, which ggml removes at once (`ggml_dyn_tallocr_remove_block`).
        if sizes[best] == size:
            del self.offsets[best], sizes[best], self._ends[best]
        else:
            self.offsets[best] = offset + size
            sizes[best] -= size
        self.size_bytes = max(self.size_bytes, offset + size)
        return offset

    def free_bytes(self, offset: int, size: int) -> None:
        """Free a block and merge it with free neighbours (`ggml_dyn_tallocr_free_bytes`)."""
        offsets, sizes, ends = self.offsets, self.sizes, self._ends
        end = offset + size
        # `in` and `index` scan the list in C. Two such scans are faster than one loop in Python.
        before = ends.index(offset) if offset in ends else len(ends)
        following = offsets.index(end) if end in offsets else len(ends)
        # ggml takes the first block of the list that touches, at whichever side, then merges on that block's other
        # side. Blocks of size 0 in between stop the second merge; the same gaps remain here.
        if before <= following and before < len(ends):
            sizes[before] += size
            ends[before] = end
            following = before + 1
            if following < len(ends) and end == offsets[following]:
                sizes[before] += sizes[following]
                ends[before] = ends[following]
                del offsets[following], sizes[following], ends[following]
            return
        if following < len(ends):
            offsets[following] = offset
            sizes[following] += size
            return
        # Blocks of size 0 can leave the list unsorted, as in ggml. So search from the start, not by bisection.
        index = next((index for index, start in enumerate(offsets) if start >= offset), len(offsets))
        offsets.insert(index, offset)
        sizes.insert(index, size)
        ends.insert(index, end)


class Size(NamedTuple):
    """Size of a compute buffer, which may consist of several backend buffers.

    `size_bytes`: bytes of all backend buffers together.
    `pipeline_bytes`: part of `size_bytes` that only pipeline parallelism needs, for additional copies of tensors.
    `n_chunks`: number of backend buffers.
    """

    size_bytes: int
    pipeline_bytes: int
    n_chunks: int = 1


TensorAlloc = tuple[Key, str, int, int]
"""A tensor in a buffer: (name, buffer type, offset, size in bytes)."""


class GallocrState(Struct, frozen=True):
    """The allocator's buffers between two sections of a graph (consecutive nodes, mostly one layer's).

    `buffers`: (buffer type, offsets of the free blocks, sizes of the free blocks) of each buffer.
    `held`: allocated tensors that a later section reads.
    """

    buffers: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    held: tuple[TensorAlloc, ...] = ()


class BufferSizes(Struct, frozen=True):
    """Sizes that the compute buffers need for one section of a graph (consecutive nodes, mostly one layer's).

    Each field has pairs (buffer type, bytes). The size of a buffer is the largest of its `ends` in all sections, plus
    the sum of its `kept`.

    `ends`: highest end of a block that the section allocates in the buffer, as offset.
    `kept`: bytes of inputs and copies that stay allocated for the whole graph, because of pipeline parallelism.
    """

    ends: tuple[tuple[str, int], ...] = ()
    kept: tuple[tuple[str, int], ...] = ()


class LiveOut(Struct, frozen=True):
    """Tensors that must stay allocated at the end of a section, because later sections of the graph read them.

    A section is consecutive nodes, mostly those of one layer.

    `copies`: inputs that are copied at the start of the current split, but that only later sections read.
    `read`: names of the tensors that later sections read.
    `bufts`: buffer types in which later sections allocate.
    """

    copies: tuple[Copy, ...] = ()
    read: frozenset[Key] = frozenset()
    bufts: frozenset[str] = frozenset()


def live_out_before(split_section: SplitSection, live_out: LiveOut, backends: Sequence[Backend]) -> LiveOut:
    """Return the tensors that must be allocated before a section of the graph: it or a later section reads them.

    A section is consecutive nodes, mostly those of one layer.

    `live_out`: tensors that must stay allocated after the section.
    """
    begins, section = len(split_section.parts) > 1, split_section.section
    passing = [key for key in live_out.read if is_shared(key) or (is_early(key) and key not in split_section.indices)]
    bases = [copy.base_key for copy in live_out.copies if copy.base_key is not None]
    # The open split begins in this section. So its copies for later sections are made here, and their originals are
    # read here.
    if begins:
        passing += bases
    if split_section.early:
        # A node that Vulkan computed early may be read only after this section.
        read = {split_section.indices[key] for key in (*live_out.read, *bases) if key in split_section.indices}
        passing += [(0, EARLY, index) for index in split_section.early if index in read]
    before = [section.name_before(key) for key in passing if section.is_known_before(key)]
    here = split_section.parts[0].copies
    copies = [_copy_before(split_section, copy) for copy, _, _ in here]
    # A copy is still needed if not all of its readers were computed early.
    still = [
        each.key
        for each, (copy, _, own) in zip(copies, here, strict=True)
        if split_section.use_counts[own] or copy.key in live_out.read
    ]
    # The split began earlier. A section before this one has to make the copies that later sections need.
    if not begins:
        passed = [_copy_before(split_section, copy) for copy in live_out.copies]
        copies += passed
        still += [each.key for each, copy in zip(passed, live_out.copies, strict=True) if copy.key in live_out.read]
    known = split_section.names_before.union([key for key in before if key is not None], still)
    bufts = {backends[part.backend].buft for part in split_section.parts if part.backend >= 0}
    return LiveOut(tuple(copies), known, live_out.bufts | bufts)


def _copy_before(split_section: SplitSection, copy: Copy) -> Copy:
    """Return `copy` with the names that the previous section uses for the copy and for the copied tensor.

    A section is mostly the nodes of one layer, and has its own names for tensors of other sections.

    Raises:
        DistantReadError: the previous section has no such name, because the tensor comes from a more distant layer.
    """
    key = split_section.section.name_before(copy.key)
    base_key = None if copy.base_key is None else split_section.section.name_before(copy.base_key)
    if key is None or base_key is None:
        raise DistantReadError
    return copy if key == copy.key else replace(copy, key=key, base_key=base_key)


Leaf = tuple[Key | None, bool, str, int]
"""A leaf tensor that the allocator places: (name, whether it is an input, buffer type, size in bytes)."""


def start(leafs: Iterable[Leaf], n_copies: int) -> tuple[GallocrState, BufferSizes]:
    """Allocate the leaf tensors of the whole graph in new buffers; return the buffers and their sizes.

    `n_copies`: copies of each input for pipeline parallelism; 1 without it.
    """
    buffers: dict[str, DynTallocr] = {}
    kept: Counter[str] = Counter()
    held = start_in(leafs, n_copies, buffers, kept)
    return _state_of(buffers, held), _sizes_of(buffers, kept)


def start_in(
    leafs: Iterable[Leaf], n_copies: int, buffers: dict[str, DynTallocr], kept: Counter[str]
) -> list[TensorAlloc]:
    """Allocate the leaf tensors of the whole graph in `buffers`, and return those that nodes read.

    With pipeline parallelism inputs are not allocated; the bytes of their copies are added to `kept`.
    """
    held: list[TensorAlloc] = []
    for key, is_input, buft, size in leafs:
        # With a pipeline the scheduler marks inputs and their copies as outputs (pass 5 of
        # `ggml_backend_sched_split_graph`), so gallocr never frees them.
        if n_copies > 1 and is_input:
            kept[buft] += size * n_copies
            continue
        offset = buffers.setdefault(buft, DynTallocr()).alloc(size)
        if key is not None:
            held.append((key, buft, offset, size))
    return held


def _state_of(buffers: dict[str, DynTallocr], held: Sequence[TensorAlloc]) -> GallocrState:
    """Return a `GallocrState` with the free blocks of these buffers and the tensors `held`."""
    return GallocrState(
        tuple([(buft, tuple(found.offsets), tuple(found.sizes)) for buft, found in buffers.items()]), tuple(held)
    )


def _sizes_of(buffers: dict[str, DynTallocr], kept: dict[str, int]) -> BufferSizes:
    """Return the highest offset at which a block ends, for each of these buffers, and the bytes `kept`.

    `kept`: bytes that stay allocated for the whole graph, by buffer type.
    """
    return BufferSizes(tuple([(buft, found.size_bytes) for buft, found in buffers.items()]), tuple(kept.items()))


def joined(all_sizes: Sequence[BufferSizes]) -> BufferSizes:
    """Return the buffer sizes that several sections of the graph need together.

    A section is mostly the nodes of one layer. For each buffer type, `ends` is the highest end of a block in any
    section, and `kept` is the sum over the sections of the bytes that stay allocated for the whole graph.
    """
    ends: dict[str, int] = {}
    kept: Counter[str] = Counter()
    for sizes in all_sizes:
        for buft, end in sizes.ends:
            ends[buft] = max(ends.get(buft, 0), end)
        for buft, size in sizes.kept:
            kept[buft] += size
    return BufferSizes(tuple(ends.items()), tuple(kept.items()))


class Gallocr:
    """Allocates the nodes of a graph section by section, as `ggml_gallocr` does for the whole graph.

    A section is consecutive nodes, mostly those of one layer.

    `n_copies`: copies of each input for pipeline parallelism (`GGML_SCHED_MAX_COPIES`), else 1.
    """

    def __init__(self, backends: Sequence[Backend], n_copies: int) -> None:
        self._backends = backends
        self._n_copies = n_copies

    def fill(
        self, split_section: SplitSection, live_out: LiveOut, before: GallocrState
    ) -> tuple[GallocrState, BufferSizes]:
        """Allocate the tensors of a section of the graph (mostly the nodes of one layer).

        Return the state of the buffers after the section, and the buffer sizes that the section needs.

        `live_out`: tensors that must stay allocated after the section.
        `before`: state of the buffers before the section.
        """
        buffers = {buft: DynTallocr(offsets, sizes) for buft, offsets, sizes in before.buffers}
        step = _SectionAlloc(self._backends, self._n_copies, split_section, live_out, before.held, buffers)
        step.run(split_section)
        return step.finish()

    def allocate_into(
        self,
        split_section: SplitSection,
        live_out: LiveOut,
        held: Sequence[TensorAlloc],
        buffers: dict[str, DynTallocr],
    ) -> Sequence[TensorAlloc]:
        """Allocate the tensors of a section of the graph (mostly the nodes of one layer) in `buffers`.

        Return the allocated tensors that later sections read.

        `live_out`: tensors that must stay allocated after the section.
        `held`: tensors in `buffers` that earlier sections allocated.
        """
        step = _SectionAlloc(self._backends, self._n_copies, split_section, live_out, held, buffers)
        step.run(split_section)
        return step.finish()[0].held


class _SectionAlloc:
    """Allocates the tensors of one section of the graph. A section is consecutive nodes, mostly those of one layer.

    Each tensor has an index. The tensors of the section have the indices of its `SplitSection` (the section, divided
    by the scheduler). Some tensors of earlier sections are read only by later sections; they get the next indices.

    `_blocks`: memory of the tensor with each index, as (buffer type, offset, size); None: the tensor has no memory.
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        n_copies: int,
        split_section: SplitSection,
        live_out: LiveOut,
        held: Sequence[TensorAlloc],
        buffers: dict[str, DynTallocr],
    ) -> None:
        self._backends = backends
        self._n_copies = n_copies
        self._split_section = split_section
        self._live_out = live_out
        self._buffers = buffers
        self._kept: dict[str, int] = {}
        self._use_counts = use_counts = [*split_section.use_counts]
        self._indices = split_section.indices
        self._passed = [*split_section.passed]
        self._blocks: list[tuple[str, int, int] | None] = [None] * len(use_counts)
        # Tensors of earlier sections keep the offsets at which they were allocated.
        for key, *block in held:
            self._blocks[self._index(key)] = (block[0], block[1], block[2])  # type: ignore[assignment]
        for copy in live_out.copies:
            self._index(copy.key)
            assert copy.base_key is not None
            # A copy for later sections is one more use of its original, if this section begins the split and so makes
            # the copy.
            self._use_counts[self._index(copy.base_key)] += split_section.parts[-1].is_new
        # One extra use stands for all readers in later sections, so the tensor is not freed in this one.
        for key in live_out.read:
            index = self._indices.get(key)
            if index is not None:
                use_counts[index] += 1
        for part in split_section.parts:
            if part.is_new:
                # Making the copy is a use of the original, at the start of the split.
                for _, index, _ in part.copies:
                    use_counts[index] += 1

    def _index(self, key: Key) -> int:
        """Return the index of the tensor that this section (the nodes of one layer) calls `key`.

        A tensor without an index gets the next free one.
        """
        found = self._indices.get(key)
        if found is None:
            if self._indices is self._split_section.indices:
                # Copy on write: the table of the section is shared by all layouts that contain the section.
                self._indices = self._indices.copy()
            found = self._indices[key] = len(self._use_counts)
            passed = self._split_section.section.name_after(key)
            if passed is not None:
                self._passed.append((found, passed))
            self._use_counts.append(0)
            self._blocks.append(None)
        return found

    def run(self, split_section: SplitSection) -> None:
        """Allocate the tensors of the section (the nodes of one layer), one split of the scheduler after another.

        In each split, the copies of its inputs come first, then the results of its nodes.
        """
        last = split_section.parts[-1]
        for part in split_section.parts:
            if part.is_new:
                for copy, index, own in part.copies:
                    self._drop_use(index)
                    self._allocate_copy(copy, own)
                for copy in self._live_out.copies if part is last else ():
                    assert copy.base_key is not None
                    self._drop_use(self._indices[copy.base_key])
                    self._allocate_copy(copy, self._indices[copy.key])
            if part.node_allocs:
                self._place(self._backends[part.backend].buft, part.node_allocs)

    def _place(self, buft: str, node_allocs: Sequence[NodeAlloc]) -> None:
        """Allocate the results of nodes in the buffer type `buft`, and free each source after its last use."""
        blocks, use_counts = self._blocks, self._use_counts
        # A buffer is only made when a node needs memory in it. A buffer type without nodes must have no buffer.
        buffer = self._buffers.get(buft)
        for number, size, reusable, sources in node_allocs:
            if number >= 0 and not (reusable and self._reuse_parent(number, size, buft, reusable)):
                if buffer is None:
                    buffer = self._buffer(buft)
                blocks[number] = (buft, buffer.alloc(size), size)
            for source in sources:
                use_counts[source] -= 1
                if not use_counts[source] and (block := blocks[source]) is not None:
                    blocks[source] = None
                    self._buffers[block[0]].free_bytes(block[1], block[2])

    def finish(self) -> tuple[GallocrState, BufferSizes]:
        """Return the state of the buffers after the section (the nodes of one layer), and the sizes that it needs."""
        held: list[TensorAlloc] = []
        bufts = self._live_out.bufts
        for index, name in self._passed:
            block = self._blocks[index]
            # The state holds nothing that later sections do not use. The fewer states differ, the more results come
            # from the cache.
            if block is not None and self._use_counts[index] > 0 and block[0] in bufts:
                held.append((name, *block))
        left = {buft: found for buft, found in self._buffers.items() if buft in bufts}
        return _state_of(left, held), _sizes_of(self._buffers, self._kept)

    def _buffer(self, buft: str) -> DynTallocr:
        """Return the buffer with the buffer type `buft`; an empty one is made on first use."""
        found = self._buffers.get(buft)
        if found is None:
            found = self._buffers[buft] = DynTallocr()
        return found

    def _allocate_copy(self, copy: Copy, index: int) -> None:
        """Allocate an input of a split: the copy of a tensor that is in the memory of another backend.

        With pipeline parallelism the copy stays allocated for the whole graph.
        """
        buft = self._backends[copy.backend].buft
        if self._n_copies > 1:
            # One copy for each micro batch in flight. All are marked as outputs (`ggml_set_output`), so none of them
            # shares memory.
            self._kept[buft] = self._kept.get(buft, 0) + copy.size_bytes * self._n_copies
        else:
            self._blocks[index] = (buft, self._buffer(buft).alloc(copy.size_bytes), copy.size_bytes)

    def _reuse_parent(self, number: int, size: int, buft: str, reusable: Sequence[int]) -> bool:
        """Let a node reuse the memory of a parent that nothing else reads; return whether there is such a parent.

        Mirrors the loop over parents in `ggml_gallocr_allocate_node`, with `ggml_gallocr_free_extra_space`.

        `number`, `size`: index and bytes of the node's result.
        `buft`: buffer type of the result if it reuses no parent's memory.
        `reusable`: indices of the parents whose memory the operation may reuse.
        """
        for index in reusable:
            block = self._blocks[index]
            # `n_children == 1 && n_views == 0` in ggml: the node itself is the only remaining reader.
            if block is None or self._use_counts[index] != 1:
                continue
            self._blocks[index] = None
            held, offset, had = block
            # The free space at the end is counted in the parent's buffer, by that buffer's alignment.
            if held != buft:
                backend = next(each for each in self._backends if each.buft == held)
                size = backend.size_of(self._split_section.section.tensors[number])
            if had > size:
                self._buffers[held].free_bytes(offset + size, had - size)
            self._blocks[number] = (held, offset, size)
            return True
        return False

    def _drop_use(self, index: int) -> None:
        """Decrease a tensor's use count (`n_children` and `n_views`), and free its block after the last use."""
        self._use_counts[index] -= 1
        block = self._blocks[index]
        if self._use_counts[index] == 0 and block is not None:
            self._blocks[index] = None
            self._buffers[block[0]].free_bytes(block[1], block[2])


_VBUFFER_MAX_CHUNKS = 16
"""Largest number of chunks of a buffer (`GGML_VBUFFER_MAX_CHUNKS`).

The last chunk has no size limit (`ggml_dyn_tallocr_new_chunk`).
"""
_CHUNK_STRIDE = 1 << 62
"""Factor for the number of a chunk in an offset: offset = chunk number * factor + offset in the chunk."""


def n_chunks(buffer: DynTallocr) -> int:
    """Return the number of backend buffers that `buffer` is made of."""
    return len(buffer.chunks) if isinstance(buffer, ChunkedTallocr) else 1


class ChunkedTallocr(DynTallocr):
    """A buffer in chunks of at most `max_buffer_bytes` bytes each (`ggml_dyn_tallocr` with `max_chunk_size`).

    A tensor that is larger than that gets a chunk of its size. An offset is `chunk * _CHUNK_STRIDE` plus the offset in
    the chunk.
    """

    __slots__ = ("_max_buffer_bytes", "chunks")

    def __init__(self, max_buffer_bytes: int) -> None:
        super().__init__()
        self._max_buffer_bytes = max_buffer_bytes
        self.chunks: list[DynTallocr] = []

    def alloc(self, size: int) -> int:
        """Allocate a block of `size` bytes and return its offset (`ggml_dyn_tallocr_alloc`).

        The block is in the last chunk with a gap of this size between its blocks. If no chunk has such a gap, the block
        is at the end of the chunk that fits best, or else in a new chunk.
        """
        number = self._chunk_with_gap(size)
        if number is None:
            number = self._chunk_with_end(size)
        if number is None:
            number = len(self.chunks)
            # As `ggml_dyn_tallocr_new_chunk`: a tensor that is larger than a chunk gets a chunk of its size. The last
            # chunk has virtually endless memory, so reserving never fails.
            is_last = number == _VBUFFER_MAX_CHUNKS - 1
            self.chunks.append(
                DynTallocr(sizes=(_CHUNK_STRIDE // 2 if is_last else max(size, self._max_buffer_bytes),))
            )
        offset = self.chunks[number].alloc(size)
        self.size_bytes = sum(chunk.size_bytes for chunk in self.chunks)
        return number * _CHUNK_STRIDE + offset

    def free_bytes(self, offset: int, size: int) -> None:
        """Free a block in its chunk. `offset` contains the chunk's number."""
        number, inside = divmod(offset, _CHUNK_STRIDE)
        self.chunks[number].free_bytes(inside, size)

    def _chunk_with_gap(self, size: int) -> int | None:
        """Return the number of the last chunk with a gap of at least `size` bytes between its blocks.

        None if there is none.
        """
        # ggml resets `best_fit_size` for each chunk. So the last chunk with a suitable block wins, not the best fit of
        # all.
        numbers = range(len(self.chunks) - 1, -1, -1)
        return next((each for each in numbers if any(free >= size for free in self.chunks[each].sizes[:-1])), None)

    def _chunk_with_end(self, size: int) -> int | None:
        """Return the number of the chunk at whose end a block of `size` bytes fits best; None if it fits in no chunk.

        Best is a chunk that need not grow, then the one that grows least (`reuse_factor` in `ggml_dyn_tallocr_alloc`).
        """
        found: int | None = None
        best = -_CHUNK_STRIDE
        for number, chunk in enumerate(self.chunks):
            if not chunk.sizes or chunk.sizes[-1] < size:
                continue
            # Negative: bytes by which the chunk would grow. Otherwise: allocated bytes that would stay unused. A chunk
            # that need not grow wins, and the smaller difference among equals.
            left = chunk.size_bytes - chunk.offsets[-1] - size
            if (best < 0 and left > best) or 0 <= left < best:
                found, best = number, left
        return found
