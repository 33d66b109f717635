"""A ggml graph without data: tensors with shapes, strides, sources and views, in the order of computation.

Mirrors `ggml_tensor` and `ggml_cgraph`. Methods of `Graph` that have a counterpart in ggml.h have its name.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.model.gguf.tensor_table import TYPES_BY_NAME
from engine.planning.memory.work_limit import check_limits

Shape = tuple[int, int, int, int]
"""`ne` or `nb`: elements or bytes in each of ggml's four dimensions, the fastest first."""

VIEW_OPS = frozenset({"view", "reshape", "permute", "transpose"})
"""Operations that only make a view (`ggml_is_view_op`); the scheduler skips them."""

INPLACE_OPS = frozenset(
    {"add", "add_id", "sub", "mul", "div", "scale", "sqr", "sqrt", "unary", "rope", "rms_norm", "clamp", "soft_max",
     "fill"}
)  # fmt: skip
"""Operations whose result may reuse the memory of a source (`ggml_op_can_inplace`); only those that builders use."""


class Tensor:
    """One tensor, like `ggml_tensor`.

    `buft`: name of the buffer type that contains a weight or cache; None if the allocator places the tensor.
    `view_src`: tensor whose memory a view uses, itself never a view; None if this is not a view.
    `backend`: index of the backend to which llama.cpp pins the node; -1 if the scheduler chooses it.
    `n_bytes`: size without padding (`ggml_nbytes`).
    `padding_bytes`: bytes that backends add if they pad rows of quantised weights.
    `is_leaf`: whether no operation computes it: an input, a weight, a cache or a tensor with undefined contents.
    `is_precise`: whether the matrix product is set to `GGML_PREC_F32`.
    `visited`: whether the tensor is in the graph.
    """

    __slots__ = (
        "backend", "buft", "is_input", "is_leaf", "is_output", "is_precise", "is_weight", "n_bytes", "nb", "ne", "op",
        "padding_bytes", "src", "type", "view_src", "visited",
    )  # fmt: skip

    def __init__(
        self,
        op: str,
        type_name: str,
        ne: Shape,
        nb: Shape,
        src: list[Tensor],
        view_src: Tensor | None = None,
        n_bytes: int = -1,
    ) -> None:
        self.op = op
        self.type = type_name
        self.ne = ne
        self.nb = nb
        self.src = src
        self.view_src = view_src
        self.buft: str | None = None
        self.is_weight = False
        self.is_input = False
        self.is_output = False
        self.is_leaf = False
        self.is_precise = False
        self.visited = False
        self.backend = -1
        self.padding_bytes = 0
        self.n_bytes = n_bytes if n_bytes >= 0 else nbytes(type_name, ne, nb)


def nbytes(type_name: str, ne: Shape, nb: Shape) -> int:
    """Return the bytes from the first to the last element (`ggml_nbytes`)."""
    if 0 in ne:
        return 0
    block = TYPES_BY_NAME[type_name].block_elements
    # `ggml_nbytes` adds up types of one element per block in another way. Both agree while `nb[0]` is the size of an
    # element; views that change `nb[0]` pass `n_bytes` themselves.
    first = ne[0] * nb[0] // block
    return first + (ne[1] - 1) * nb[1] + (ne[2] - 1) * nb[2] + (ne[3] - 1) * nb[3]


def strides(type_name: str, ne: Shape) -> Shape:
    """Return the strides of a contiguous tensor, in bytes."""
    _, block, size = TYPES_BY_NAME[type_name]
    row = size * ne[0] // block
    return size, row, row * ne[1], row * ne[1] * ne[2]


def row_size(type_name: str, n_elements: int) -> int:
    """Return the bytes of a row of `n_elements` (`ggml_row_size`)."""
    _, block, size = TYPES_BY_NAME[type_name]
    return n_elements // block * size


def shape4(ne: Sequence[int]) -> Shape:
    """Return `ne` padded with ones to four dimensions."""
    padded = (*ne, 1, 1, 1, 1)
    return padded[0], padded[1], padded[2], padded[3]


class Graph:
    """A graph that is being built. Nodes are added only by `build_forward_expand`, as in ggml.

    `fused`: (node, buffer type of its layer's device) for each node of a fused operation, such as flash attention.
    llama.cpp uses a kind of fused operation only if all nodes of this kind are on the devices of their layers. It
    checks this on its first graph (`llama_context::resolve_fused_ops`).
    """

    def __init__(self) -> None:
        self.nodes: list[Tensor] = []
        self.leafs: list[Tensor] = []
        self.inputs: list[Tensor] = []
        self.fused: list[tuple[Tensor, str]] = []

    def build_forward_expand(self, tensor: Tensor) -> Tensor:
        """Append `tensor` and the sources that are not in the graph yet (`ggml_build_forward_expand`)."""
        if not tensor.visited:
            self._visit_parents(tensor)
        return tensor

    def _visit_parents(self, tensor: Tensor) -> None:
        """Append a tensor after its sources (`ggml_visit_parents_graph`)."""
        # A header can describe a graph without end; this is the loop that it would run in.
        check_limits()
        tensor.visited = True
        for source in tensor.src:
            if not source.visited:
                self._visit_parents(source)
        if tensor.is_leaf:
            self.leafs.append(tensor)
        else:
            self.nodes.append(tensor)

    # ------------------------------------------------------------------ leaves

    def new_input(self, type_name: str, *ne: int) -> Tensor:
        """Return an input tensor, which the host fills before each computation (`ggml_set_input`)."""
        shape = shape4(ne)
        found = Tensor("none", type_name, shape, strides(type_name, shape), [])
        found.is_leaf = found.is_input = True
        self.inputs.append(found)
        return found

    def cache_tensor(self, buft: str, type_name: str, *ne: int) -> Tensor:
        """Return a tensor for a KV cache or recurrent state in the buffer type `buft`."""
        shape = shape4(ne)
        found = Tensor("none", type_name, shape, strides(type_name, shape), [])
        found.is_leaf = True
        found.buft = buft
        return found

    def scratch(self, type_name: str, *ne: int) -> Tensor:
        """Return a tensor with undefined contents, which an operation such as `ggml_fill` overwrites."""
        shape = shape4(ne)
        found = Tensor("none", type_name, shape, strides(type_name, shape), [])
        found.is_leaf = True
        return found

    def weight(self, buft: str, ne: Sequence[int], n_bytes: int, padding_bytes: int) -> Tensor:
        """Return a tensor for a weight of `n_bytes` bytes in the buffer type `buft`."""
        shape = shape4(ne)
        # Strides are 0: a graph uses only the shape and the size of a weight.
        found = Tensor("none", "f32", shape, (0, 0, 0, 0), [], n_bytes=n_bytes)
        found.is_leaf = found.is_weight = True
        found.buft = buft
        found.padding_bytes = padding_bytes
        return found

    # ------------------------------------------------------------------ operations

    def new(self, op: str, ne: Sequence[int], *src: Tensor, type_name: str = "f32") -> Tensor:
        """Return a node of the operation `op` with a contiguous result of shape `ne`."""
        shape = shape4(ne)
        return Tensor(op, type_name, shape, strides(type_name, shape), list(src))

    def like(self, op: str, first: Tensor, *others: Tensor) -> Tensor:
        """Return a node of the operation `op` whose result has the type and shape of `first` (`ggml_dup_tensor`)."""
        return Tensor(op, first.type, first.ne, strides(first.type, first.ne), [first, *others])

    def add(self, first: Tensor, second: Tensor) -> Tensor:
        return self.like("add", first, second)

    def add_inplace(self, first: Tensor, second: Tensor) -> Tensor:
        """Return a node that adds `second` to `first` in place (`ggml_add_inplace`)."""
        return Tensor("add", first.type, first.ne, first.nb, [first, second], first.view_src or first, first.n_bytes)

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
        # `ggml_get_rows` dequantises: the result is F32 for every type but I32.
        kind = "i32" if source.type == "i32" else "f32"
        return self.new("get_rows", (source.ne[0], ids.ne[0], ids.ne[1], ids.ne[2]), source, ids, type_name=kind)

    def glu_split(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return a gated activation of two tensors (`ggml_glu_split`)."""
        return self.like("glu", gate, up)

    def glu(self, source: Tensor) -> Tensor:
        """Return a gated activation of the two halves of each row (`ggml_glu`)."""
        return self.new("glu", (source.ne[0] // 2, *source.ne[1:]), source)

    def concat(self, first: Tensor, second: Tensor, dimension: int) -> Tensor:
        ne = list(first.ne)
        ne[dimension] += second.ne[dimension]
        return self.new("concat", ne, first, second, type_name=first.type)

    def cont(self, source: Tensor, *ne: int) -> Tensor:
        """Return a contiguous copy (`ggml_cont`), with the shape `ne` if it is given."""
        return self.new("cont", ne or source.ne, source, type_name=source.type)

    def cast(self, source: Tensor, type_name: str) -> Tensor:
        return self.new("cpy", source.ne, source, type_name=type_name)

    def repeat(self, source: Tensor, *ne: int) -> Tensor:
        return self.new("repeat", ne, source, type_name=source.type)

    def sum_rows(self, source: Tensor) -> Tensor:
        return self.new("sum_rows", (1, *source.ne[1:]), source)

    def argsort_top_k(self, source: Tensor, count: int) -> Tensor:
        """Return the indices of the `count` largest elements of each row (`ggml_argsort_top_k`: sort, then view)."""
        # The view keeps the whole sorted tensor alive, so even a small top-k costs one I32 for each element.
        order = self.new("argsort", source.ne, source, type_name="i32")
        return self.view(order, (count, *order.ne[1:]), (0, *order.nb[1:]))

    # ------------------------------------------------------------------ views

    def view(self, source: Tensor, ne: Sequence[int], nb: Sequence[int] = (), op: str = "view") -> Tensor:
        """Return a view of `source`. Missing strides in `nb` are those of a contiguous tensor."""
        shape = shape4(ne)
        _, block, size = TYPES_BY_NAME[source.type]
        # Offsets are left out. They change neither the size of a view nor how long its source stays alive.
        nb1 = nb[1] if len(nb) > 1 else size * shape[0] // block
        nb2 = nb[2] if len(nb) > 2 else nb1 * shape[1]
        nb3 = nb[3] if len(nb) > 3 else nb2 * shape[2]
        # As in `ggml_new_tensor_impl`: the `view_src` of a view of a view is the tensor that owns the memory.
        return Tensor(op, source.type, shape, (size, nb1, nb2, nb3), [source], source.view_src or source)

    def reshape(self, source: Tensor, *ne: int) -> Tensor:
        return self.view(source, ne, op="reshape")

    def permute(self, source: Tensor, *axes: int) -> Tensor:
        """Return a view with dimension i of `source` as dimension `axes[i]` (`ggml_permute`)."""
        ne, nb = [1] * 4, [0] * 4
        for old, new in enumerate(axes):
            ne[new], nb[new] = source.ne[old], source.nb[old]
        return Tensor(
            "permute", source.type, shape4(ne), shape4(nb), [source], source.view_src or source, source.n_bytes
        )

    def transpose(self, source: Tensor) -> Tensor:
        ne, nb = source.ne, source.nb
        swapped = (ne[1], ne[0], ne[2], ne[3]), (nb[1], nb[0], nb[2], nb[3])
        # `ggml_nbytes` divides ne[0] by the block size, and after a transpose ne[0] counts rows. So for quantised types
        # the result is smaller than the data; llama.cpp allocates copies by that number.
        n_bytes = source.n_bytes if TYPES_BY_NAME[source.type].block_elements == 1 else nbytes(source.type, *swapped)
        return Tensor("transpose", source.type, *swapped, [source], source.view_src or source, n_bytes)

    def write(self, op: str, target: Tensor, *src: Tensor) -> Tensor:
        """Return a node that writes into the memory of `target`: a cache, a state, or a view of one."""
        # `ggml_set_rows` has its target as the last source. The scheduler assigns the node by `view_src`, which is the
        # cache.
        sources = [*src, target]
        return Tensor(op, target.type, target.ne, target.nb, sources, target.view_src or target)


def is_contiguous(tensor: Tensor) -> bool:
    """Return whether the tensor's elements are adjacent in memory (`ggml_is_contiguous`)."""
    return tensor.nb == strides(tensor.type, tensor.ne)
