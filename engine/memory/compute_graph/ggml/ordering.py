"""Pieces of splits in the order of backends that have one of their own, which may take along nodes of later sections.

What is computed before the turn of its section becomes work of the piece in which that happens, and its result has a
name of its own there (`sections.EARLY`). An order depends on a piece, on those that its last split goes on in, and on
which of its nodes were computed before, so that callers may remember it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from engine.memory.compute_graph.ggml.crossing import Crossing
from engine.memory.compute_graph.ggml.reordering import Order, Seen, reorder
from engine.memory.compute_graph.ggml.scheduler import Backend, Piece, Span, Work, make_piece
from engine.memory.compute_graph.ggml.sections import EARLY, Key, is_early

_REACH = 64
"""How many nodes behind a piece are looked at: none is taken along from further behind."""

_BITS = 32
NodePlace = tuple[int, int]
"""A node: how many pieces behind, and its place in the piece."""


Followed = tuple[Piece, Crossing | None]
"""A piece behind, and the way to the numbers of the backends in the piece before it: None where they are the same."""


def pieces_ahead(behind: Iterable[Followed]) -> tuple[Followed, ...]:
    """Return those of the pieces behind one in which its last split goes on, as far as an order may reach."""
    found: list[Followed] = []
    n_nodes = 0
    for piece, way in behind:
        found.append((piece, way))
        n_nodes += len(piece.spans[0].work)
        if len(piece.spans) > 1 or n_nodes >= _REACH:
            break
    return tuple(found)


def put_in_order(
    piece: Piece, ahead: Sequence[Followed], used: frozenset[NodePlace], backends: Sequence[Backend]
) -> tuple[Piece, frozenset[NodePlace]]:
    """Return the piece with the work of its spans in order, and which nodes behind it are then computed.

    `used`: those of the piece and behind that were computed before.
    """
    return _Ordering(((piece, None), *ahead), used).run(backends)


class _Ordering:
    def __init__(self, followed: Sequence[Followed], used: frozenset[NodePlace]) -> None:
        self._pieces = pieces = [piece for piece, _ in followed]
        self._ways = [way for _, way in followed]
        self._piece = pieces[0]
        self._used = used
        self._reads = [*self._piece.reads]
        self._slots = self._piece.slots.copy()
        self._passed = [*self._piece.passed]
        self._names = [_names(piece) for piece in pieces]
        self._uses = [Counter(source for node in piece.section.nodes for source in node.sources) for piece in pieces]
        self._numbers: list[dict[Key, int]] = []
        for piece in pieces:
            named = enumerate(piece.section.names)
            self._numbers.append({name: number for number, name in named if name is not None})

    def run(self, backends: Sequence[Backend]) -> tuple[Piece, frozenset[NodePlace]]:
        used, spans = set(self._used), []
        early = self._leave_out()
        starts = accumulate((len(span.work) for span in self._piece.spans), initial=0)
        for span, start in zip(self._piece.spans, starts, strict=False):
            if span.backend < 0 or not backends[span.backend].reorders:
                spans.append(span)
                continue
            places = list(self._places(span, start))
            nodes = [self._seen(*place) for place in places]
            before = {number for number, place in enumerate(places) if place in self._used}
            order = reorder(nodes, end=len(span.work), used=before, goes_on=not span.is_new)
            used.update(places[number] for number in order.places)
            spans.append(replace(span, work=self._work(places, order)))
        piece = make_piece(self._piece.section, tuple(spans), self._reads, self._slots, tuple(self._passed), early)
        return piece, frozenset((behind - 1, place) for behind, place in used if behind)

    def _leave_out(self) -> tuple[int, ...]:
        """Give up what reads nodes that were computed before; return the slots of their results."""
        found = []
        work = [each for span in self._piece.spans for each in span.work]
        for behind, place in sorted(self._used):
            if not behind:
                slot, _, _, sources = work[place]
                for source in sources:
                    self._reads[source] -= 1
                if slot >= 0:
                    found.append(slot)
                    self._slots[0, EARLY, slot] = slot
        return tuple(found)

    def _places(self, span: Span, start: int) -> Iterator[NodePlace]:
        """Yield the nodes of a span, and those behind the piece in which the last one goes on."""
        yield from ((0, start + number) for number in range(len(span.work)))
        if span is self._piece.spans[-1]:
            for behind, piece in enumerate(self._pieces[1:], 1):
                yield from ((behind, number) for number in range(len(piece.spans[0].work)))

    # ------------------------------------------------------------------ what the backend sees

    def _seen(self, behind: int, place: int) -> Seen:
        section = self._pieces[behind].section
        node, (_, _, _, slots) = section.nodes[place], self._work_at(behind, place)
        sources, bases, there = [], [], []
        for source, root, slot in zip(node.sources, node.roots, slots, strict=True):
            is_copy = slot != root
            # A copy is no node's, and no view.
            copy = -1 - (behind << _BITS | slot)
            sources.append(copy if is_copy else self._number(behind, source))
            bases.append(copy if is_copy else self._number(behind, root))
            there.append(is_copy or section.tensors[source].op == "none")
        return Seen(
            section.tensors[node.number],
            self._number(behind, node.number),
            self._number(behind, section.roots[node.number]),
            tuple(sources),
            tuple(bases),
            tuple(there),
            self._uses[behind][node.number],
        )

    def _number(self, behind: int, number: int) -> int:
        """Return the number that stands for a tensor in all sections that know it."""
        while behind:
            name = self._pieces[behind].section.names[number]
            key = None if name is None else self._hand_back(behind, name)
            found = None if key is None else self._numbers[behind - 1].get(key)
            if found is None:
                break
            behind, number = behind - 1, found
        return behind << _BITS | number

    def _work_at(self, behind: int, place: int) -> Work:
        for span in self._pieces[behind].spans:
            if place < len(span.work):
                return span.work[place]
            place -= len(span.work)
        raise IndexError(place)

    # ------------------------------------------------------------------ work in order

    def _work(self, places: Sequence[NodePlace], order: Order) -> list[Work]:
        kept = dict(order.kept)
        found: list[Work] = []
        for number in order.places:
            found.append(self._moved(*places[number]))
            if number in kept:
                slots = []
                for place, source in kept[number]:
                    slot = self._slot(places[place][0], self._work_at(*places[place])[3][source])
                    if slot is not None:
                        slots.append(slot)
                        self._reads[slot] += 1
                found.append((-1, 0, (), tuple(slots)))
        return found

    def _moved(self, behind: int, place: int) -> Work:
        """Return the work of a node with the slots that this piece has for it."""
        slot, size, alike, sources = work = self._work_at(behind, place)
        if not behind:
            return work
        own = -1 if slot < 0 else self._slot(behind, slot)
        assert own is not None
        read = [found for source in sources if (found := self._slot(behind, source)) is not None]
        for found in read:
            self._reads[found] += 1
        in_place = [found for source in alike if (found := self._slot(behind, source)) is not None]
        return own, size, tuple(in_place), tuple(read)

    def _slot(self, behind: int, slot: int) -> int | None:
        """Return the slot here of one of a piece behind, None for what has a memory of its own."""
        if not behind:
            return slot
        section = self._pieces[behind].section
        if slot < len(section.tensors) and section.tensors[slot].home is not None:
            return None
        key: Key = (0, EARLY, slot)
        for name in self._names[behind].get(slot, ()):
            before = self._hand_back(behind, name)
            if before is not None:
                return self._named(behind - 1, before)
        return self._named(behind, key)

    def _named(self, behind: int, key: Key) -> int | None:
        """Return the slot here of what a piece behind knows by a name."""
        if behind:
            slot = None if is_early(key) else self._pieces[behind].slots.get(key)
            if slot is not None:
                return self._slot(behind, slot)
            before = self._hand_back(behind, key)
            return None if before is None else self._named(behind - 1, before)
        found = self._slots.get(key)
        if found is None:
            found = self._slots[key] = len(self._reads)
            self._reads.append(0)
            passed = self._piece.section.pass_on(key)
            if passed is not None:
                self._passed.append((found, passed))
        return found

    def _hand_back(self, behind: int, key: Key) -> Key | None:
        """Return what the piece before one behind calls what that knows as `key`, None for what it cannot know."""
        section, way = self._pieces[behind].section, self._ways[behind]
        # What the last split begins with is copied before it, whoever else knows of that.
        before = section.hand_back(key) if key[0] == "copy" or section.is_known_before(key) else None
        return before if before is None or way is None else way.key(before)


def _names(piece: Piece) -> dict[int, list[Key]]:
    """Return the names of each slot that has some."""
    found: dict[int, list[Key]] = {}
    for name, slot in piece.slots.items():
        found.setdefault(slot, []).append(name)
    return found
