"""Layout operations: each layer is there exactly once, in order, and neighbouring runs are on different devices."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.base.errors import LayoutError
from engine.planning.layout.layout import Layout, Override, Run, make_layout, single_device, split_evenly
from engine.planning.layout.moves import BoundaryMove, OutputMove, RangeMove, SharesMove
from engine.planning.layout.split_modes import with_shares
from tests.support.strategies import DEVICE_IDS, layouts

FOUR = make_layout(10, ["A"] * 3 + ["CPU"] * 2 + ["B"] * 3 + ["A"] * 2)
device_ids = st.sampled_from(DEVICE_IDS)


def assert_whole(layout: Layout, n_layers: int) -> None:
    covered = [layer for run in layout.runs for layer in range(run.first, run.last + 1)]
    assert covered == list(range(n_layers))
    devices = [run.device for run in layout.runs]
    assert all(left != right for left, right in itertools.pairwise(devices))


@given(st.data(), layouts(max_layers=60))
def test_any_sequence_of_edits_keeps_every_layer_once(data: st.DataObject, layout: Layout) -> None:
    n_layers = layout.n_layers
    layers = st.integers(0, n_layers - 1)
    for _ in range(data.draw(st.integers(1, 8))):
        edit = data.draw(st.sampled_from(["boundary", "range", "assign", "output", "replace", "mode"]))
        if edit == "boundary" and len(layout.runs) > 1:
            index = data.draw(st.integers(0, len(layout.runs) - 2))
            moved = layout.move_boundary(index, data.draw(st.integers(-5, n_layers + 5)))
            assert [run.device for run in moved.runs] == [run.device for run in layout.runs]
            layout = moved
        elif edit == "range":
            first, last = sorted((data.draw(layers), data.draw(layers)))
            device = data.draw(device_ids)
            moved = layout.move_range(first, last, device)
            before, after = layout.assignment(), moved.assignment()
            assert after == before[:first] + (device,) * (last - first + 1) + before[last + 1 :]
            layout = moved
        elif edit == "assign":
            layer = data.draw(st.integers(0, n_layers))
            layout = layout.assign(layer, data.draw(device_ids))
        elif edit == "output":
            device = data.draw(device_ids)
            assignment = layout.assignment()
            layout = layout.move_output(device)
            assert (layout.output_device, layout.assignment()) == (device, assignment)
        elif edit == "replace":
            old, new = data.draw(device_ids), data.draw(device_ids)
            layout = layout.replace_device(old, new)
            assert old == new or old not in layout.devices
        elif edit == "mode":
            layout = layout.with_split_mode(data.draw(st.sampled_from(["layer", "none"])))
        assert_whole(layout, n_layers)
        assert layout.assignment() == tuple(layout.device_of(layer) for layer in range(n_layers))


@given(st.lists(device_ids, min_size=1, max_size=60))
def test_a_layout_of_an_assignment_gives_it_back(assignment: list[str]) -> None:
    layout = make_layout(len(assignment), assignment)
    assert_whole(layout, len(assignment))
    assert layout.assignment() == tuple(assignment)
    assert layout.output_device == layout.device_of(len(assignment)) == assignment[-1]


@given(st.integers(1, 100), st.lists(device_ids, min_size=1, max_size=8, unique=True))
def test_even_splits_differ_by_at_most_one_layer(n_layers: int, devices: list[str]) -> None:
    layout = split_evenly(n_layers, devices)
    lengths = [run.length for run in layout.runs]
    assert [run.device for run in layout.runs] == devices[:n_layers]
    assert max(lengths) - min(lengths) <= 1


def test_a_boundary_stops_one_layer_before_its_neighbours() -> None:
    assert FOUR.move_boundary(1, 0).runs[1:3] == (Run("CPU", 3, 3), Run("B", 4, 7))
    assert FOUR.move_boundary(1, 99).runs[1:3] == (Run("CPU", 3, 6), Run("B", 7, 7))
    assert FOUR.move_boundary(1, 6).runs[1:3] == (Run("CPU", 3, 5), Run("B", 6, 7))


def test_a_range_that_meets_its_device_merges_with_it() -> None:
    assert FOUR.move_range(3, 7, "A").runs == (Run("A", 0, 9),)


def test_the_output_follows_the_last_layer_only_when_it_was_with_it() -> None:
    assert FOUR.move_range(8, 9, "B").output_device == "B"
    assert FOUR.move_range(9, 9, "CPU").output_device == "CPU"
    assert FOUR.move_range(0, 7, "B").output_device == "A"
    assert FOUR.move_output("CPU").move_range(8, 9, "B").output_device == "CPU"


def test_one_device_mode_gathers_on_the_largest_share_and_ends_with_the_first_other_device() -> None:
    gathered = FOUR.with_split_mode("none")
    assert (gathered.runs, gathered.output_device, gathered.split_mode) == ((Run("A", 0, 9),), "A", "none")
    assert gathered.move_range(0, 9, "B").split_mode == "none"
    assert gathered.move_range(0, 3, "B").split_mode == "layer"
    assert gathered.move_output("B").split_mode == "layer"


def test_modes_inside_layers_start_with_shares_by_layer_count_and_drop_them_again() -> None:
    split = FOUR.with_split_mode("row")
    assert split.tensor_split == (("A", 5.0), ("B", 3.0))
    assert split.replace_device("B", "A").tensor_split == (("A", 8.0),)
    assert split.with_split_mode("layer") == FOUR
    with pytest.raises(LayoutError, match=r"split_mode: .* other than the CPU"):
        single_device(4, "CPU").with_split_mode("tensor")


@pytest.mark.parametrize(
    ("runs", "place", "words"),
    [
        ([], "runs", "no layer is assigned"),
        ([Run("A", 1, 9)], "runs[0].layers", "must start at layer 0"),
        ([Run("A", 0, 3), Run("B", 5, 9)], "runs[1].layers", "layer 4 is on no device"),
        ([Run("A", 0, 3), Run("B", 6, 9)], "runs[1].layers", "layers 4-5 are on no device"),
        ([Run("A", 0, 5), Run("B", 5, 9)], "runs[1].layers", "overlaps"),
        ([Run("A", 0, 3), Run("B", 4, 6), Run("C", 0, 3)], "runs[2].layers", "layer order"),
        ([Run("A", 0, 8)], "runs[0].layers", "layers 0-9"),
        ([Run("A", 0, 10)], "runs[0].layers", "layers 0-9"),
        ([Run("A", 0, 3), Run("A", 4, 9)], "runs", "both on A"),
        ([Run("A", 3, 0)], "runs[0].layers", "in reverse order"),
    ],
)
def test_layouts_that_are_not_whole_are_refused_with_the_place(runs: list[Run], place: str, words: str) -> None:
    with pytest.raises(LayoutError) as raised:
        Layout(10, tuple(runs), "A")
    assert raised.value.location == place
    assert words in raised.value.reason


@pytest.mark.parametrize(
    ("override", "place"),
    [
        (Override("CPU"), "overrides[0]"),
        (Override("CPU", part="ffn", pattern="x"), "overrides[0]"),
        (Override("", part="ffn"), "overrides[0].device"),
        (Override("CPU", part="ffn", first=0, last=10), "overrides[0].layers"),
        (Override("CPU", part="ffn", first=3), "overrides[0].layers"),
        (Override("CPU", pattern="x", first=0, last=1), "overrides[0].layers"),
        (Override("CPU", pattern="("), "overrides[0].pattern"),
        (Override("CPU", pattern=""), "overrides[0].pattern"),
        (Override("CPU", pattern="a" * 2000), "overrides[0].pattern"),
        (Override("CPU", pattern="(?P<name>a)"), "overrides[0].pattern"),
        (Override("CPU", pattern="a{99999999999999999999}"), "overrides[0].pattern"),
    ],
)
def test_overrides_that_cannot_be_used_are_refused_with_the_place(override: Override, place: str) -> None:
    with pytest.raises(LayoutError) as raised:
        Layout(10, FOUR.runs, "A", overrides=(override,))
    assert raised.value.location == place


def test_asking_for_what_is_not_there_is_refused() -> None:
    with pytest.raises(LayoutError, match="no boundary 3; the number of boundaries is 3"):
        FOUR.move_boundary(3, 5)
    with pytest.raises(LayoutError, match="no layer 10"):
        FOUR.move_range(8, 10, "B")
    with pytest.raises(LayoutError, match="in reverse order"):
        FOUR.move_range(8, 7, "B")
    with pytest.raises(LayoutError, match="a list of 3 devices was given for 4 layers"):
        make_layout(4, ["A"] * 3)
    with pytest.raises(LayoutError, match="no devices"):
        split_evenly(4, [])


def test_moves_apply_themselves() -> None:
    rows = Layout(4, (Run("A", 0, 1), Run("B", 2, 3)), "B", split_mode="row", tensor_split=(("A", 1.0), ("B", 1.0)))
    assert BoundaryMove(0, 1).apply(FOUR) == FOUR.move_boundary(0, 1)
    assert RangeMove(2, 4, "B").apply(FOUR) == FOUR.move_range(2, 4, "B")
    assert OutputMove("CPU").apply(FOUR) == FOUR.move_output("CPU")
    assert SharesMove((("A", 75.0), ("B", 25.0))).apply(rows) == with_shares(rows, (("A", 75.0), ("B", 25.0)))
    with pytest.raises(LayoutError, match="no boundary 0; the number of boundaries is 0"):
        BoundaryMove(0, 1).apply(single_device(4, "A"))
