"""Sections of the graph (runs of nodes) after pass 5 of the scheduler: divided by splits, with the copies they read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.planning.memory.compute_graph.ggml.sections import EARLY, Key, Section


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a tensor in the memory of another backend: an input of a split (`tensor_id_copy`).

    `key`: name of the copy, by which other sections of the graph refer to it.
    `base_key`: name of the copied tensor or of its `view_src`; None if no other section reads it.
    `backend`: index of the backend that reads the copy.
    """

    key: Key
    base_key: Key | None
    backend: int
    size_bytes: int


NodeAlloc = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""A node as the allocator sees it: (slot, bytes, slots of parents whose memory it may reuse, slots of its sources).

A slot is the index of a tensor in the section, as that of a `hash_node` in ggml-alloc. The node's own slot is -1 if it
needs no memory of its own.
"""


@dataclass(frozen=True, slots=True, eq=False)
class SplitPart:
    """The nodes of one split of the scheduler that are in one section (a run of nodes, mostly a layer).

    `is_new`: whether the split begins here; False if it began in an earlier section.
    `copies`: (copy, slot of the original, slot of the copy) for each input of the split that is first read here.
    """

    backend: int
    is_new: bool
    copies: list[tuple[Copy, int, int]] = field(default_factory=list)
    node_allocs: list[NodeAlloc] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class SplitSection:
    """A section (a run of nodes, mostly a layer) after pass 5 of the scheduler, divided by the splits.

    Each tensor has a slot, like the index of a `hash_node` in ggml-alloc: its index in the section. Copies have the
    slots after all tensors.

    `use_counts`: uses of each slot (`n_children` and `n_views` of ggml-alloc), and one more for an output.
    `slots`: slot by name, for tensors that other sections read or compute.
    `passed`: (slot, name in the next section) of tensors that the next section may read.
    `names_before`: names, as used in the previous section, of the tensors that nodes and copies read.
    `early`: slots of tensors that an earlier section computes (see `vulkan_order`).
    """

    section: Section
    parts: tuple[SplitPart, ...]
    use_counts: tuple[int, ...]
    slots: dict[Key, int]
    passed: tuple[tuple[int, Key], ...]
    names_before: frozenset[Key]
    early: tuple[int, ...] = ()


def make_split_section(
    section: Section,
    parts: tuple[SplitPart, ...],
    use_counts: Sequence[int],
    slots: dict[Key, int],
    passed: tuple[tuple[int, Key], ...],
    early: tuple[int, ...] = (),
) -> SplitSection:
    """Return a `SplitSection` of these parts. Its `names_before` are computed from the uses of the tensors."""
    copied = [(base, copy) for part in parts[1:] for copy, base, _ in part.copies]
    read = {name for name, slot in slots.items() if use_counts[slot]}
    read.update(copy.base_key for _, copy in copied if copy.base_key is not None)
    bases = {base for base, _ in copied}
    read.update((0, EARLY, slot) for slot in early if use_counts[slot] or slot in bases)
    before = (section.name_before(key) for key in read if section.is_known_before(key))
    return SplitSection(
        section=section,
        parts=parts,
        use_counts=tuple(use_counts),
        slots=slots,
        passed=passed,
        names_before=frozenset([name for name in before if name is not None]),
        early=early,
    )
