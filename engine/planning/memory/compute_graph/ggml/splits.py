"""Sections of the graph after pass 5 of the scheduler, which divides them into splits and adds copies of tensors.

A section is consecutive nodes, mostly those of one layer.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, field

from engine.planning.memory.compute_graph.ggml.names import EARLY, Key
from engine.planning.memory.compute_graph.ggml.sections import Section


class Copy(Struct, frozen=True):
    """A copy of a tensor in the memory of another backend: an input of a split (`tensor_id_copy`).

    `key`: name of the copy in other sections of the graph (the nodes of other layers).
    `base_key`: name of the copied tensor or of its `view_src`; None if no other section reads it.
    `backend`: index of the backend that reads the copy.
    """

    key: Key
    base_key: Key | None
    backend: int
    size_bytes: int


NodeAlloc = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""A node as the allocator sees it: (index, bytes, indices of sources whose memory it may reuse, indices of all
sources).

An index is that of a tensor in a `SplitSection`. The first one is that of the node's result; -1 if the result needs no
memory of its own.
"""


class SplitPart(Struct, frozen=True, eq=False):
    """The nodes of one split of the scheduler that are in one section (consecutive nodes, mostly one layer's).

    `is_new`: whether the split begins in this section; False if it began in an earlier one.
    `copies`: (copy, index of the original, index of the copy) for each input of the split that is first read here.
    """

    backend: int
    is_new: bool
    copies: list[tuple[Copy, int, int]] = field(default_factory=list)
    node_allocs: list[NodeAlloc] = field(default_factory=list)


class SplitSection(Struct, frozen=True, eq=False):
    """A section (consecutive nodes, mostly one layer's) after pass 5 of the scheduler, divided by the splits.

    Tensors are given by index: the tensors of `section` have the same indices as there, and the copies follow. In
    ggml-alloc these are the indices of `hash_node`.

    `use_counts`: uses of each tensor (`n_children` and `n_views` of ggml-alloc), plus one for an output.
    `indices`: index by name, for tensors that other sections read or compute.
    `passed`: the tensors that the next section may read, as (index here, name in the next section).
    `names_before`: the tensors read here that earlier sections make or read, by their names in the previous section.
    `early`: indices of the results of nodes that Vulkan moved to an earlier section (see `vulkan_order`).
    """

    section: Section
    parts: tuple[SplitPart, ...]
    use_counts: tuple[int, ...]
    indices: dict[Key, int]
    passed: tuple[tuple[int, Key], ...]
    names_before: frozenset[Key]
    early: tuple[int, ...] = ()


def make_split_section(
    section: Section,
    parts: tuple[SplitPart, ...],
    use_counts: Sequence[int],
    indices: dict[Key, int],
    passed: tuple[tuple[int, Key], ...],
    early: tuple[int, ...] = (),
) -> SplitSection:
    """Return the `SplitSection` with these fields, and compute its field `names_before`.

    `names_before` has the tensors read here that earlier sections make or read, by their names in the previous section.
    A section is consecutive nodes of the graph, mostly those of one layer.
    """
    copied = [(base, copy) for part in parts[1:] for copy, base, _ in part.copies]
    read = {name for name, index in indices.items() if use_counts[index]}
    read.update(copy.base_key for _, copy in copied if copy.base_key is not None)
    bases = {base for base, _ in copied}
    read.update((0, EARLY, index) for index in early if use_counts[index] or index in bases)
    before = (section.name_before(key) for key in read if section.is_known_before(key))
    return SplitSection(
        section=section,
        parts=parts,
        use_counts=tuple(use_counts),
        indices=indices,
        passed=passed,
        names_before=frozenset([name for name in before if name is not None]),
        early=early,
    )
