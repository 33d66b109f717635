"""The graph allocator of ggml-alloc.c without memory: offsets in one buffer per memory, and how large each has to be.

Mirrors its rules: inputs first, results in place of a source if the operation allows it (`ggml_gallocr_allocate_node`),
the best fitting free block otherwise (`ggml_dyn_tallocr_alloc`), and everything but outputs freed after its last
reader. It goes from section to section of a graph; what it does in one depends on what is in the buffers by then and
on who reads what later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from engine.planning.memory.compute_graph.ggml.scheduler import Backend, Copy, Piece, Work
from engine.planning.memory.compute_graph.ggml.sections import EARLY, FarReachError, Key, is_early, is_shared

_ENDLESS = 1 << 62


class Buffer:
    """Free blocks of a buffer that may grow without end; `size_bytes` is the highest end that was ever taken.

    A block is a place in three lists: they are searched for every tensor, which lists do at once.
    """

    __slots__ = ("_ends", "offsets", "size_bytes", "sizes")

    def __init__(self, offsets: Sequence[int] = (0,), sizes: Sequence[int] = (_ENDLESS,), size_bytes: int = 0) -> None:
        self.offsets = list(offsets)
        self.sizes = list(sizes)
        self._ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
        self.size_bytes = size_bytes

    def take(self, size: int) -> int:
        """Return the offset of a new block: the smallest free one that is large enough, the end if there is none."""
        sizes = self.sizes
        best = last = len(sizes) - 1
        if last:
            # Of equal ones the one furthest behind is taken.
            backwards = sizes[last - 1 :: -1]
            fitting = [free for free in backwards if free >= size]
            if fitting:
                best -= 1 + backwards.index(min(fitting))
        offset = self.offsets[best]
        if sizes[best] == size:
            del self.offsets[best], sizes[best], self._ends[best]
        else:
            self.offsets[best] = offset + size
            sizes[best] -= size
        self.size_bytes = max(self.size_bytes, offset + size)
        return offset

    def give_back(self, offset: int, size: int) -> None:
        """Return a block. It is joined with the first neighbour found and that one's other neighbour, which leaves
        gaps where blocks of no size lie between, as the engine's does."""
        offsets, sizes, ends = self.offsets, self.sizes, self._ends
        end = offset + size
        before = ends.index(offset) if offset in ends else len(ends)
        behind = offsets.index(end) if end in offsets else len(ends)
        if before <= behind and before < len(ends):
            sizes[before] += size
            ends[before] = end
            behind = before + 1
            if behind < len(ends) and end == offsets[behind]:
                sizes[before] += sizes[behind]
                ends[before] = ends[behind]
                del offsets[behind], sizes[behind], ends[behind]
            return
        if behind < len(ends):
            offsets[behind] = offset
            sizes[behind] += size
            return
        # Blocks of no size may have left the list out of order: it is searched from the start, not halved.
        place = next((place for place, start in enumerate(offsets) if start >= offset), len(offsets))
        offsets.insert(place, offset)
        sizes.insert(place, size)
        ends.insert(place, end)


class Size(NamedTuple):
    """What a buffer takes, how much of that are the copies for a pipeline beyond the first of each tensor, and of how
    many buffers it is made."""

    size_bytes: int
    pipeline_bytes: int
    n_parts: int = 1


Held = tuple[Key, str, int, int]
"""A tensor in a buffer: its name, the memory, first byte and length."""


@dataclass(frozen=True, slots=True)
class Filled:
    """Buffers between two sections: free blocks (offsets, sizes) of each memory, and what is read later."""

    buffers: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    held: tuple[Held, ...] = ()


@dataclass(frozen=True, slots=True)
class Growth:
    """What a section asks of memories: how far it fills each buffer, and the bytes of copies and inputs that are kept
    apart under pipeline parallelism."""

    ends: tuple[tuple[str, int], ...] = ()
    kept: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Ahead:
    """What a section has to know of those behind it: copies that they need at the start of a split which begins in it
    or before, the names of what they read, and the memories that they put something in."""

    copies: tuple[Copy, ...] = ()
    read: frozenset[Key] = frozenset()
    memories: frozenset[str] = frozenset()


def look_back(piece: Piece, ahead: Ahead, backends: Sequence[Backend]) -> Ahead:
    """Return what the section before `piece` has to know, given what `piece` has to."""
    begins, section = len(piece.spans) > 1, piece.section
    passing = [key for key in ahead.read if is_shared(key) or (is_early(key) and key not in piece.slots)]
    roots = [copy.root_key for copy in ahead.copies if copy.root_key is not None]
    if begins:
        passing += roots
    if piece.early:
        # What was computed before this section may be read only after it.
        read = {piece.slots[key] for key in (*ahead.read, *roots) if key in piece.slots}
        passing += [(0, EARLY, slot) for slot in piece.early if slot in read]
    before = [section.name_before(key) for key in passing if section.is_known_before(key)]
    here = piece.spans[0].copies
    copies = [_copy_before(piece, copy) for copy, _, _ in here]
    # All that reads a copy may have been computed before.
    still = [
        each.key
        for each, (copy, _, own) in zip(copies, here, strict=True)
        if piece.reads[own] or copy.key in ahead.read
    ]
    if not begins:
        behind = [_copy_before(piece, copy) for copy in ahead.copies]
        copies += behind
        still += [each.key for each, copy in zip(behind, ahead.copies, strict=True) if copy.key in ahead.read]
    known = piece.names_before.union([key for key in before if key is not None], still)
    memories = {backends[span.backend].memory for span in piece.spans if span.backend >= 0}
    return Ahead(tuple(copies), known, ahead.memories | memories)


def _copy_before(piece: Piece, copy: Copy) -> Copy:
    """Return what the section before calls a copy that its last split begins with."""
    key = piece.section.name_before(copy.key)
    root_key = None if copy.root_key is None else piece.section.name_before(copy.root_key)
    if key is None or root_key is None:
        raise FarReachError
    return copy if key == copy.key else replace(copy, key=key, root_key=root_key)


Leaf = tuple[Key | None, bool, str, int]
"""One that the allocator places: its name, whether it is an input, its memory and its size."""


def start(leafs: Iterable[Leaf], n_copies: int) -> tuple[Filled, Growth]:
    """Return buffers with the leafs of the whole graph in them."""
    buffers: dict[str, Buffer] = {}
    kept: Counter[str] = Counter()
    held = start_in(leafs, n_copies, buffers, kept)
    return _filled(buffers, held), _growth(buffers, kept)


def start_in(leafs: Iterable[Leaf], n_copies: int, buffers: dict[str, Buffer], kept: Counter[str]) -> list[Held]:
    """Place the leafs of the whole graph in these buffers, and add up in `kept` what is apart."""
    held: list[Held] = []
    for key, is_input, memory, size in leafs:
        if n_copies > 1 and is_input:
            kept[memory] += size * n_copies
            continue
        offset = buffers.setdefault(memory, Buffer()).take(size)
        if key is not None:
            held.append((key, memory, offset, size))
    return held


def _filled(buffers: dict[str, Buffer], held: Sequence[Held]) -> Filled:
    return Filled(
        tuple([(memory, tuple(found.offsets), tuple(found.sizes)) for memory, found in buffers.items()]), tuple(held)
    )


def _growth(buffers: dict[str, Buffer], kept: dict[str, int]) -> Growth:
    return Growth(tuple([(memory, found.size_bytes) for memory, found in buffers.items()]), tuple(kept.items()))


def joined(growths: Sequence[Growth]) -> Growth:
    """Return what several sections ask of memories together."""
    ends: dict[str, int] = {}
    kept: Counter[str] = Counter()
    for growth in growths:
        for memory, end in growth.ends:
            ends[memory] = max(ends.get(memory, 0), end)
        for memory, size in growth.kept:
            kept[memory] += size
    return Growth(tuple(ends.items()), tuple(kept.items()))


class Allocation:
    """Fills buffers with one piece after another."""

    def __init__(self, backends: Sequence[Backend], n_copies: int) -> None:
        self._backends = backends
        self._n_copies = n_copies

    def fill(self, piece: Piece, ahead: Ahead, before: Filled) -> tuple[Filled, Growth]:
        """Return the buffers behind `piece`, and what it asked of them."""
        buffers = {memory: Buffer(offsets, sizes) for memory, offsets, sizes in before.buffers}
        step = _Step(self._backends, self._n_copies, piece, ahead, before.held, buffers)
        step.run(piece)
        return step.finish()

    def fill_on(self, piece: Piece, ahead: Ahead, held: Sequence[Held], buffers: dict[str, Buffer]) -> Sequence[Held]:
        """Fill these buffers further, and return what is read behind `piece`."""
        step = _Step(self._backends, self._n_copies, piece, ahead, held, buffers)
        step.run(piece)
        return step.finish()[0].held


class _Step:
    """The work on one piece. What lies in a slot of the piece, or in one behind those if the piece does not know it, is
    told by `_blocks`: memory, first byte and length."""

    def __init__(
        self,
        backends: Sequence[Backend],
        n_copies: int,
        piece: Piece,
        ahead: Ahead,
        held: Sequence[Held],
        buffers: dict[str, Buffer],
    ) -> None:
        self._backends = backends
        self._n_copies = n_copies
        self._piece = piece
        self._ahead = ahead
        self._buffers = buffers
        self._kept: dict[str, int] = {}
        self._reads = reads = [*piece.reads]
        self._slots = piece.slots
        self._passed = [*piece.passed]
        self._blocks: list[tuple[str, int, int] | None] = [None] * len(reads)
        for key, *block in held:
            self._blocks[self._slot(key)] = (block[0], block[1], block[2])  # type: ignore[assignment]
        for copy in ahead.copies:
            self._slot(copy.key)
            assert copy.root_key is not None
            self._reads[self._slot(copy.root_key)] += piece.spans[-1].is_new
        for key in ahead.read:
            slot = self._slots.get(key)
            if slot is not None:
                reads[slot] += 1
        for span in piece.spans:
            if span.is_new:
                for _, slot, _ in span.copies:
                    reads[slot] += 1

    def _slot(self, key: Key) -> int:
        """Return the slot of a name, a new one if the piece does not know it."""
        found = self._slots.get(key)
        if found is None:
            if self._slots is self._piece.slots:
                self._slots = self._slots.copy()
            found = self._slots[key] = len(self._reads)
            passed = self._piece.section.name_after(key)
            if passed is not None:
                self._passed.append((found, passed))
            self._reads.append(0)
            self._blocks.append(None)
        return found

    def run(self, piece: Piece) -> None:
        last = piece.spans[-1]
        for span in piece.spans:
            if span.is_new:
                for copy, slot, own in span.copies:
                    self._done_with(slot)
                    self._place_copy(copy, own)
                for copy in self._ahead.copies if span is last else ():
                    assert copy.root_key is not None
                    self._done_with(self._slots[copy.root_key])
                    self._place_copy(copy, self._slots[copy.key])
            if span.work:
                self._place(self._backends[span.backend].memory, span.work)

    def _place(self, memory: str, work: Sequence[Work]) -> None:
        """Place the results of nodes, and give back what is not read any more behind each."""
        blocks, reads = self._blocks, self._reads
        buffer = self._buffers.get(memory)
        for number, size, alike, sources in work:
            if number >= 0 and not (alike and self._reuse(number, size, memory, alike)):
                if buffer is None:
                    buffer = self._buffer(memory)
                blocks[number] = (memory, buffer.take(size), size)
            for source in sources:
                reads[source] -= 1
                if not reads[source] and (block := blocks[source]) is not None:
                    blocks[source] = None
                    self._buffers[block[0]].give_back(block[1], block[2])

    def finish(self) -> tuple[Filled, Growth]:
        """Return the buffers for the next section, and what was asked of them."""
        held: list[Held] = []
        memories = self._ahead.memories
        for slot, name in self._passed:
            block = self._blocks[slot]
            if block is not None and self._reads[slot] > 0 and block[0] in memories:
                held.append((name, *block))
        left = {memory: found for memory, found in self._buffers.items() if memory in memories}
        return _filled(left, held), _growth(self._buffers, self._kept)

    def _buffer(self, memory: str) -> Buffer:
        found = self._buffers.get(memory)
        if found is None:
            found = self._buffers[memory] = Buffer()
        return found

    def _place_copy(self, copy: Copy, slot: int) -> None:
        memory = self._backends[copy.backend].memory
        if self._n_copies > 1:
            self._kept[memory] = self._kept.get(memory, 0) + copy.size_bytes * self._n_copies
        else:
            self._blocks[slot] = (memory, self._buffer(memory).take(copy.size_bytes), copy.size_bytes)

    def _reuse(self, number: int, size: int, memory: str, alike: Sequence[int]) -> bool:
        """Put a node in the place of a source of the same layout that nothing else reads."""
        for slot in alike:
            block = self._blocks[slot]
            if block is None or self._reads[slot] != 1:
                continue
            self._blocks[slot] = None
            held, offset, had = block
            if held != memory:
                backend = next(each for each in self._backends if each.memory == held)
                size = backend.size_of(self._piece.section.tensors[number])
            if had > size:
                self._buffers[held].give_back(offset + size, had - size)
            self._blocks[number] = (held, offset, size)
            return True
        return False

    def _done_with(self, slot: int) -> None:
        self._reads[slot] -= 1
        block = self._blocks[slot]
        if self._reads[slot] == 0 and block is not None:
            self._blocks[slot] = None
            self._buffers[block[0]].give_back(block[1], block[2])


_MOST_PARTS = 16
"""`GGML_VBUFFER_MAX_CHUNKS`: the last part takes all that is left."""
_APART = 1 << 62
"""Between the first bytes of two parts."""


def n_parts(buffer: Buffer) -> int:
    """Return of how many buffers one is made."""
    return len(buffer.parts) if isinstance(buffer, DividedBuffer) else 1


class DividedBuffer(Buffer):
    """Parts of at most `most_bytes` each; one is larger only for a tensor that is. An offset tells the part too."""

    __slots__ = ("_most_bytes", "parts")

    def __init__(self, most_bytes: int) -> None:
        super().__init__()
        self._most_bytes = most_bytes
        self.parts: list[Buffer] = []

    def take(self, size: int) -> int:
        """Return the offset of a new block: one that fits between others, the last such part's smallest; else the end
        of the part that has to grow least; else a new part."""
        number = self._with_gap(size)
        if number is None:
            number = self._with_end(size)
        if number is None:
            number = len(self.parts)
            is_last = number == _MOST_PARTS - 1
            self.parts.append(Buffer(sizes=(_APART // 2 if is_last else max(size, self._most_bytes),)))
        offset = self.parts[number].take(size)
        self.size_bytes = sum(part.size_bytes for part in self.parts)
        return number * _APART + offset

    def give_back(self, offset: int, size: int) -> None:
        """Return a block to its part."""
        number, inside = divmod(offset, _APART)
        self.parts[number].give_back(inside, size)

    def _with_gap(self, size: int) -> int | None:
        numbers = range(len(self.parts) - 1, -1, -1)
        return next((each for each in numbers if any(free >= size for free in self.parts[each].sizes[:-1])), None)

    def _with_end(self, size: int) -> int | None:
        found: int | None = None
        best = -_APART
        for number, part in enumerate(self.parts):
            if not part.sizes or part.sizes[-1] < size:
                continue
            left = part.size_bytes - part.offsets[-1] - size
            if (best < 0 and left > best) or 0 <= left < best:
                found, best = number, left
        return found
