"""The masks of attention, and the rows and matrices that go with each cache."""

from __future__ import annotations

from engine.memory.compute_graph.building.inputs import Masks
from engine.memory.compute_graph.building.sketch import Sketch


def cache_masks(sketch: Sketch, *, swa: bool = False, rotate: bool = True, k_only: bool = False) -> Masks:
    """Return the inputs of attention to the full or the sliding cache."""
    batch, new = sketch.batch, sketch.graph.new_input
    cells = batch.n_cells_swa if swa else batch.n_cells
    width = sketch.numbers.v_width_max if batch.turned_values else 1
    k_head, v_head = sketch.numbers.turned_heads[swa]
    k_turn = _rotation(batch.type_k, k_head) if rotate else 0
    v_turn = 64 if rotate and _rotation(batch.type_v, v_head) else 0
    return Masks(
        mask=new("f16" if batch.flash else "f32", cells, batch.n_tokens // batch.mask_streams, 1, batch.mask_streams),
        k_rows=new("i64", batch.n_tokens),
        v_rows=None if k_only else new("i64", batch.n_tokens * width),
        k_rotation=new("f32", k_turn, k_turn) if k_turn else None,
        v_rotation=new("f32", v_turn, v_turn) if v_turn else None,
    )


def indexer_masks(sketch: Sketch) -> Masks:
    """Return the inputs of an indexer, whose one operation wants the mask of flash attention."""
    batch, new = sketch.batch, sketch.graph.new_input
    turn = hadamard_size(sketch.numbers.indexer.head)
    return Masks(
        mask=new("f16", batch.n_cells, batch.n_tokens // batch.mask_streams, 1, batch.mask_streams),
        k_rows=new("i64", batch.n_tokens),
        v_rows=None,
        k_rotation=new("f32", turn, turn),
        v_rotation=None,
    )


def batch_mask(sketch: Sketch) -> Masks:
    """Return the mask of a model without a cache: every token against every other."""
    n_tokens = sketch.batch.n_tokens
    mask = sketch.graph.new_input("f16" if sketch.batch.flash else "f32", n_tokens, n_tokens)
    return Masks(mask, mask, None, None, None)


def _rotation(cache_type: str, head: int) -> int:
    """Return the rows of the Hadamard matrix for heads of this size in a cache of this type, 0 for none."""
    if cache_type in ("f32", "f16", "bf16") or head == 0 or head % 64:
        return 0
    return hadamard_size(head)


def hadamard_size(head: int) -> int:
    """Return the rows of the largest Hadamard matrix of at least 64 that divides heads of this size."""
    size = 64
    while head % (size * 2) == 0:
        size *= 2
    return size
