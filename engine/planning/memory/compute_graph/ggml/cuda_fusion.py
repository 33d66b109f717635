"""Tensors that stay allocated longer because CUDA fuses the nodes of expert selection, or of the experts' weighted sum.

Mirrors the part of `ggml_backend_cuda_graph_optimize` that adds allocation dependencies: the selection of experts
(`ggml_cuda_topk_moe_fusion`), and the weighted sum of their results (`ggml_cuda_match_moe_weighted_reduction`). The
order of nodes is not changed. Each pattern is within one layer, so one section (mostly one layer's nodes) is searched
at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from engine.base.values import replace
from engine.planning.memory.compute_graph.ggml.graph import Tensor, is_contiguous
from engine.planning.memory.compute_graph.ggml.scheduler import Backend
from engine.planning.memory.compute_graph.ggml.splits import NodeAlloc, SplitSection, make_split_section

_MOST_SUMMED_EXPERTS = 15
"""Largest number of experts in a fused weighted sum (`MOE_WEIGHTED_REDUCTION_MAX_EXPERTS`)."""
_LARGEST_POWER = 512
_OTHER_EXPERT_COUNTS = (288, 576)
"""Numbers of experts that the kernel supports besides powers of two (`ggml_cuda_should_use_topk_moe`)."""
_NORM_OF_WEIGHTS = ("reshape", "sum_rows", "clamp", "div", "reshape")

_Kept = dict[int, dict[int, int]]
"""Tensors that must stay allocated until a node is computed, by the node's index.

The value of a node is {index of a tensor: index of the tensor that owns its memory}. Copies have negative keys. The
tensors are in the order in which ggml adds the dependencies.
"""


def keep_fused(split_section: SplitSection, backends: Sequence[Backend]) -> SplitSection:
    """Return the section with the allocation dependencies that CUDA adds for fused expert nodes (`add_alloc_dep`).

    A section has consecutive nodes of the graph, mostly one layer's.
    """
    parts = split_section.parts
    used = [backends[part.backend] for part in parts if part.backend >= 0]
    # Vulkan's order counts nodes by their indices, which dependencies would shift. It is in no section with CUDA but
    # at the border of two layers.
    if not any(backend.fuses for backend in used) or any(backend.reorders for backend in used):
        return split_section
    found = _Matcher(split_section)
    start, kept = 0, _Kept()
    for part in parts:
        end = start + len(part.node_allocs)
        if part.backend >= 0 and backends[part.backend].fuses:
            found.match(start, end, kept)
        start = end
    if not kept:
        return split_section
    use_counts, node, fused = [*split_section.use_counts], 0, []
    for part in parts:
        node_allocs: list[NodeAlloc] = []
        for each in part.node_allocs:
            node_allocs.append(each)
            if node in kept:
                indices = tuple(kept[node].values())
                for index in indices:
                    use_counts[index] += 1
                # ggml adds a node with GGML_OP_NONE, which needs no memory and only reads.
                node_allocs.append((-1, 0, (), indices))
            node += 1
        fused.append(replace(part, node_allocs=node_allocs))
    return make_split_section(
        split_section.section,
        tuple(fused),
        use_counts,
        split_section.indices,
        split_section.passed,
        split_section.early,
    )


class _Matcher:
    """Finds the sequences of nodes that CUDA fuses, in one section of the graph (mostly one layer's nodes).

    Arguments such as `node` are indices of nodes in the section. Results of nodes are known by their number: the index
    of the tensor among the tensors of the section.
    """

    def __init__(self, split_section: SplitSection) -> None:
        section = split_section.section
        self._bases, self._nodes, self._ops, self._uses = (
            section.bases, section.nodes, section.ops, section.read_counts,
        )  # fmt: skip
        self._of = section.tensors
        self._indices = [row[3] for part in split_section.parts for row in part.node_allocs]

    def _number(self, node: int) -> int:
        """Return the index in the section (the nodes of one layer) of the tensor that `node` computes."""
        return self._nodes[node].number

    def _tensor(self, node: int) -> Tensor:
        """Return the tensor that `node` computes."""
        return self._of[self._nodes[node].number]

    def _sources(self, node: int) -> tuple[int, ...]:
        """Return the index in the section (the nodes of one layer) of each tensor that `node` reads.

        If the node reads a copy from another backend instead, the value is -1 minus the index of the copy.
        """
        computed, indices = self._nodes[node], self._indices[node]
        return tuple(
            [
                source if index == base else -1 - index
                for source, base, index in zip(computed.sources, computed.bases, indices, strict=True)
            ]
        )

    def match(self, start: int, end: int, kept: _Kept) -> None:
        """Search the nodes `start` to `end` - 1 of one split for fused sequences.

        The tensors that CUDA keeps allocated for them are added to `kept`.
        """
        node = start
        while node < end:
            if self._ops[node] == "mul":
                node = self._keep_sum(node, end, kept)
            if self._ops[node] in ("soft_max", "unary"):
                node = self._keep_choice(node, end, kept)
            node += 1

    # ------------------------------------------------------------------ weighted sum

    def _keep_sum(self, node: int, end: int, kept: _Kept) -> int:
        """If a weighted sum of experts begins at `node`, add its operands to `kept`.

        Return the index of the sum's last node; `node` if no sum begins there.

        `end`: index after the last node of the split.
        `kept`: tensors that stay allocated, by the index of the node after which they may be freed. This dict is
        changed.
        """
        first, parts = self._number(node), self._split_mul(node)
        weighted, operands = node, parts
        if node + 1 < end and self._ops[node + 1] == "mul" and parts is not None:
            # (experts * scale of the expert) * weight of the router
            route = self._split_mul(node + 1)
            if route is not None and self._sources(node + 1)[route[0]] == first:
                weighted = node + 1
        if operands is None:
            return node
        tensor = self._tensor(weighted)
        n_used, n_tokens = tensor.ne[1], tensor.ne[2] * tensor.ne[3]
        # The product is followed by one view for each expert and `n_used` - 1 additions.
        last = weighted + 2 * n_used - 1
        if not 2 <= n_used <= _MOST_SUMMED_EXPERTS or last >= end or n_tokens <= 0:
            return node
        if not self._is_sum(weighted, last) or not self._can_fuse(range(node, last + 1), {last}):
            return node
        until = kept.setdefault(last, {})
        self._keep_source(until, node, operands[0])
        if weighted != node:
            route = self._split_mul(weighted)
            assert route is not None
            self._keep_source(until, weighted, route[1])
        self._keep_source(until, node, operands[1])
        return last

    def _split_mul(self, node: int) -> tuple[int, int] | None:
        """Return (index of the experts' results, index of their weights) among the two sources of `node`, a `mul`.

        None if the node does not multiply experts' results with weights.
        """
        product = self._tensor(node)
        if product.type != "f32" or not is_contiguous(product):
            return None
        for full, weights in ((0, 1), (1, 0)):
            each, other = product.src[full], product.src[weights]
            if _is_plain(each) and each.ne == product.ne and _is_plain(other) and other.ne == (1, *product.ne[1:]):
                return full, weights
        return None

    def _is_sum(self, weighted: int, last: int) -> bool:
        """Return whether the nodes `weighted` + 1 to `last` sum the results of the experts.

        These nodes are a view of each expert's result, and the additions of these views.
        """
        product, total = self._tensor(weighted), self._tensor(last)
        n_used, shape = product.ne[1], (product.ne[0], product.ne[2] * product.ne[3], 1, 1)
        views: list[int] = []
        previous, n_adds = -1, 0
        for node in range(weighted + 1, last + 1):
            tensor, sources = self._tensor(node), self._sources(node)
            if tensor.op == "view":
                # Offsets are not known here. llama.cpp makes the views in the order of the experts.
                if len(views) == n_used or sources[0] != self._number(weighted):
                    return False
                if tensor.ne != shape or tensor.nb[1] != product.nb[2]:
                    return False
                views.append(self._number(node))
                continue
            if tensor.op != "add" or len(views) < 2 or n_adds + 1 >= len(views):
                return False
            if sources != (previous if n_adds else views[0], views[n_adds + 1]):
                return False
            previous = self._number(node)
            n_adds += 1
        return len(views) == n_used and n_adds == n_used - 1 and is_contiguous(total) and total.ne == shape

    # ------------------------------------------------------------------ choice of experts

    def _keep_choice(self, node: int, end: int, kept: _Kept) -> int:
        """If a selection of experts begins at `node`, add its tensors to `kept`.

        The tensors stay allocated until the node after the selection. Return the index of the selection's last node;
        `node` if no selection begins there.

        `end`: index after the last node of the split.
        """
        ops = self._choice(node, end)
        if ops is None:
            return node
        last = node + ops - 1
        ids = next(each for each in range(node, last) if self._ops[each] == "view")
        if not self._can_fuse(range(node, last + 1), {ids, last}) or not self._has_kernel(node, last, ids):
            return node
        # The node after the choice may be the first of the next split.
        if last + 1 < len(self._ops):
            until = kept.setdefault(last + 1, {})
            for each in range(node, last + 1):
                until.setdefault(self._number(each), self._bases[self._number(each)])
                for source in range(len(self._indices[each])):
                    self._keep_source(until, each, source)
        return last

    def _choice(self, node: int, end: int) -> int | None:
        """Return the number of nodes of the expert selection that begins at `node`; None if there is none.

        Mirrors `ggml_cuda_topk_moe_fusion`.

        `end`: index after the last node of the split.
        """
        ops, number, sources = self._ops, self._number, self._sources
        probs = node
        if ops[node] == "unary" and node + 1 < end and ops[node + 1] == "sqrt":
            if sources(node + 1)[0] != number(node):
                return None
            probs += 1
        at = probs + 1
        if at >= end or ops[at] != "reshape" or sources(at)[0] != number(probs):
            return None
        reshaped, choice = at, probs
        at += 1
        if at < end and ops[at] == "add" and sources(at)[0] == number(probs):
            choice = at
            at += 1
        if at + 2 >= end or (ops[at], ops[at + 1], ops[at + 2]) != ("argsort", "view", "get_rows"):
            return None
        if sources(at)[0] != number(choice) or sources(at + 1)[0] != number(at):
            return None
        if sources(at + 2) != (number(reshaped), number(at + 1)):
            return None
        at += 3
        if at < end and ops[at] == "reshape":
            if not self._is_norm(at, end):
                return at - node
            at += len(_NORM_OF_WEIGHTS)
        if at < end and ops[at] == "scale" and sources(at)[0] == number(at - 1):
            at += 1
        return at - node

    def _is_norm(self, at: int, end: int) -> bool:
        """Return whether the nodes from `at` on divide the weights of the selected experts by their sum.

        `end`: index after the last node of the split.
        """
        if at + len(_NORM_OF_WEIGHTS) > end or tuple(self._ops[at : at + len(_NORM_OF_WEIGHTS)]) != _NORM_OF_WEIGHTS:
            return False
        number, sources = self._number, self._sources
        if any(sources(each)[0] != number(each - 1) for each in (at, at + 1, at + 2, at + 4)):
            return False
        return sources(at + 3) == (number(at), number(at + 2))

    def _has_kernel(self, node: int, last: int, ids: int) -> bool:
        """Return whether CUDA has a kernel for an expert selection (`ggml_cuda_should_use_topk_moe`).

        `node`, `last`: indices of its first and last node.
        `ids`: index of the node whose result is the ids of the selected experts.
        """
        gate, view = self._tensor(node), self._tensor(ids)
        n_experts = view.nb[1] // view.nb[0]
        is_power = n_experts & (n_experts - 1) == 0 and n_experts <= _LARGEST_POWER
        if not is_power and n_experts not in _OTHER_EXPERT_COUNTS:
            return False
        if not is_contiguous(gate.src[0]) or not is_contiguous(self._tensor(last)):
            return False
        return gate.op != "soft_max" or len(gate.src) == 1

    # ------------------------------------------------------------------ both

    def _keep_source(self, until: dict[int, int], node: int, source: int) -> None:
        until.setdefault(self._sources(node)[source], self._indices[node][source])

    def _can_fuse(self, nodes: range, outputs: set[int]) -> bool:
        """Return whether `nodes` can be fused (`ggml_can_fuse_subgraph`).

        They can if no other node reads their results. The results of the nodes `outputs` may be read.
        """
        inside = Counter(source for node in nodes for source in self._sources(node))
        numbers = {self._number(node) for node in nodes}
        for node in nodes:
            number = self._number(node)
            if node in outputs:
                continue
            if self._tensor(node).is_output or inside[number] != self._uses[number]:
                return False
            base = self._bases[number]
            if base != number and base not in numbers:
                return False
        return True


def _is_plain(tensor: Tensor) -> bool:
    return tensor.type == "f32" and is_contiguous(tensor)
