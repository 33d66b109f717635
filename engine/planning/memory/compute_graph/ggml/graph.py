"""Tensors of a compute graph, without data: shapes, strides, sources and views, in the order they are computed in."""

from __future__ import annotations

from collections.abc import Sequence

from engine.model.gguf.tensor_table import TYPES_BY_NAME
from engine.planning.memory.effort import go_on

Shape = tuple[int, int, int, int]

VIEW_OPS = frozenset({"view", "reshape", "permute", "transpose"})
"""Operations that compute nothing; the scheduler passes over them."""

INPLACE_OPS = frozenset(
    {"add", "add_id", "sub", "mul", "div", "scale", "sqr", "sqrt", "unary", "rope", "rms_norm", "clamp", "soft_max",
     "fill"}
)  # fmt: skip
"""Operations whose result may take the place of a source (`ggml_op_can_inplace`)."""


class Tensor:
    """One tensor. `home` names the memory of weights and caches, None for what the allocator places.

    `backend` is where the architecture wants it to be computed, -1 where the scheduler may choose.
    `padding_bytes` is what backends that pad rows add to a weight. `is_precise`: a product that the engine wants to be
    computed from 32 bits.
    """

    __slots__ = (
        "backend", "home", "is_input", "is_leaf", "is_output", "is_precise", "is_weight", "n_bytes", "nb", "ne", "op",
        "padding_bytes", "root", "src", "type", "visited",
    )  # fmt: skip

    def __init__(
        self,
        op: str,
        type_name: str,
        ne: Shape,
        nb: Shape,
        src: list[Tensor],
        root: Tensor | None = None,
        n_bytes: int = -1,
    ) -> None:
        self.op = op
        self.type = type_name
        self.ne = ne
        self.nb = nb
        self.src = src
        self.root = root
        self.home: str | None = None
        self.is_weight = False
        self.is_input = False
        self.is_output = False
        self.is_leaf = False
        self.is_precise = False
        self.visited = False
        self.backend = -1
        self.padding_bytes = 0
        self.n_bytes = n_bytes if n_bytes >= 0 else _extent(type_name, ne, nb)


def _extent(type_name: str, ne: Shape, nb: Shape) -> int:
    """Return the bytes from the first to the last element (`ggml_nbytes`)."""
    if 0 in ne:
        return 0
    block = TYPES_BY_NAME[type_name].block_elements
    first = ne[0] * nb[0] // block
    return first + (ne[1] - 1) * nb[1] + (ne[2] - 1) * nb[2] + (ne[3] - 1) * nb[3]


def strides(type_name: str, ne: Shape) -> Shape:
    """Return the strides of a contiguous tensor, in bytes."""
    _, block, size = TYPES_BY_NAME[type_name]
    row = size * ne[0] // block
    return size, row, row * ne[1], row * ne[1] * ne[2]


def row_size(type_name: str, n_elements: int) -> int:
    """Return the bytes of a row of `n_elements`."""
    _, block, size = TYPES_BY_NAME[type_name]
    return n_elements // block * size


def shape4(ne: Sequence[int]) -> Shape:
    """Return `ne` with ones up to four dimensions."""
    padded = (*ne, 1, 1, 1, 1)
    return padded[0], padded[1], padded[2], padded[3]


class Graph:
    """Operations append nothing by themselves: `expand` puts a tensor and what it needs in order, as the engine's
    depth-first walk does. `fused`: operations that are one as long as they are on their layer's device, with the
    memory of that."""

    def __init__(self) -> None:
        self.nodes: list[Tensor] = []
        self.leafs: list[Tensor] = []
        self.inputs: list[Tensor] = []
        self.fused: list[tuple[Tensor, str]] = []

    def expand(self, tensor: Tensor) -> Tensor:
        """Append `tensor` and everything it needs that is not there yet."""
        if not tensor.visited:
            self._visit(tensor)
        return tensor

    def _visit(self, tensor: Tensor) -> None:
        go_on()
        tensor.visited = True
        for source in tensor.src:
            if not source.visited:
                self._visit(source)
        if tensor.is_leaf:
            self.leafs.append(tensor)
        else:
            self.nodes.append(tensor)

    # ------------------------------------------------------------------ leaves

    def new_input(self, type_name: str, *ne: int) -> Tensor:
        """Return a tensor that the host fills before the graph runs."""
        shape = shape4(ne)
        found = Tensor("none", type_name, shape, strides(type_name, shape), [])
        found.is_leaf = found.is_input = True
        self.inputs.append(found)
        return found

    def stored(self, home: str, type_name: str, *ne: int) -> Tensor:
        """Return a cache or state that lies in the memory `home`."""
        shape = shape4(ne)
        found = Tensor("none", type_name, shape, strides(type_name, shape), [])
        found.is_leaf = True
        found.home = home
        return found

    def scratch(self, type_name: str, *ne: int) -> Tensor:
        """Return a tensor that only has a place in memory until an operation fills it."""
        shape = shape4(ne)
        found = Tensor("none", type_name, shape, strides(type_name, shape), [])
        found.is_leaf = True
        return found

    def weight(self, home: str, ne: Sequence[int], n_bytes: int, padding_bytes: int) -> Tensor:
        """Return a weight of `n_bytes` that lies in the memory `home`."""
        shape = shape4(ne)
        found = Tensor("none", "f32", shape, (0, 0, 0, 0), [], n_bytes=n_bytes)
        found.is_leaf = found.is_weight = True
        found.home = home
        found.padding_bytes = padding_bytes
        return found

    # ------------------------------------------------------------------ operations

    def new(self, op: str, ne: Sequence[int], *src: Tensor, type_name: str = "f32") -> Tensor:
        """Return the contiguous result of an operation."""
        shape = shape4(ne)
        return Tensor(op, type_name, shape, strides(type_name, shape), list(src))

    def like(self, op: str, first: Tensor, *others: Tensor) -> Tensor:
        """Return a result of the first source's shape."""
        return Tensor(op, first.type, first.ne, strides(first.type, first.ne), [first, *others])

    def add(self, first: Tensor, second: Tensor) -> Tensor:
        return self.like("add", first, second)

    def add_to(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the sum in the place of `first`, whatever else reads that."""
        return Tensor("add", first.type, first.ne, first.nb, [first, second], first.root or first, first.n_bytes)

    def mul(self, first: Tensor, second: Tensor) -> Tensor:
        return self.like("mul", first, second)

    def scale(self, source: Tensor) -> Tensor:
        return self.like("scale", source)

    def unary(self, source: Tensor) -> Tensor:
        return self.like("unary", source)

    def mul_mat(self, matrix: Tensor, source: Tensor) -> Tensor:
        return self.new("mul_mat", (matrix.ne[1], source.ne[1], source.ne[2], source.ne[3]), matrix, source)

    def mul_mat_id(self, matrix: Tensor, source: Tensor, ids: Tensor) -> Tensor:
        return self.new("mul_mat_id", (matrix.ne[1], ids.ne[0], source.ne[2], 1), matrix, source, ids)

    def get_rows(self, source: Tensor, ids: Tensor) -> Tensor:
        kind = "i32" if source.type == "i32" else "f32"
        return self.new("get_rows", (source.ne[0], ids.ne[0], ids.ne[1], ids.ne[2]), source, ids, type_name=kind)

    def glu(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return a gated activation of two tensors."""
        return self.like("glu", gate, up)

    def glu_halves(self, source: Tensor) -> Tensor:
        """Return a gated activation of the two halves of each row."""
        return self.new("glu", (source.ne[0] // 2, *source.ne[1:]), source)

    def concat(self, first: Tensor, second: Tensor, dimension: int) -> Tensor:
        ne = list(first.ne)
        ne[dimension] += second.ne[dimension]
        return self.new("concat", ne, first, second, type_name=first.type)

    def cont(self, source: Tensor, *ne: int) -> Tensor:
        """Return a contiguous copy, of another shape if one is given."""
        return self.new("cont", ne or source.ne, source, type_name=source.type)

    def cast(self, source: Tensor, type_name: str) -> Tensor:
        return self.new("cpy", source.ne, source, type_name=type_name)

    def repeat(self, source: Tensor, *ne: int) -> Tensor:
        return self.new("repeat", ne, source, type_name=source.type)

    def sum_rows(self, source: Tensor) -> Tensor:
        return self.new("sum_rows", (1, *source.ne[1:]), source)

    def top_k(self, source: Tensor, count: int) -> Tensor:
        order = self.new("argsort", source.ne, source, type_name="i32")
        return self.view(order, (count, *order.ne[1:]), (0, *order.nb[1:]))

    # ------------------------------------------------------------------ views

    def view(self, source: Tensor, ne: Sequence[int], nb: Sequence[int] = (), op: str = "view") -> Tensor:
        """Return a view with the strides `nb`, of which missing ones follow as if contiguous."""
        shape = shape4(ne)
        _, block, size = TYPES_BY_NAME[source.type]
        nb1 = nb[1] if len(nb) > 1 else size * shape[0] // block
        nb2 = nb[2] if len(nb) > 2 else nb1 * shape[1]
        nb3 = nb[3] if len(nb) > 3 else nb2 * shape[2]
        return Tensor(op, source.type, shape, (size, nb1, nb2, nb3), [source], source.root or source)

    def reshape(self, source: Tensor, *ne: int) -> Tensor:
        return self.view(source, ne, op="reshape")

    def permute(self, source: Tensor, *axes: int) -> Tensor:
        """Return `source` with its dimension i at the place `axes[i]`."""
        ne, nb = [1] * 4, [0] * 4
        for old, new in enumerate(axes):
            ne[new], nb[new] = source.ne[old], source.nb[old]
        return Tensor("permute", source.type, shape4(ne), shape4(nb), [source], source.root or source, source.n_bytes)

    def transpose(self, source: Tensor) -> Tensor:
        ne, nb = source.ne, source.nb
        swapped = (ne[1], ne[0], ne[2], ne[3]), (nb[1], nb[0], nb[2], nb[3])
        # Where elements are in blocks the engine takes the rows that it then sees for shorter than they are.
        n_bytes = source.n_bytes if TYPES_BY_NAME[source.type].block_elements == 1 else _extent(source.type, *swapped)
        return Tensor("transpose", source.type, *swapped, [source], source.root or source, n_bytes)

    def write(self, op: str, target: Tensor, *src: Tensor) -> Tensor:
        """Return an operation that writes into `target` (a cache, a state or a view of one)."""
        sources = [*src, target]
        return Tensor(op, target.type, target.ne, target.nb, sources, target.root or target)


def is_contiguous(tensor: Tensor) -> bool:
    """Return whether the elements follow each other without gaps."""
    return tensor.nb == strides(tensor.type, tensor.ne)
