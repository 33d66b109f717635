"""The order in which ggml's Vulkan backend computes the nodes of a split: it decides how long results have to be kept.

Mirrors `ggml_vk_graph_optimize`: before a graph is allocated the backend moves nodes forward that need nothing which is
not computed by then, so that they can run side by side, and keeps together what it fuses. Nothing here depends on the
device: the backend asks for kernels only when it computes.

`reorder` orders the nodes of one split. `put_in_order` does so for pieces of splits, and may move nodes of later
sections forward. What is computed before its section becomes work of the piece in which that happens, and its result
has a name of its own there (`sections.EARLY`). An order depends on a piece, on those in which its last split continues,
and on which of its nodes were computed before, so that callers may remember it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from engine.planning.memory.compute_graph.ggml.backend_map import BackendMap
from engine.planning.memory.compute_graph.ggml.graph import VIEW_OPS, Tensor, is_contiguous
from engine.planning.memory.compute_graph.ggml.scheduler import Backend, Piece, Span, Work, make_piece
from engine.planning.memory.compute_graph.ggml.sections import EARLY, Key, is_early

_AHEAD = 20
"""`NUM_TO_CHECK`: how far behind the first node that is left another may stand to be taken along."""
_PULLED = 15
"""How far behind a node the one may stand that is fused with it."""

_EARLY_SOFTMAX = ("soft_max", "reshape", "argsort", "view", "get_rows")
_WEIGHTS = ("reshape", "sum_rows", "clamp", "div", "reshape")
_EXPERTS: tuple[tuple[str, ...], ...] = (
    (*_EARLY_SOFTMAX, *_WEIGHTS),
    ("unary", "reshape", "add", "argsort", "view", "get_rows", *_WEIGHTS),
    ("unary", "sqrt", "reshape", "add", "argsort", "view", "get_rows", *_WEIGHTS),
    _EARLY_SOFTMAX,
    ("argsort", "view", "get_rows", "reshape", "soft_max", "reshape"),
)
"""Choosing experts as one operation: what it reads stays until it is done (`keep_topk_moe_pattern`)."""
_BLOCK_SCORES = ("get_rows", "permute", "cont", "cpy", "reshape", "add", "top_k")
_GATED_STREAMS = ("scale", "unary", "scale", "hc_post")
_KEPT: tuple[tuple[str, ...], ...] = (
    ("mul", "sin", "sqr", "mul", "add"),
    _BLOCK_SCORES,
    ("rms_norm", "mul", "add", "mul"),
    ("rms_norm", "mul", "add"),
    ("rms_norm", "mul", "rope", "view", "set_rows"),
    ("rms_norm", "view", "set_rows"),
    ("rope", "view", "set_rows"),
)
"""What stays together as it is."""
_APART = (*_EXPERTS, *_KEPT, _GATED_STREAMS)
_FUSED_NEXT = frozenset(
    {("mul_mat", "add"), ("mul_mat_id", "add_id"), ("mul_mat_id", "mul"), ("add", "add"), ("ssm_conv", "add"),
     ("ssm_conv", "unary")}
)  # fmt: skip
"""Two neighbours of which the second may be taken with the first although it reads it."""
_FUSED_BEHIND = frozenset({("rms_norm", "mul"), ("unary", "mul")})
"""The same, with nothing but views and what is taken already between them."""


Reading = tuple[int, int]
"""One of the sources of a node: the place of the node, and which of its sources."""


class Seen(NamedTuple):
    """A node as the backend sees it. Tensors go by numbers: `number` its own, `base` that of what it is a view of,
    `sources` and `source_bases` those of what it reads. `there`: sources that no node of the graph makes, or that were
    copied from another backend; `uses`: how many nodes of the graph read it."""

    tensor: Tensor
    number: int
    base: int
    sources: tuple[int, ...]
    source_bases: tuple[int, ...]
    there: tuple[bool, ...]
    uses: int


@dataclass(frozen=True, slots=True)
class Order:
    """`places`: of the nodes as they were, in the order in which they are computed; `kept`: what is needed until a
    node, by the place that it had, is done."""

    places: tuple[int, ...]
    kept: tuple[tuple[int, tuple[Reading, ...]], ...]


def reorder(
    nodes: Sequence[Seen], *, end: int | None = None, used: Set[int] = frozenset(), goes_on: bool = False
) -> Order:
    """Return the order of the nodes of a split up to where those before `end` are all computed, and what is taken along
    of those behind; `used`: places of nodes that were computed before; `goes_on`: the split has more nodes before
    these, which all were."""
    return _Reordering(nodes, used, goes_on=goes_on).run(len(nodes) if end is None else end)


class _Reordering:
    def __init__(self, nodes: Sequence[Seen], used: Set[int], *, goes_on: bool) -> None:
        self._nodes = nodes
        self._goes_on = goes_on
        self._ops = [node.tensor.op for node in nodes]
        self._places = {node.number: place for place, node in enumerate(nodes)}
        self._empty = [op in VIEW_OPS or op == "none" for op in self._ops]
        self._needs: dict[int, frozenset[int]] = {}
        self._used = [place in used for place in range(len(nodes))]
        self._done = {nodes[place].number for place in used}
        self._first = 0
        self._order: list[int] = []
        self._kept: list[tuple[int, tuple[Reading, ...]]] = []

    def run(self, end: int) -> Order:
        self._take(())
        while self._first < end:
            if not self._keep_together():
                self._take(self._gather())
        return Order(tuple(self._order), tuple(self._kept))

    def _needed(self, place: int) -> frozenset[int]:
        """Return which of the nodes shortly before one have to be computed before it."""
        found = self._needs.get(place)
        if found is None:
            nodes = self._nodes
            before = range(max(0, place - _AHEAD), place)
            found = self._needs[place] = frozenset([each for each in before if _needs(nodes[place], nodes[each])])
        return found

    def _take(self, places: Sequence[int]) -> None:
        for place in places:
            self._order.append(place)
            self._done.add(self._nodes[place].number)
            self._used[place] = True
        while self._first < len(self._nodes) and self._used[self._first]:
            self._first += 1

    def _matches(self, pattern: Sequence[str], start: int) -> bool:
        end = start + len(pattern)
        return end <= len(self._ops) and tuple(self._ops[start:end]) == pattern and not any(self._used[start:end])

    # ------------------------------------------------------------------ what stays together

    def _keep_together(self) -> bool:
        """Take what is fused from the first node on; return whether there is such a thing."""
        first = self._first
        for pattern in _EXPERTS:
            if self._matches(pattern, first):
                last = first + len(pattern) - 1
                follows = last + 1 < len(self._ops) and self._ops[last + 1] == "scale"
                self._keep_alive(pattern, last + 1 if follows else last)
                self._take(range(first, first + len(pattern)))
                return True
        for pattern in (*_KEPT, _GATED_STREAMS):
            if self._matches(pattern, first):
                if pattern is _GATED_STREAMS:
                    self._keep_alive(pattern, first + len(pattern) - 1)
                self._take(range(first, first + len(pattern)))
                return True
        return False

    def _keep_alive(self, pattern: Sequence[str], until: int) -> None:
        """Note that what the fused nodes read from outside is needed until the last of them."""
        seen: set[int] = set()
        found: list[Reading] = []
        for place in range(self._first, self._first + len(pattern)):
            for number, source in enumerate(self._nodes[place].sources):
                if source not in seen:
                    found.append((place, number))
                    seen.add(source)
            seen.add(self._nodes[place].number)
        self._kept.append((until, tuple(found)))

    # ------------------------------------------------------------------ what is taken along

    def _gather(self) -> list[int]:
        """Return the first node that is left and those that can be computed with it, then views of them."""
        first, end = self._first, min(self._first + _AHEAD, len(self._nodes))
        taken = [first]
        for place in range(first + 1, end):
            if self._used[place] or self._empty[place] or self._stands_apart(place):
                continue
            if self._is_ready(place, taken):
                taken.append(place)
                self._pull(place, taken)
        if self._ops[taken[-1]] != "add":
            for place in range(first + 1, end):
                if self._used[place] or not self._empty[place]:
                    continue
                waits = (each for each in self._needed(place) if each >= first)
                if all(self._used[each] or each in taken for each in waits):
                    taken.append(place)
        return taken

    def _stands_apart(self, place: int) -> bool:
        if any(self._matches(pattern, place) for pattern in _APART):
            return True
        starts = range(max(0, place - len(_BLOCK_SCORES) + 1), place)
        return any(self._matches(_BLOCK_SCORES, start) for start in starts)

    def _is_ready(self, place: int, taken: Sequence[int]) -> bool:
        waits = (each for each in self._needed(place) if each >= self._first and not self._used[each])
        return all(each == taken[-1] and self._is_fused(each, place) for each in waits)

    def _is_fused(self, before: int, place: int) -> bool:
        pair = (self._ops[before], self._ops[place])
        if pair in _FUSED_BEHIND:
            return all(self._used[between] or self._empty[between] for between in range(before + 1, place))
        return place == before + 1 and pair in _FUSED_NEXT

    def _pull(self, place: int, taken: list[int]) -> None:
        """Take what is fused with a node from further behind."""
        ops, nodes = self._ops, self._nodes
        pair = (ops[place - 1], ops[place])
        stored = place
        if pair == ("rms_norm", "mul"):
            found = self._next(place, "rope", lambda node: _reads_first(node, nodes[place]) and _has_leafs(node))
            if found is not None:
                stored = found
                self._mark(found, taken)
        if ops[stored] in ("rope", "rms_norm"):
            self._pull_store(stored, taken)
        partner = {
            ("mul_mat_id", "add_id"): "mul", ("mul_mat", "add"): "add", ("ssm_conv", "add"): "unary",
        }.get(pair)  # fmt: skip
        if partner is not None:
            alone = partner == "unary"
            found = self._next(
                place, partner, lambda node: _reads_first(node, nodes[place]) and (alone or self._is_there(node, 1))
            )
            if found is not None:
                self._mark(found, taken)
        if ops[place] == "unary":
            found = self._next(place, "mul", lambda node: self._can_gate(nodes[place], node))
            if found is not None:
                self._mark(found, taken)

    def _next(self, place: int, op: str, suits: Callable[[Seen], bool]) -> int | None:
        """Return the first node behind `place` that has this operation and suits."""
        places = range(place + 1, min(place + _PULLED, len(self._nodes)))
        return next((each for each in places if self._ops[each] == op and suits(self._nodes[each])), None)

    def _mark(self, place: int, taken: list[int]) -> None:
        taken.append(place)
        self._used[place] = True

    def _is_there(self, node: Seen, source: int) -> bool:
        """Return whether one of the sources of a node is no node's, or that of a node that was computed."""
        number = node.sources[source]
        return node.there[source] or number in self._done or (self._goes_on and number not in self._places)

    def _can_gate(self, unary: Seen, product: Seen) -> bool:
        """Return whether a product is computed with the activation that it reads (`ggml_vk_can_fuse_unary_mul`)."""
        if unary.number not in product.sources:
            return False
        is_first = product.sources[0] == unary.number
        other = product.tensor.src[int(is_first)]
        if not self._is_there(product, int(is_first)) or not (unary.tensor.type == product.tensor.type == other.type):
            return False
        if not _is_gapless(other) or not _is_gapless(unary.tensor.src[0]):
            return False
        small, large = (other, unary.tensor) if is_first else (unary.tensor, product.tensor.src[0])
        return all(b % a == 0 for a, b in zip(small.ne, large.ne, strict=True))

    def _pull_store(self, place: int, taken: list[int]) -> None:
        """Take the view of a node and the operation that stores it in a cache, if nothing else reads them."""
        nodes, view, stores = self._nodes, -1, -1
        for each in range(place + 1, min(place + _PULLED, len(nodes))):
            if self._used[each]:
                continue
            if view < 0 and self._ops[each] == "view" and _reads_first(nodes[each], nodes[place]):
                view = each
            elif view >= 0 and self._ops[each] == "set_rows" and _reads_first(nodes[each], nodes[view]):
                stores = each
                break
        if stores < 0 or nodes[place].uses != 1 or nodes[view].uses != 1:
            return
        if nodes[place].base != nodes[place].number or nodes[view].base != nodes[place].number:
            return
        between = (each for each in range(place + 1, stores) if not (self._used[each] or self._empty[each]))
        if not any(_needs(nodes[stores], nodes[each]) for each in between):
            self._mark(view, taken)
            self._mark(stores, taken)


def _reads_first(node: Seen, source: Seen) -> bool:
    return node.sources[0] == source.number


def _needs(node: Seen, before: Seen) -> bool:
    """Return whether a node has to be computed behind one before it: it reads it, what it views, or writes over what
    that reads."""
    if before.number in node.sources or node.base == before.base:
        return True
    if _is_empty(node.tensor) or _is_empty(before.tensor):
        return False
    return before.base in node.source_bases or node.base in before.source_bases


def _is_empty(node: Tensor) -> bool:
    return node.op in VIEW_OPS or node.op == "none"


def _has_leafs(rope: Seen) -> bool:
    """Return whether what a rotation reads besides its first source is no node's."""
    return all(rope.there[1:3])


def _is_gapless(tensor: Tensor) -> bool:
    """Return whether matrices follow each other without gaps; rows may be apart (`ggml_is_contiguous_1`)."""
    if is_contiguous(tensor):
        return True
    ne, nb = tensor.ne, tensor.nb
    return (ne[2] == 1 or nb[2] == nb[1] * ne[1]) and (ne[3] == 1 or nb[3] == nb[2] * ne[2])


_REACH = 64
"""How many nodes behind a piece are looked at: none is taken along from further behind."""

_BITS = 32
NodePlace = tuple[int, int]
"""A node: how many pieces behind, and its place in the piece."""


Followed = tuple[Piece, BackendMap | None]
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
            key = None if name is None else self._name_before(behind, name)
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
            before = self._name_before(behind, name)
            if before is not None:
                return self._named(behind - 1, before)
        return self._named(behind, key)

    def _named(self, behind: int, key: Key) -> int | None:
        """Return the slot here of what a piece behind knows by a name."""
        if behind:
            slot = None if is_early(key) else self._pieces[behind].slots.get(key)
            if slot is not None:
                return self._slot(behind, slot)
            before = self._name_before(behind, key)
            return None if before is None else self._named(behind - 1, before)
        found = self._slots.get(key)
        if found is None:
            found = self._slots[key] = len(self._reads)
            self._reads.append(0)
            passed = self._piece.section.name_after(key)
            if passed is not None:
                self._passed.append((found, passed))
        return found

    def _name_before(self, behind: int, key: Key) -> Key | None:
        """Return what the piece before one behind calls what that knows as `key`, None for what it cannot know."""
        section, way = self._pieces[behind].section, self._ways[behind]
        # What the last split begins with is copied before it, whoever else knows of that.
        before = section.name_before(key) if key[0] == "copy" or section.is_known_before(key) else None
        return before if before is None or way is None else way.key(before)


def _names(piece: Piece) -> dict[int, list[Key]]:
    """Return the names of each slot that has some."""
    found: dict[int, list[Key]] = {}
    for name, slot in piece.slots.items():
        found.setdefault(slot, []).append(name)
    return found
