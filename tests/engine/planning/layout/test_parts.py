"""Parts placed by overrides: their devices afterwards, and few, readable overrides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.base.errors import LayoutError
from engine.base.values import replace
from engine.devices.device import CPU_ID
from engine.planning.layout.engine_parameters import tensor_overrides
from engine.planning.layout.layout import Layout, Override, make_layout
from engine.planning.layout.moves import EmbeddingMove, PartMove
from engine.planning.layout.parts import (
    EMBEDDING,
    EMBEDDING_PATTERN,
    embedding_device,
    part_device,
    place_embedding,
    place_part,
    place_parts,
)
from engine.planning.layout.patterns import pattern_finder
from tests.support.strategies import DEVICE_IDS, any_layouts

TEN = make_layout(10, ["A"] * 5 + ["B"] * 5)
_TENSORS = {
    "experts": ("ffn_up_exps.weight", "ffn_down_exps.weight"),
    "dense": ("attn_q.weight", "ffn_gate_inp.weight", "attn_norm.weight"),
}


def device_of(layout: Layout, name: str, home: str) -> str:
    """Return the device of a tensor, as llama.cpp finds it."""
    found = (each.device for each in tensor_overrides(layout) if pattern_finder(each.pattern)(name))
    return next(found, home)


def where(layout: Layout) -> dict[str, str]:
    """Return the device of a few tensors of every layer."""
    return {
        name: device_of(layout, name, layout.device_of(layer))
        for layer in range(layout.n_layers)
        for tails in _TENSORS.values()
        for name in (f"blk.{layer}.{tail}" for tail in tails)
    }


@given(st.data(), any_layouts(), st.sampled_from(["experts", "dense"]), st.sampled_from(DEVICE_IDS))
def test_a_part_is_where_it_was_placed_and_nothing_else_has_moved(
    data: st.DataObject, layout: Layout, part: str, device: str
) -> None:
    first = data.draw(st.integers(0, layout.n_layers - 1))
    last = data.draw(st.integers(first, layout.n_layers - 1))
    before, after = where(layout), where(place_part(layout, part, first, last, device))  # type: ignore[arg-type]
    placed = {f"blk.{layer}.{tail}" for layer in range(first, last + 1) for tail in _TENSORS[part]}
    assert after == before | dict.fromkeys(placed, device)


def test_neighbours_on_one_device_are_one_override() -> None:
    layout = place_part(place_part(TEN, "experts", 0, 2, CPU_ID), "experts", 3, 5, CPU_ID)
    assert layout.overrides == (Override(CPU_ID, "experts", 0, 5),)
    assert place_part(layout, "experts", 6, 9, CPU_ID).overrides == (Override(CPU_ID, "experts"),), "all layers"


def test_back_on_the_device_of_its_layer_a_part_needs_no_override() -> None:
    layout = place_part(TEN, "experts", 0, 9, CPU_ID)
    back = place_parts(layout, "experts", {layer: TEN.device_of(layer) for layer in range(10)})
    assert back == TEN
    assert place_part(layout, "experts", 2, 3, "A").overrides == (
        Override(CPU_ID, "experts", 0, 1),
        Override(CPU_ID, "experts", 4, 9),
    )


def test_a_later_override_that_would_move_a_part_is_answered_by_an_explicit_one() -> None:
    layout = replace(TEN, overrides=(Override(CPU_ID, pattern="exps"),))
    kept = place_part(layout, "experts", 0, 0, "A")
    assert kept.overrides == (Override("A", "experts", 0, 0), Override(CPU_ID, pattern="exps"))


def test_the_order_in_which_parts_are_placed_does_not_matter() -> None:
    one = place_part(place_part(TEN, "experts", 0, 1, CPU_ID), "dense", 4, 4, "B")
    other = place_part(place_part(TEN, "dense", 4, 4, "B"), "experts", 0, 1, CPU_ID)
    assert one == other
    assert part_device(one, "attention", 4) == part_device(one, "ffn", 4) == "B"
    assert part_device(one, "experts", 4) == "A"


def test_the_embedding_is_placed_and_comes_back() -> None:
    layout = place_embedding(place_part(TEN, "experts", 0, 1, CPU_ID), "A")
    assert embedding_device(layout) == device_of(layout, EMBEDDING, CPU_ID) == "A"
    assert embedding_device(TEN) == CPU_ID
    assert place_embedding(layout, CPU_ID).overrides == (Override(CPU_ID, "experts", 0, 1),)
    # An override of the embedding has no tensor in common with parts, so parts still merge.
    merged = place_part(layout, "experts", 2, 3, CPU_ID)
    assert merged.overrides == (Override(CPU_ID, "experts", 0, 3), Override("A", pattern=EMBEDDING_PATTERN))


def test_moves_apply_themselves_and_name_their_step() -> None:
    move = PartMove("experts", 0, 3, CPU_ID)
    assert move.apply(TEN) == place_part(TEN, "experts", 0, 3, CPU_ID)
    assert EmbeddingMove("B").apply(TEN) == place_embedding(TEN, "B")
    assert (move.text, PartMove("dense", 0, 0, "B").text, EmbeddingMove("B").text) == (
        "move experts",
        "move attention and dense feed-forward",
        "move the embedding",
    )


@pytest.mark.parametrize(("first", "last"), [(-1, 3), (3, 2), (0, 10)])
def test_layers_that_do_not_exist_are_refused(first: int, last: int) -> None:
    with pytest.raises(LayoutError, match="not a valid range within 0-9"):
        place_part(TEN, "experts", first, last, CPU_ID)
