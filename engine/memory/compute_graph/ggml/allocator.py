"""The engine's graph allocator without memory: offsets in one buffer per memory, and how large each has to be.

Mirrors the rules of ggml-alloc: inputs first, results in place of a source where the operation allows, the best fitting
free block otherwise, and everything but outputs given back after its last reader. It goes from section to section of a
graph; what it does in one depends on what is in the buffers by then and on who reads what later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from engine.memory.compute_graph.ggml.graph import INPLACE_OPS, Tensor
from engine.memory.compute_graph.ggml.scheduler import Backend, Copy, Piece
from engine.memory.compute_graph.ggml.sections import FarReachError, pass_on

_ENDLESS = 1 << 62


class Buffer:
    """Free blocks of a buffer that may grow without end; `size_bytes` is the highest end that was ever taken."""

    __slots__ = ("offsets", "size_bytes", "sizes")

    def __init__(self, offsets: Sequence[int] = (0,), sizes: Sequence[int] = (_ENDLESS,), size_bytes: int = 0) -> None:
        self.offsets = list(offsets)
        self.sizes = list(sizes)
        self.size_bytes = size_bytes

    def take(self, size: int) -> int:
        """Return the offset of a new block: the smallest free one that is large enough, the end if there is none."""
        sizes = self.sizes
        last = len(sizes) - 1
        best, best_size = last, _ENDLESS
        for place in range(last):
            free = sizes[place]
            if size <= free <= best_size:
                best, best_size = place, free
        offset = self.offsets[best]
        if sizes[best] == size:
            del self.offsets[best], sizes[best]
        else:
            self.offsets[best] = offset + size
            sizes[best] -= size
        self.size_bytes = max(self.size_bytes, offset + size)
        return offset

    def give_back(self, offset: int, size: int) -> None:
        """Return a block. It is joined with the first neighbour found and that one's other neighbour, which leaves
        gaps where blocks of no size lie between, as the engine's does."""
        offsets, sizes = self.offsets, self.sizes
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


class Size(NamedTuple):
    """What a buffer takes, and how much of that are the copies for a pipeline beyond the first of each tensor."""

    size_bytes: int
    pipeline_bytes: int


@dataclass(frozen=True, slots=True)
class Block:
    """Where a tensor lies: `memory`, first byte and length."""

    memory: str
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Filled:
    """Buffers between two sections: free blocks (offsets, sizes) and highest end of each memory, the bytes that copies
    and inputs under pipeline parallelism keep for good, and the tensors that are read later."""

    buffers: tuple[tuple[str, tuple[int, ...], tuple[int, ...], int], ...] = ()
    kept: tuple[tuple[str, int], ...] = ()
    live: tuple[tuple[object, Block], ...] = ()


@dataclass(frozen=True, slots=True)
class Ahead:
    """What a section has to know of those behind it: copies that they need at the start of a split which begins in it
    or before, the names of what they read, and the memories that they put something in."""

    copies: tuple[Copy, ...] = ()
    read: frozenset[object] = frozenset()
    memories: frozenset[str] = frozenset()


def look_back(piece: Piece, ahead: Ahead, backends: Sequence[Backend]) -> Ahead:
    """Return what the section before `piece` has to know, given what `piece` has to."""
    begins = len(piece.spans) > 1
    read = set(piece.reads)
    for span in piece.spans[1:]:
        read.update(copy.root_key for copy in span.copies)
    if begins:
        read.update(copy.root_key for copy in ahead.copies)
    read |= {key for key in ahead.read if is_shared(key)}
    known = {_before(key) for key in read}
    known.discard(None)
    memories = {backends[span.backend].memory for span in piece.spans if span.backend >= 0}
    copies = (*piece.spans[0].copies, *(() if begins else ahead.copies))
    return Ahead(tuple(_copy_before(copy) for copy in copies), frozenset(known), ahead.memories | memories)


def _copy_before(copy: Copy) -> Copy:
    key, root_key = _before(copy.key), _before(copy.root_key)
    if not isinstance(key, tuple) or root_key is None:
        raise FarReachError
    return copy if key == copy.key else replace(copy, key=key, root_key=root_key)


def is_shared(key: object) -> bool:
    """Return whether a name means the same tensor in all sections."""
    if not isinstance(key, tuple):
        return False
    return is_shared(key[1]) if key[0] == "copy" else isinstance(key[0], str)


def _before(key: object) -> object:
    """Return what the section before calls what this one calls `key`, None for what it does not know."""
    if not isinstance(key, tuple):
        return None
    if key[0] == "copy":
        original = _before(key[1])
        return None if original is None else ("copy", original, key[2])
    if isinstance(key[0], str):
        return key
    return (key[0] + 1, key[1]) if key[0] in (-1, -2) else None


def start(leafs: Iterable[tuple[object, bool, str, int]], n_copies: int) -> Filled:
    """Return buffers with the leafs of the whole graph in them that the allocator places, given the name of each,
    whether it is an input, its memory and its size."""
    buffers: dict[str, Buffer] = {}
    live: dict[object, Block] = {}
    kept: Counter[str] = Counter()
    for key, is_input, memory, size in leafs:
        if n_copies > 1 and is_input:
            kept[memory] += size * n_copies
        else:
            buffer = buffers.setdefault(memory, Buffer())
            live[key] = Block(memory, buffer.take(size), size)
    return _filled(buffers, kept, live)


def _filled(buffers: dict[str, Buffer], kept: dict[str, int], live: dict[object, Block]) -> Filled:
    return Filled(
        tuple(
            (memory, tuple(found.offsets), tuple(found.sizes), found.size_bytes) for memory, found in buffers.items()
        ),
        tuple(kept.items()),
        tuple(live.items()),
    )


class Allocation:
    """Fills buffers with one piece after another."""

    def __init__(self, backends: Sequence[Backend], n_copies: int) -> None:
        self._backends = backends
        self._n_copies = n_copies

    def fill(self, piece: Piece, ahead: Ahead, before: Filled) -> tuple[Filled, dict[str, Size]]:
        """Return the buffers behind `piece`, and the sizes of those that nothing is put in any more."""
        step = _Step(self._backends, self._n_copies, piece, ahead, before)
        step.run(piece)
        return step.finish(ahead)


class _Step:
    """The work on one piece. Tensors that other sections know go by their names, others by themselves."""

    def __init__(self, backends: Sequence[Backend], n_copies: int, piece: Piece, ahead: Ahead, before: Filled) -> None:
        self._backends = backends
        self._n_copies = n_copies
        self._keys = piece.assigned.bound.section.keys
        self._homes = piece.assigned.bound.homes
        self._assigned = piece.assigned.backends
        self._ahead = ahead
        self._buffers = {memory: Buffer(offsets, sizes, end) for memory, offsets, sizes, end in before.buffers}
        self._kept = dict(before.kept)
        self._blocks: dict[object, Block] = dict(before.live)
        self._reads = piece.reads.copy()
        self._reads.update(ahead.read)
        self._reads.update(piece.assigned.bound.section.outputs)
        last = len(piece.spans) - 1
        self._copies = [
            [*span.copies, *(ahead.copies if place == last else ())] for place, span in enumerate(piece.spans)
        ]
        for place, span in enumerate(piece.spans):
            if span.is_new:
                self._reads.update(copy.root_key for copy in self._copies[place])

    def run(self, piece: Piece) -> None:
        for span, copies in zip(piece.spans, self._copies, strict=True):
            if span.is_new:
                for copy in copies:
                    self._done_with(copy.root_key)
                    self._place_copy(copy)
            for node, sources in span.nodes:
                self._place(node, sources)
                for source in sources:
                    self._done_with(self._root_key(source))

    def finish(self, ahead: Ahead) -> tuple[Filled, dict[str, Size]]:
        """Return the buffers for the next section, and the sizes of those that are done with."""
        live: dict[object, Block] = {}
        for key, block in self._blocks.items():
            passed = pass_on(key) if isinstance(key, tuple) and self._reads[key] > 0 else None
            if passed is not None and block.memory in ahead.memories:
                live[passed] = block
        done = {
            memory: self._buffers[memory].size_bytes if memory in self._buffers else 0
            for memory in {*self._buffers, *self._kept} - ahead.memories
        }
        sizes = {memory: self._with_kept(size, self._kept.get(memory, 0)) for memory, size in done.items()}
        buffers = {memory: found for memory, found in self._buffers.items() if memory not in done}
        kept = {memory: size for memory, size in self._kept.items() if memory not in done}
        return _filled(buffers, kept, live), sizes

    def _with_kept(self, size_bytes: int, kept_bytes: int) -> Size:
        return Size(size_bytes + kept_bytes, kept_bytes - kept_bytes // self._n_copies)

    def _root_key(self, source: Tensor | Copy) -> object:
        if isinstance(source, Copy):
            return source.key
        root = source.root or source
        return self._keys.get(root, root)

    def _buffer(self, memory: str) -> Buffer:
        found = self._buffers.get(memory)
        if found is None:
            found = self._buffers[memory] = Buffer()
        return found

    def _place_copy(self, copy: Copy) -> None:
        memory = self._backends[copy.backend].memory
        if self._n_copies > 1:
            self._kept[memory] = self._kept.get(memory, 0) + copy.size_bytes * self._n_copies
        else:
            self._blocks[copy.key] = Block(memory, self._buffer(memory).take(copy.size_bytes), copy.size_bytes)

    def _place(self, node: Tensor, sources: Sequence[Tensor | Copy]) -> None:
        if node.root is not None:
            return
        key = self._keys.get(node, node)
        if node.op in INPLACE_OPS and self._reuse(key, node, sources):
            return
        backend = self._backends[self._assigned[node]]
        size = backend.size_of(node)
        self._blocks[key] = Block(backend.memory, self._buffer(backend.memory).take(size), size)

    def _reuse(self, key: object, node: Tensor, sources: Sequence[Tensor | Copy]) -> bool:
        """Put `node` in the place of a source of the same layout that nothing else reads; views do not qualify."""
        for source in sources:
            like = source.original if isinstance(source, Copy) else source
            found = self._root_key(source)
            if like.type != node.type or like.ne != node.ne or like.nb != node.nb:
                continue
            if found not in self._blocks or self._reads[found] != 1:
                continue
            if not isinstance(source, Copy) and source.root is not None:
                continue
            block = self._blocks.pop(found)
            backend = next(each for each in self._backends if each.memory == block.memory)
            size = backend.size_of(node)
            if block.size_bytes > size:
                self._buffer(block.memory).give_back(block.offset + size, block.size_bytes - size)
            self._blocks[key] = Block(block.memory, block.offset, size)
            return True
        return False

    def _done_with(self, key: object) -> None:
        self._reads[key] -= 1
        if self._reads[key] == 0:
            block = self._blocks.pop(key, None)
            if block is not None:
                self._buffer(block.memory).give_back(block.offset, block.size_bytes)
