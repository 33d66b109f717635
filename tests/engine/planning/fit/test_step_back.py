"""Stepping back from layouts that do not fit: it ends, never repeats one, asks less of the refusing device."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import CPU_ID, Rig
from engine.model.gguf.reader import read_model
from engine.planning.fit.step_back import MAX_TENTHS, NextLayout, Refusal, Tried, change_text, step_back
from engine.planning.fit.strategies.constraints import NO_CONSTRAINTS, Constraints
from engine.planning.layout.layout import Layout, Override, SplitMode, make_layout, single_device
from engine.planning.layout.parts import Pin
from engine.planning.layout.split_modes import layout_in_mode, with_shares
from engine.planning.memory.estimate import Grade
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.report import DeviceRow
from engine.planning.settings.context_settings import ContextSettings
from tests.support.load_specs import plan_of
from tests.support.models import write_header_only
from tests.support.plans import make_report
from tests.support.previews import make_gpu, make_rig
from tests.support.selection import examples
from tests.support.strategies import rigs

N_LAYERS = 16
CONTEXT = ContextSettings(n_ctx=4096)
TWO_CARDS = make_rig(make_gpu("CUDA0", 8), make_gpu("CUDA1", 8))
HALVES = make_layout(N_LAYERS, ["CUDA0"] * 8 + ["CUDA1"] * 8)
MOST_STEPS = 64
"""Far more than a person would wait for; what does not end within it does not end."""


@cache
def memory_of(name: str = "dense") -> ModelMemory:
    shape: dict[str, Any] = {"n_layers": N_LAYERS, "n_embd": 4096, "n_head": 32, "n_ff": 14336, "n_vocab": 32000}
    if name == "mixture":
        shape |= {"n_expert": 8, "n_expert_used": 2, "n_ff": 2048}
    with TemporaryDirectory() as folder:
        return ModelMemory(read_model(write_header_only(Path(folder) / "model.gguf", **shape)))


def rows_of(memory: ModelMemory, rig: Rig, layout: Layout) -> tuple[DeviceRow, ...]:
    return make_report(memory, rig, layout, CONTEXT).rows


def needs_of(memory: ModelMemory, rig: Rig, layout: Layout) -> dict[str, int]:
    return {row.id: row.need_bytes for row in rows_of(memory, rig, layout)}


class World:
    """A rig whose devices really give `given_bytes`, whatever they report; `history` is what was tried on it."""

    def __init__(self, memory: ModelMemory, rig: Rig, given_bytes: Mapping[str, int], *, tells_free: bool) -> None:
        self.memory, self.rig, self.given_bytes, self.tells_free = memory, rig, given_bytes, tells_free
        self.history: list[Tried] = []

    def load(self, layout: Layout) -> Refusal | None:
        """Return who refuses: weights are asked for first, then cache, then buffers."""
        for row in rows_of(self.memory, self.rig, layout):
            placed = 0
            buffers_bytes = row.compute_bytes + row.output_bytes + row.answering_bytes
            for requested in (row.weights_bytes, row.kv_cache_bytes, buffers_bytes):
                if placed + requested > self.given_bytes[row.id]:
                    free = self.given_bytes[row.id] - placed if self.tells_free else None
                    return Refusal(row.id, requested, free, placed)
                placed += requested
        return None

    def run(self, layout: Layout, constraints: Constraints = NO_CONSTRAINTS) -> Layout | None:
        """Step back until a layout loads; None: nothing was left to try."""
        backoff_tenths = 0
        for _ in range(MOST_STEPS):
            rows = rows_of(self.memory, self.rig, layout)
            refusal = self.load(layout)
            if refusal is None:
                return layout
            self.history.append(Tried(layout, rows, refusal, backoff_tenths))
            step = step_back(plan_of(self.memory, self.rig, layout, CONTEXT), self.history, constraints)
            if step is None:
                return None
            layout, backoff_tenths = step.layout, step.backoff_tenths
        raise AssertionError(f"still going after {[each.layout.runs for each in self.history]}")


def step_of(
    rig: Rig, *history: Tried, constraints: Constraints = NO_CONSTRAINTS, model: str = "dense"
) -> NextLayout | None:
    return step_back(plan_of(memory_of(model), rig, history[-1].layout, CONTEXT), history, constraints)


def tried(layout: Layout, device: str, requested: int, free: int | None, placed: int = 0) -> Tried:
    rows = rows_of(memory_of(), TWO_CARDS, layout)
    return Tried(layout, rows, Refusal(device, requested, free, placed))


# ------------------------------------------------------------------ one step


def test_layers_go_to_the_neighbour_that_has_room() -> None:
    needs = needs_of(memory_of(), TWO_CARDS, HALVES)
    step = step_of(TWO_CARDS, tried(HALVES, "CUDA1", needs["CUDA1"], needs["CUDA1"] * 9 // 10))
    assert step is not None
    moved = step.layout.runs[0].length - 8
    assert [run.device for run in step.layout.runs] == ["CUDA0", "CUDA1"]
    assert 1 <= moved <= 3
    assert step.change == (f"layers 8-{7 + moved} from CUDA1 to CUDA0" if moved > 1 else "layer 8 from CUDA1 to CUDA0")
    assert step.backoff_tenths == 1


def test_several_devices_with_a_little_room_come_before_the_cpu() -> None:
    layout = single_device(N_LAYERS, "CUDA0")
    small = (replace(make_gpu(name, 1.0, used_gib=0), margin_bytes=0) for name in ("CUDA1", "CUDA2"))
    rig = make_rig(TWO_CARDS.devices[0], *small, host_gib=64)
    need = needs_of(memory_of(), rig, layout)["CUDA0"]
    refused = Tried(layout, rows_of(memory_of(), rig, layout), Refusal("CUDA0", need, need * 2 // 3, 0))
    step = step_of(rig, refused)
    assert step is not None
    assert set(step.layout.devices) == {"CUDA0", "CUDA1", "CUDA2"}


def test_where_all_devices_are_full_the_front_goes_to_the_cpu() -> None:
    needs = needs_of(memory_of(), TWO_CARDS, HALVES)
    cards = (replace(each, free_bytes=needs[each.id] + MIB, margin_bytes=0) for each in TWO_CARDS.devices)
    full = replace(TWO_CARDS, devices=tuple(cards))
    step = step_of(full, tried(HALVES, "CUDA1", needs["CUDA1"], needs["CUDA1"] - MIB))
    assert step is not None
    first, second, third = step.layout.runs
    assert (first.device, second.device, third.device) == (CPU_ID, "CUDA0", "CUDA1")
    assert second.length <= 8
    assert third.length < 8
    assert step.layout.output_device == "CUDA1"


def test_what_a_probe_finds_beyond_the_estimate_is_kept_free() -> None:
    layout = single_device(N_LAYERS, "CUDA0")
    need = needs_of(memory_of(), TWO_CARDS, layout)["CUDA0"]
    tight = make_rig(replace(make_gpu("CUDA0", 8), free_bytes=need, margin_bytes=0), host_gib=64)
    rows = tuple(
        replace_row(row, row.need_bytes + 300 * MIB) if row.id == "CUDA0" else row
        for row in rows_of(memory_of(), tight, layout)
    )
    step = step_of(tight, Tried(layout, rows))
    assert step is not None
    assert step.backoff_tenths == 0
    assert needs_of(memory_of(), tight, step.layout)["CUDA0"] + 300 * MIB <= need
    one_more = step.layout.move_boundary(0, step.layout.runs[1].first - 1)
    assert needs_of(memory_of(), tight, one_more)["CUDA0"] + 300 * MIB > need


def replace_row(row: DeviceRow, need_bytes: int) -> DeviceRow:
    more = need_bytes - row.need_bytes
    return msgspec.structs.replace(row, need_bytes=need_bytes, compute_bytes=row.compute_bytes + more)


@pytest.mark.parametrize("mode", ["none", "layer"])
def test_the_split_mode_stays(mode: Any) -> None:
    layout = replace(single_device(N_LAYERS, "CUDA0"), split_mode=mode)
    need = needs_of(memory_of(), TWO_CARDS, layout)["CUDA0"]
    step = step_of(TWO_CARDS, tried(layout, "CUDA0", need, need - MIB))
    assert step is not None
    assert step.layout.split_mode == mode
    if mode == "none":
        assert step.layout.devices == ("CUDA1",)
        assert step.change == "layers 0-15 from CUDA0 to CUDA1, the output layer from CUDA0 to CUDA1"


def test_shares_change_in_mode_tensor() -> None:
    memory = memory_of()
    split = layout_in_mode(single_device(N_LAYERS, "CUDA0"), "tensor", TWO_CARDS)
    halves = with_shares(split, (("CUDA0", 1.0), ("CUDA1", 1.0)))
    needs = needs_of(memory, TWO_CARDS, halves)
    step = step_of(TWO_CARDS, tried(halves, "CUDA1", needs["CUDA1"], needs["CUDA1"] * 3 // 4))
    assert step is not None
    shares = dict(step.layout.tensor_split)
    assert step.layout.split_mode == "tensor"
    assert shares["CUDA0"] > shares["CUDA1"] > 0
    before, after = (rows_of(memory, TWO_CARDS, each)[1] for each in (halves, step.layout))
    assert after.need_bytes - after.overhead_bytes <= before.need_bytes * 3 // 4
    assert "%" in step.change


def test_pinned_layers_and_overrides_stay_and_devices_that_are_off_get_nothing() -> None:
    layout = replace(HALVES, overrides=(Override(CPU_ID, part="ffn", first=3, last=4),))
    needs = needs_of(memory_of(), TWO_CARDS, layout)
    constraints = Constraints(pins=(Pin("CUDA1", 8, 9),), off=frozenset({"CUDA0"}))
    step = step_of(TWO_CARDS, tried(layout, "CUDA1", needs["CUDA1"], needs["CUDA1"] // 2), constraints=constraints)
    assert step is not None
    assert {step.layout.device_of(8), step.layout.device_of(9)} == {"CUDA1"}
    assert step.layout.overrides == layout.overrides
    assert step.layout.assignment().count("CUDA0") <= 8
    assert CPU_ID in step.layout.devices


def test_a_pinned_output_layer_stays() -> None:
    needs = needs_of(memory_of(), TWO_CARDS, HALVES)
    constraints = Constraints(output="CUDA1")
    for free_bytes in (needs["CUDA1"] // 2, 0):
        refused = tried(HALVES, "CUDA1", needs["CUDA1"], free_bytes)
        step = step_of(TWO_CARDS, refused, constraints=constraints)
        assert step is None or step.layout.output_device == "CUDA1"


def test_the_cpu_gives_layers_to_devices_when_it_is_the_one_that_refuses() -> None:
    layout = single_device(N_LAYERS, CPU_ID)
    rows = rows_of(memory_of(), TWO_CARDS, layout)
    step = step_of(TWO_CARDS, Tried(layout, rows, Refusal(CPU_ID, GIB, 0, rows[-1].need_bytes // 2)))
    assert step is not None
    assert step.layout.assignment().count(CPU_ID) < N_LAYERS


def test_a_device_that_the_rig_does_not_have_changes_nothing() -> None:
    layout = single_device(N_LAYERS, CPU_ID)
    rows = rows_of(memory_of(), TWO_CARDS, layout)
    assert step_of(TWO_CARDS, Tried(layout, rows, Refusal("CUDA7", GIB, 0, 0))) is None


def test_words_for_changes() -> None:
    after = make_layout(N_LAYERS, [CPU_ID] * 2 + ["CUDA0"] * 8 + ["CUDA1"] * 6, CPU_ID)
    assert change_text(HALVES, after) == (
        "layers 0-1 from CUDA0 to CPU, layers 8-9 from CUDA1 to CUDA0, the output layer from CUDA1 to CPU"
    )


# ------------------------------------------------------------------ whole loops: the reference's traces, and properties


def one_card(usable_layers: float, given_layers: float) -> tuple[Rig, dict[str, int]]:
    """A card that reports room for so many layers (with the output layer and buffers) and gives room for others."""
    card = replace(make_gpu("CUDA0", 64), margin_bytes=0, overhead_bytes=0)
    rig = make_rig(card, host_gib=64)
    memory = memory_of()
    whole = needs_of(memory, rig, single_device(N_LAYERS, "CUDA0"))["CUDA0"]
    half = needs_of(memory, rig, make_layout(N_LAYERS, [CPU_ID] * 8 + ["CUDA0"] * 8))["CUDA0"]
    layer = (whole - half) // 8
    fixed = whole - N_LAYERS * layer
    rig = replace(rig, devices=(replace(card, free_bytes=int(fixed + usable_layers * layer)),))
    return rig, {"CUDA0": int(fixed + given_layers * layer), CPU_ID: 1 << 60}


def test_l1_a_probe_with_a_larger_graph_takes_a_layer_off_and_that_loads() -> None:
    rig, _ = one_card(usable_layers=4.5, given_layers=4.5)
    layout = make_layout(N_LAYERS, [CPU_ID] * 12 + ["CUDA0"] * 4)
    rows = rows_of(memory_of(), rig, layout)
    more = replace_row(rows[0], rows[0].need_bytes + rows[0].weights_bytes // 5)
    step = step_of(rig, Tried(layout, (more, *rows[1:])))
    assert step is not None
    assert step.layout.assignment().count("CUDA0") == 3


def test_l2_a_card_that_gives_less_than_it_reports_is_backed_off_once() -> None:
    rig, given = one_card(usable_layers=4.5, given_layers=3.2)
    world = World(memory_of(), rig, given, tells_free=True)
    found = world.run(make_layout(N_LAYERS, [CPU_ID] * 12 + ["CUDA0"] * 4))
    assert found is not None
    assert found.assignment().count("CUDA0") in (2, 3)
    assert len(world.history) == 1


def test_l3_nothing_that_would_fit_is_skipped_by_more_than_the_back_off() -> None:
    rig, given = one_card(usable_layers=6.5, given_layers=5.9)
    found = World(memory_of(), rig, given, tells_free=True).run(make_layout(N_LAYERS, [CPU_ID] * 10 + ["CUDA0"] * 6))
    assert found is not None
    assert found.assignment().count("CUDA0") == 5


def test_l4_pinned_layers_are_an_end_and_no_back_off() -> None:
    rig, given = one_card(usable_layers=4.5, given_layers=0.0)
    world = World(memory_of(), rig, given | {"CUDA0": 0}, tells_free=False)
    layout = make_layout(N_LAYERS, [CPU_ID] * 14 + ["CUDA0"] * 2)
    assert world.run(layout, Constraints(pins=(Pin("CUDA0", 14, 15),))) is None
    assert len(world.history) <= 2


def test_the_last_layout_asks_no_card_for_pinned_layers_that_it_has_refused() -> None:
    layout = make_layout(N_LAYERS, ["CUDA0"] + [CPU_ID] * 14 + ["CUDA1"])
    pinned = Constraints(pins=(Pin("CUDA0", 0, 0),))
    assert step_of(TWO_CARDS, tried(layout, "CUDA0", 100 * MIB, None), constraints=pinned) is None
    assert step_of(TWO_CARDS, tried(layout, "CUDA1", 100 * MIB, None), constraints=pinned) is not None


@pytest.mark.parametrize("cpu", ["gives", "refuses"])
def test_l5_a_card_that_gives_nothing_ends_on_the_cpu(cpu: str) -> None:
    rig, given = one_card(usable_layers=16.5, given_layers=0.0)
    given |= {"CUDA0": 0} | ({} if cpu == "gives" else {CPU_ID: 0})
    world = World(memory_of(), rig, given, tells_free=False)
    found = world.run(single_device(N_LAYERS, "CUDA0"))
    if cpu == "gives":
        assert found == single_device(N_LAYERS, CPU_ID)
    else:
        assert found is None
    assert len(world.history) <= MAX_TENTHS + 2


@st.composite
def worlds(draw: st.DrawFn) -> tuple[World, Layout, Constraints]:
    """A rig that promises something, gives something else, and a layout that a person might ask for."""
    drawn = draw(rigs())
    sized = tuple(
        replace(each, total_bytes=(size := draw(st.integers(1, 24)) * GIB), free_bytes=size, cap_bytes=None,
                margin_bytes=256 * MIB, kind="gpu")
        for each in drawn.devices
    )  # fmt: skip
    rig = Rig(sized, replace(drawn.host, total_bytes=64 * GIB, free_bytes=64 * GIB, cap_bytes=None))
    cuts = sorted(draw(st.sets(st.integers(1, N_LAYERS - 1), max_size=4)))
    bounds = [0, *cuts, N_LAYERS]
    assignment = [name for start, end in pairwise(bounds) for name in [draw(st.sampled_from(rig.ids))] * (end - start)]
    layout = make_layout(N_LAYERS, assignment, draw(st.sampled_from(rig.ids)))
    mode: SplitMode = draw(st.sampled_from(("layer", "layer", "none", "tensor")))
    if mode == "none" or (mode == "tensor" and set(layout.devices) - {CPU_ID}):
        layout = layout_in_mode(layout, mode, rig)
    given = {name: draw(st.integers(0, 8)) * GIB for name in rig.ids}
    pinned = draw(st.integers(0, N_LAYERS - 1))
    pins = (Pin(layout.device_of(pinned), pinned, pinned),) if draw(st.booleans()) and mode == "layer" else ()
    world = World(memory_of(draw(st.sampled_from(["dense", "mixture"]))), rig, given, tells_free=draw(st.booleans()))
    return world, layout, Constraints(pins=pins)


@settings(deadline=None, max_examples=examples(40))
@given(drawn=worlds())
def test_it_ends_never_repeats_and_asks_less_of_who_refused(drawn: tuple[World, Layout, Constraints]) -> None:
    world, layout, constraints = drawn
    found = world.run(layout, constraints)
    tried_layouts = [each.layout for each in world.history] + ([found] if found is not None else [])
    assert len(set(tried_layouts)) == len(tried_layouts)
    assert sum(each.refusal is not None for each in world.history) <= MAX_TENTHS * len(world.rig.ids)
    assert [each.backoff_tenths for each in world.history] == sorted(each.backoff_tenths for each in world.history)
    assert max(each.backoff_tenths for each in world.history) <= MAX_TENTHS if world.history else True
    refused: dict[str, int] = {}
    for index, each in enumerate(tried_layouts):
        needs = needs_of(world.memory, world.rig, each)
        assert all(needs[device] < bytes_then or needs[device] == 0 for device, bytes_then in refused.items())
        if index < len(world.history) and (refusal := world.history[index].refusal) is not None:
            refused[refusal.device] = needs[refusal.device]
        if index:
            assert not make_report(world.memory, world.rig, each, CONTEXT).violations
            only_cpu = set(each.devices) == {CPU_ID}
            assert each.split_mode == layout.split_mode or only_cpu or each.split_mode == "layer" == layout.split_mode
            for pin in constraints.pins:
                assert each.device_of(pin.first) == pin.device


@settings(deadline=None, max_examples=10)
@given(drawn=worlds())
def test_the_same_history_gives_the_same_step(drawn: tuple[World, Layout, Constraints]) -> None:
    world, layout, constraints = drawn
    refusal = world.load(layout)
    rows = rows_of(world.memory, world.rig, layout)
    history = [Tried(layout, rows, refusal)]
    first = step_back(plan_of(world.memory, world.rig, layout, CONTEXT), history, constraints)
    assert first == step_back(plan_of(world.memory, world.rig, layout, CONTEXT), history, constraints)
    assert all(row.grade is Grade.ESTIMATED for row in rows)
