"""The order in which ggml's Vulkan backend computes the nodes of a split, which decides how long results need memory.

Mirrors `ggml_vk_graph_optimize`. Before a graph is allocated, the backend moves independent nodes forward so that they
can run at the same time, and keeps nodes together that it fuses. The order is the same on all Vulkan devices: only the
computation checks which kernels a device has.

`reorder` orders the nodes of one split. `vulkan_sections.py` calls it for one section (mostly one layer's nodes) at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import NamedTuple

from msgspec import Struct

from engine.planning.memory.compute_graph.ggml.graph import VIEW_OPS, Tensor, is_contiguous

_NUM_TO_CHECK = 20
"""Number of nodes that are searched for nodes that can run together (`NUM_TO_CHECK`).

The search begins at the first unscheduled node.
"""
_PULL_REACH = 15
"""A node is fused only with nodes that are less than this number of nodes after it."""

_TOPK_MOE_EARLY_SOFTMAX = ("soft_max", "reshape", "argsort", "view", "get_rows")
_NORM_OF_WEIGHTS = ("reshape", "sum_rows", "clamp", "div", "reshape")
_TOPK_MOE_PATTERNS: tuple[tuple[str, ...], ...] = (
    (*_TOPK_MOE_EARLY_SOFTMAX, *_NORM_OF_WEIGHTS),
    ("unary", "reshape", "add", "argsort", "view", "get_rows", *_NORM_OF_WEIGHTS),
    ("unary", "sqrt", "reshape", "add", "argsort", "view", "get_rows", *_NORM_OF_WEIGHTS),
    _TOPK_MOE_EARLY_SOFTMAX,
    ("argsort", "view", "get_rows", "reshape", "soft_max", "reshape"),
)
"""Sequences of operations that select experts, and which Vulkan fuses.

The inputs of a sequence stay allocated until its last operation is done (`keep_topk_moe_pattern`).
"""
_TOPK_QSA_PATTERN = ("get_rows", "permute", "cont", "cpy", "reshape", "add", "top_k")
_HC_POST_GATE_PATTERN = ("scale", "unary", "scale", "hc_post")
_KEPT_PATTERNS: tuple[tuple[str, ...], ...] = (
    ("mul", "sin", "sqr", "mul", "add"),
    _TOPK_QSA_PATTERN,
    ("rms_norm", "mul", "add", "mul"),
    ("rms_norm", "mul", "add"),
    ("rms_norm", "mul", "rope", "view", "set_rows"),
    ("rms_norm", "view", "set_rows"),
    ("rope", "view", "set_rows"),
)
"""Sequences of operations that Vulkan computes one directly after another (`keep_pattern`)."""
_FUSED_PATTERNS = (*_TOPK_MOE_PATTERNS, *_KEPT_PATTERNS, _HC_POST_GATE_PATTERN)
_FUSED_NEXT = frozenset(
    {("mul_mat", "add"), ("mul_mat_id", "add_id"), ("mul_mat_id", "mul"), ("add", "add"), ("ssm_conv", "add"),
     ("ssm_conv", "unary")}
)  # fmt: skip
"""Pairs of neighbouring operations that run together although the second reads the result of the first."""
_FUSED_AFTER_VIEWS = frozenset({("rms_norm", "mul"), ("unary", "mul")})
"""Pairs of operations that run together if only views and scheduled nodes are between them.

The second reads the result of the first (`empty_or_scheduled_between`).
"""


SourceRef = tuple[int, int]
"""A source of a node: (index of the node in its split, index of the source)."""


class SeenNode(NamedTuple):
    """A node of a split, with tensors replaced by numbers.

    `number`, `base`: numbers of its result and of the result's `view_src`.
    `sources`, `source_bases`: numbers of its sources and of their `view_src`.
    `available`: for each source, whether no node of the split computes it: it is a leaf tensor, or a copy from another
    backend.
    `uses`: number of nodes that read the result.
    """

    tensor: Tensor
    number: int
    base: int
    sources: tuple[int, ...]
    source_bases: tuple[int, ...]
    available: tuple[bool, ...]
    uses: int


class Order(Struct, frozen=True):
    """The order in which a backend computes the nodes of a split.

    `indices`: former indices of the nodes, in the new order.
    `kept`: pairs of a node's former index and the sources that stay allocated until the node is computed
    (`add_alloc_dep`).
    """

    indices: tuple[int, ...]
    kept: tuple[tuple[int, tuple[SourceRef, ...]], ...]


def reorder(
    nodes: Sequence[SeenNode], *, end: int | None = None, used: Set[int] = frozenset(), goes_on: bool = False
) -> Order:
    """Return the order in which Vulkan computes the nodes of a split.

    The order ends when all nodes before `end` are computed. It contains later nodes only if Vulkan moves them forward.

    `end`: index of a node; None for the end of `nodes`.
    `used`: indices of nodes that are already computed.
    `goes_on`: whether the split began earlier, with nodes that are already computed and are not in `nodes`.
    """
    return _Reordering(nodes, used, goes_on=goes_on).run(len(nodes) if end is None else end)


class _Reordering:
    def __init__(self, nodes: Sequence[SeenNode], used: Set[int], *, goes_on: bool) -> None:
        self._nodes = nodes
        self._goes_on = goes_on
        self._ops = [node.tensor.op for node in nodes]
        self._indices = {node.number: index for index, node in enumerate(nodes)}
        self._empty = [op in VIEW_OPS or op == "none" for op in self._ops]
        self._is_src_of: dict[int, frozenset[int]] = {}
        self._used = [index in used for index in range(len(nodes))]
        self._used_nodes = {nodes[index].number for index in used}
        self._first_unused = 0
        self._order: list[int] = []
        self._kept: list[tuple[int, tuple[SourceRef, ...]]] = []

    def run(self, end: int) -> Order:
        # Nodes at the beginning may have been computed early, with an earlier section.
        self._take(())
        while self._first_unused < end:
            if not self._keep_pattern():
                self._take(self._current_set())
        return Order(tuple(self._order), tuple(self._kept))

    def _sources_before(self, index: int) -> frozenset[int]:
        """Return the indices of the nodes that must be computed before node `index`.

        Only the last `_NUM_TO_CHECK` nodes before `index` are searched.
        """
        found = self._is_src_of.get(index)
        if found is None:
            nodes = self._nodes
            # Callers ask for places less than `_NUM_TO_CHECK` after the first unused node, so all earlier nodes are
            # computed.
            before = range(max(0, index - _NUM_TO_CHECK), index)
            found = self._is_src_of[index] = frozenset(
                [each for each in before if _is_src_of(nodes[index], nodes[each])]
            )
        return found

    def _take(self, indices: Sequence[int]) -> None:
        for index in indices:
            self._order.append(index)
            self._used_nodes.add(self._nodes[index].number)
            self._used[index] = True
        while self._first_unused < len(self._nodes) and self._used[self._first_unused]:
            self._first_unused += 1

    def _match_pattern(self, pattern: Sequence[str], start: int) -> bool:
        """Return whether the nodes from `start` on have the operations `pattern`, and none of them is scheduled yet
        (`match_pattern`).
        """
        end = start + len(pattern)
        return end <= len(self._ops) and tuple(self._ops[start:end]) == pattern and not any(self._used[start:end])

    # ------------------------------------------------------------------ what stays together

    def _keep_pattern(self) -> bool:
        """Schedule the sequence of operations that begins at the first unscheduled node, if Vulkan keeps it together.

        Return whether there is such a sequence.
        """
        first = self._first_unused
        for pattern in _TOPK_MOE_PATTERNS:
            if self._match_pattern(pattern, first):
                last = first + len(pattern) - 1
                follows = last + 1 < len(self._ops) and self._ops[last + 1] == "scale"
                self._add_pattern_alloc_deps(pattern, last + 1 if follows else last)
                self._take(range(first, first + len(pattern)))
                return True
        for pattern in (*_KEPT_PATTERNS, _HC_POST_GATE_PATTERN):
            if self._match_pattern(pattern, first):
                if pattern is _HC_POST_GATE_PATTERN:
                    self._add_pattern_alloc_deps(pattern, first + len(pattern) - 1)
                self._take(range(first, first + len(pattern)))
                return True
        return False

    def _add_pattern_alloc_deps(self, pattern: Sequence[str], until: int) -> None:
        """Keep the inputs of a pattern's nodes allocated until the node `until` is computed (`add_pattern_alloc_deps`).

        The pattern begins at the first unscheduled node.
        """
        seen: set[int] = set()
        found: list[SourceRef] = []
        for index in range(self._first_unused, self._first_unused + len(pattern)):
            for number, source in enumerate(self._nodes[index].sources):
                if source not in seen:
                    found.append((index, number))
                    seen.add(source)
            seen.add(self._nodes[index].number)
        self._kept.append((until, tuple(found)))

    # ------------------------------------------------------------------ what is taken along

    def _current_set(self) -> list[int]:
        """Return the indices of the nodes to compute next (`current_set`).

        These are the first unscheduled node, nodes that can run at the same time, nodes fused with these, and views.
        """
        first, end = self._first_unused, min(self._first_unused + _NUM_TO_CHECK, len(self._nodes))
        taken = [first]
        for index in range(first + 1, end):
            if self._used[index] or self._empty[index] or self._starts_pattern(index):
                continue
            if self._is_ready(index, taken):
                taken.append(index)
                self._pull_fused(index, taken)
        # Views must not come between an `add` and the `rms_norm` or `add` that is fused with it.
        if self._ops[taken[-1]] != "add":
            for index in range(first + 1, end):
                if self._used[index] or not self._empty[index]:
                    continue
                waits = (each for each in self._sources_before(index) if each >= first)
                if all(self._used[each] or each in taken for each in waits):
                    taken.append(index)
        return taken

    def _starts_pattern(self, index: int) -> bool:
        """Return whether node `index` begins a sequence that Vulkan fuses, or is inside the QSA pattern
        (`in_qsa_pattern`).
        """
        if any(self._match_pattern(pattern, index) for pattern in _FUSED_PATTERNS):
            return True
        starts = range(max(0, index - len(_TOPK_QSA_PATTERN) + 1), index)
        return any(self._match_pattern(_TOPK_QSA_PATTERN, start) for start in starts)

    def _is_ready(self, index: int, taken: Sequence[int]) -> bool:
        waits = (each for each in self._sources_before(index) if each >= self._first_unused and not self._used[each])
        return all(each == taken[-1] and self._is_fused(each, index) for each in waits)

    def _is_fused(self, before: int, index: int) -> bool:
        pair = (self._ops[before], self._ops[index])
        if pair in _FUSED_AFTER_VIEWS:
            return all(self._used[between] or self._empty[between] for between in range(before + 1, index))
        return index == before + 1 and pair in _FUSED_NEXT

    def _pull_fused(self, index: int, taken: list[int]) -> None:
        """Add the nodes that are fused with node `index` to `taken`, the indices of the nodes that run together."""
        ops, nodes = self._ops, self._nodes
        pair = (ops[index - 1], ops[index])
        stored = index
        if pair == ("rms_norm", "mul"):
            found = self._next(
                index, "rope", lambda node: _has_src0(node, nodes[index]) and _other_sources_are_leafs(node)
            )
            if found is not None:
                stored = found
                self._schedule(found, taken)
        if ops[stored] in ("rope", "rms_norm"):
            self._pull_store(stored, taken)
        partner = {
            ("mul_mat_id", "add_id"): "mul", ("mul_mat", "add"): "add", ("ssm_conv", "add"): "unary",
        }.get(pair)  # fmt: skip
        if partner is not None:
            alone = partner == "unary"
            found = self._next(
                index, partner, lambda node: _has_src0(node, nodes[index]) and (alone or self._is_available(node, 1))
            )
            if found is not None:
                self._schedule(found, taken)
        if ops[index] == "unary":
            found = self._next(index, "mul", lambda node: self._can_gate(nodes[index], node))
            if found is not None:
                self._schedule(found, taken)

    def _next(self, index: int, op: str, suits: Callable[[SeenNode], bool]) -> int | None:
        """Return the index of the first node after node `index` that has the operation `op` and for which `suits` is
        true.

        None if there is none.
        """
        indices = range(index + 1, min(index + _PULL_REACH, len(self._nodes)))
        return next((each for each in indices if self._ops[each] == op and suits(self._nodes[each])), None)

    def _schedule(self, index: int, taken: list[int]) -> None:
        taken.append(index)
        self._used[index] = True

    def _is_available(self, node: SeenNode, source: int) -> bool:
        """Return whether a source of a node is a leaf tensor or is already computed (`used_node_set`).

        `source`: index among the node's sources.
        """
        number = node.sources[source]
        return node.available[source] or number in self._used_nodes or (self._goes_on and number not in self._indices)

    def _can_gate(self, unary: SeenNode, product: SeenNode) -> bool:
        """Return whether a product can be fused with the activation that it reads (`ggml_vk_can_fuse_unary_mul`)."""
        if unary.number not in product.sources:
            return False
        is_first = product.sources[0] == unary.number
        other = product.tensor.src[int(is_first)]
        if not self._is_available(product, int(is_first)) or not (
            unary.tensor.type == product.tensor.type == other.type
        ):
            return False
        if not _is_contiguous_1(other) or not _is_contiguous_1(unary.tensor.src[0]):
            return False
        small, large = (other, unary.tensor) if is_first else (unary.tensor, product.tensor.src[0])
        return all(b % a == 0 for a, b in zip(small.ne, large.ne, strict=True))

    def _pull_store(self, index: int, taken: list[int]) -> None:
        """Add the nodes that store the result of node `index` in a cache to `taken`, if the result has no other use.

        These nodes are a view of the result, and a `set_rows` that writes the view to the cache.

        `index`: index of the node. `taken`: indices of the nodes that run together.
        """
        nodes, view, stores = self._nodes, -1, -1
        for each in range(index + 1, min(index + _PULL_REACH, len(nodes))):
            if self._used[each]:
                continue
            if view < 0 and self._ops[each] == "view" and _has_src0(nodes[each], nodes[index]):
                view = each
            elif view >= 0 and self._ops[each] == "set_rows" and _has_src0(nodes[each], nodes[view]):
                stores = each
                break
        if stores < 0 or nodes[index].uses != 1 or nodes[view].uses != 1:
            return
        if nodes[index].base != nodes[index].number or nodes[view].base != nodes[index].number:
            return
        between = (each for each in range(index + 1, stores) if not (self._used[each] or self._empty[each]))
        if not any(_is_src_of(nodes[stores], nodes[each]) for each in between):
            self._schedule(view, taken)
            self._schedule(stores, taken)


def _has_src0(node: SeenNode, source: SeenNode) -> bool:
    return node.sources[0] == source.number


def _is_src_of(node: SeenNode, before: SeenNode) -> bool:
    """Return whether `node` must be computed after `before` (`is_src_of`).

    That is so if `node` reads the result of `before` or a view of it, or writes to memory that `before` reads.
    """
    if before.number in node.sources or node.base == before.base:
        return True
    if _is_empty(node.tensor) or _is_empty(before.tensor):
        return False
    return before.base in node.source_bases or node.base in before.source_bases


def _is_empty(node: Tensor) -> bool:
    return node.op in VIEW_OPS or node.op == "none"


def _other_sources_are_leafs(rope: SeenNode) -> bool:
    """Return whether all sources of a RoPE node except the first are leaf tensors."""
    return all(rope.available[1:3])


def _is_contiguous_1(tensor: Tensor) -> bool:
    """Return whether the tensor is contiguous from dimension 1 on (`ggml_is_contiguous_1`)."""
    if is_contiguous(tensor):
        return True
    ne, nb = tensor.ne, tensor.nb
    return (ne[2] == 1 or nb[2] == nb[1] * ne[1]) and (ne[3] == 1 or nb[3] == nb[2] * ne[2])
