"""Translation of layouts into llama.cpp's parameters, checked with its own split arithmetic."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.base.errors import LayoutError
from engine.base.values import replace
from engine.planning.layout.engine_parameters import (
    MAX_DEVICES,
    MAX_ENTRIES,
    EngineParameters,
    engine_parameters,
    entry_count,
)
from engine.planning.layout.layout import Layout, Override, make_layout, single_device
from tests.support.engine_split import assignment_of
from tests.support.selection import examples
from tests.support.strategies import layouts


@settings(max_examples=examples(400))
@given(layouts(max_layers=200, max_runs=MAX_ENTRIES - 1))
def test_the_engine_puts_every_layer_where_the_layout_says(layout: Layout) -> None:
    parameters = engine_parameters(layout, layout.n_layers)
    assert assignment_of(parameters, layout.n_layers) == (*layout.assignment(), layout.output_device)
    assert len(parameters.devices) == entry_count(layout) <= MAX_ENTRIES
    assert len(parameters.tensor_split) == MAX_DEVICES
    assert sum(parameters.tensor_split) == parameters.n_gpu_layers


@given(layouts(max_layers=60, max_runs=MAX_ENTRIES - 1), st.integers(1, 120))
def test_layers_that_the_file_does_not_list_go_with_its_last(layout: Layout, n_unlisted: int) -> None:
    n_layers = layout.n_layers
    parameters = engine_parameters(layout, n_layers, n_unlisted)
    assigned = assignment_of(parameters, n_layers + n_unlisted)
    assert (*assigned[:n_layers], assigned[-1]) == (*layout.assignment(), layout.output_device)
    assert set(assigned[n_layers:-1]) == {assigned[n_layers - 1]}


def test_shares_instead_of_counts_would_miss() -> None:
    """The model of the engine's arithmetic is sharp enough to see what whole counts are for."""
    misses = 0
    for n_layers in range(2, 120):
        layout = make_layout(n_layers, ["A"] * (n_layers // 3) + ["B"] * (n_layers - n_layers // 3))
        exact = engine_parameters(layout, n_layers)
        shares = tuple(round(count / exact.n_gpu_layers, 2) for count in exact.tensor_split)
        inexact = EngineParameters(
            n_gpu_layers=exact.n_gpu_layers, devices=exact.devices, tensor_split=shares, split_mode="layer"
        )
        misses += assignment_of(inexact, n_layers) != assignment_of(exact, n_layers)
    assert misses > 10


@pytest.mark.parametrize(
    ("assignment", "output", "n_gpu_layers", "devices", "counts"),
    [
        ("AAAA", "A", 5, "A", [5]),
        ("CCAA", "A", 3, "A", [3]),
        ("CCCC", "C", 0, "", []),
        ("CCCC", "A", 1, "A", [1]),
        ("AACC", "C", 5, "AC", [2, 3]),
        ("ACBC", "A", 5, "ACBCA", [1, 1, 1, 1, 1]),
        ("CABA", "B", 4, "ABAB", [1, 1, 1, 1]),
    ],
)
def test_leading_cpu_layers_are_left_out_and_other_cpu_runs_are_entries(
    assignment: str, output: str, n_gpu_layers: int, devices: str, counts: list[int]
) -> None:
    named = {"C": "CPU", "A": "A", "B": "B"}
    layout = make_layout(4, [named[letter] for letter in assignment], named[output])
    parameters = engine_parameters(layout, 4)
    assert parameters.n_gpu_layers == n_gpu_layers
    assert parameters.devices == tuple(named[letter] for letter in devices)
    assert parameters.tensor_split == tuple(map(float, counts + [0] * (MAX_DEVICES - len(counts))))


def test_one_device_mode_is_one_entry_and_on_cpu_none() -> None:
    on_device = engine_parameters(single_device(8, "A").with_split_mode("none"), 8)
    assert (on_device.split_mode, on_device.devices, on_device.n_gpu_layers) == ("none", ("A",), 9)
    on_host = engine_parameters(single_device(8, "CPU").with_split_mode("none"), 8)
    assert (on_host.split_mode, on_host.devices, on_host.n_gpu_layers) == ("layer", (), 0)


def test_devices_that_only_overrides_name_are_entries_without_layers() -> None:
    moved = (
        Override("B", part="ffn"),
        Override("CPU", part="all"),
        Override("A", part="ffn"),
        Override("B", part="all"),
    )
    parameters = engine_parameters(Layout(4, single_device(4, "A").runs, "A", overrides=moved), 4)
    assert (parameters.devices, parameters.n_gpu_layers, parameters.tensor_split[:3]) == (
        ("A", "B"),
        5,
        (5.0, 0.0, 0.0),
    )
    assert assignment_of(parameters, 4) == ("A",) * 5
    on_host = engine_parameters(Layout(4, single_device(4, "CPU").runs, "CPU", "none", overrides=moved), 4)
    assert (on_host.devices, on_host.n_gpu_layers, on_host.split_mode) == (("B", "A"), 0, "layer")
    assert assignment_of(on_host, 4) == ("CPU",) * 5


TENSORS = [
    "token_embd.weight",
    "output.weight",
    "blk.1.attn_q.weight",
    "blk.1.attn_norm.weight",
    "blk.1.ffn_norm.weight",
    "blk.1.ffn_up.weight",
    "blk.1.ffn_gate_inp.weight",
    "blk.1.ffn_gate_exps.weight",
    "blk.1.ffn_up_shexp.weight",
    "blk.1.ssm_in.weight",
    "blk.12.ffn_down_exps.weight",
    "blk.12.attn_kv_a_mqa.weight",
]


@pytest.mark.parametrize(
    ("override", "found"),
    [
        (Override("CPU", part="experts"), [7, 10]),
        (Override("CPU", part="experts", first=1, last=1), [7]),
        (Override("CPU", part="ffn", first=0, last=5), [4, 5, 6, 8]),
        (Override("CPU", part="attention"), [2, 3, 9, 11]),
        (Override("CPU", part="all", first=1, last=2), [2, 3, 4, 5, 6, 7, 8, 9]),
        (Override("CPU", part="all", first=12, last=12), [10, 11]),
        (Override("CPU", pattern="^output"), [1]),
    ],
)
def test_parts_become_patterns_that_find_their_weights(override: Override, found: list[int]) -> None:
    layout = Layout(16, single_device(16, "A").runs, "A", overrides=(override,))
    (translated,) = engine_parameters(layout, 16).overrides
    assert translated.device == "CPU"
    assert [index for index, name in enumerate(TENSORS) if re.search(translated.pattern, name)] == found


@given(st.integers(16, 60))
def test_what_the_rules_refuse_is_not_translated(n_layers: int) -> None:
    alternating = make_layout(n_layers, ["AB"[layer % 2] for layer in range(n_layers)])
    with pytest.raises(LayoutError, match=f"{n_layers} device entries"):
        engine_parameters(alternating, n_layers)
    with pytest.raises(LayoutError, match="the model has 5"):
        engine_parameters(alternating, 5)
    shares = tuple((f"A{number}", 1.0) for number in range(17))
    with pytest.raises(LayoutError, match="17 devices have a share"):
        engine_parameters(replace(single_device(4, "A0"), split_mode="tensor", tensor_split=shares), 4)


def test_shares_go_to_the_engine_as_they_are() -> None:
    layout = replace(
        make_layout(8, ["CPU"] * 3 + ["A"] * 5),
        split_mode="tensor",
        tensor_split=(("B", 3.0), ("C", 0.0), ("A", 1.5)),
        overrides=(Override("CPU", part="experts"),),
    )
    parameters = engine_parameters(layout, 8)
    assert parameters.devices == ("B", "A")
    assert parameters.tensor_split == (3.0, 1.5, *[0.0] * 14)
    assert (parameters.n_gpu_layers, parameters.split_mode, parameters.main_gpu) == (6, "tensor", 0)
    assert len(parameters.overrides) == 1
    row = engine_parameters(replace(layout, split_mode="row", main_device="A"), 8)
    assert (row.split_mode, row.main_gpu) == ("row", 1)
