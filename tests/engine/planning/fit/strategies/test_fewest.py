"""Strategy fewest: its search for capacity, and the first layout of a model."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Rig, make_host
from engine.planning.fit.strategies.constraints import NO_CONSTRAINTS
from engine.planning.fit.strategies.fastest import initial_layout
from engine.planning.fit.strategies.fewest import DeviceRoom, LayersByDevice, fewest, place_layers
from engine.planning.layout.layout import Layout, check_cover
from engine.planning.layout.rules import violations
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.settings.context_settings import ContextSettings
from tests.support.plans import make_report
from tests.support.truth import truth_model


def place(name: str, room_mib: int, rank: int = 0) -> DeviceRoom:
    return DeviceRoom(name, room_mib * MIB, rank)


G0_256 = (place("g0", 256),)
G0_128_G1_256 = (place("g0", 128), place("g1", 256))
G0_128_IGPU_256 = (place("g0", 128), place("g1", 256, rank=1))
THREE = (place("g0", 300), place("g1", 200), place("g2", 100))


class Case(Struct, frozen=True, dict=True):
    name: str
    places: tuple[DeviceRoom, ...]
    layers_mib: tuple[int, ...]
    expected: LayersByDevice
    spread: bool = False


CASES = (
    Case("no device", (), (50,) * 3, ()),
    Case("one device", G0_256, (50,) * 3, (("g0", (0, 1, 2)),)),
    Case("too many layers", G0_256, (100,) * 4, (("g0", (1, 2)),)),
    Case("the larger device alone", G0_128_G1_256, (50,) * 3, (("g1", (0, 1, 2)),)),
    Case("one layer fills a device", G0_128_G1_256, (256, 50, 50), (("g1", (0,)), ("g0", (1, 2)))),
    Case("two layers fill a device", G0_128_G1_256, (256, 256, 50), (("g1", (1,)),)),
    Case("an integrated card", (place("g0", 256, rank=1),), (50,) * 3, (("g0", (0, 1, 2)),)),
    Case("a card before an integrated one", G0_128_IGPU_256, (50,) * 3, (("g1", (0,)), ("g0", (1, 2)))),
    Case("the card is enough", G0_128_IGPU_256, (50,) * 2, (("g0", (0, 1)),)),
    Case("both are too small", G0_128_IGPU_256, (100,) * 4, (("g1", (0, 1)), ("g0", (2,)))),
    Case("spread", (place("g0", 256), place("g1", 256)), (50,) * 4, (("g0", (0, 1)), ("g1", (2, 3))), spread=True),
    Case("not spread", (place("g0", 256), place("g1", 256)), (50,) * 4, (("g0", (0, 1, 2, 3)),)),
    Case("in proportion", G0_128_G1_256, (50,) * 6, (("g1", (0, 1, 2, 3)), ("g0", (4, 5)))),
    Case("a large output layer", G0_256, (50, 50, 50, 300), (("g0", (0, 1, 2)),)),
    Case("two of three", THREE, (50,) * 10, (("g0", (0, 1, 2, 3, 4, 5)), ("g1", (6, 7, 8, 9)))),
    Case("all three", THREE, (50,) * 6, (("g0", (0, 1, 2)), ("g1", (3, 4)), ("g2", (5,))), spread=True),
    Case("one holds no layer", (place("g0", 40), place("g1", 256)), (50,) * 6, (("g1", (0, 1, 2, 3, 4)),)),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_table(case: Case) -> None:
    assert placed(case, case.places) == case.expected


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_the_order_of_the_devices_does_not_matter(order: tuple[int, ...]) -> None:
    places = [G0_128_IGPU_256[1], *THREE]
    case = Case("", tuple(places[index] for index in (*order, 3)), (50,) * 12, ())
    assert placed(case, case.places) == placed(case, tuple(reversed(case.places)))


def placed(case: Case, places: tuple[DeviceRoom, ...]) -> LayersByDevice:
    return place_layers([size * MIB for size in case.layers_mib], places, spread=case.spread)


CONTEXT = ContextSettings()
HOST = make_host("host", 256 * GIB)
MEMORY = {name: ModelMemory(truth_model(name)) for name in ("llama-3.1-8b", "qwen3-30b-a3b")}
NEED_8B = 7 * GIB


def _card(device_id: str, size_bytes: int, **changes: object) -> Device:
    return replace(Device(device_id, device_id, "CUDA", "gpu", size_bytes), **changes)  # type: ignore[arg-type]


def _worker(device_id: str, size_bytes: int) -> Device:
    return Device(device_id, device_id, "RPC", "gpu", size_bytes, endpoint="127.0.0.1:50052")


def _layout(*devices: Device, name: str = "llama-3.1-8b", host: Device = HOST) -> Layout:
    # Without a limit: how much a search tries in a second of processor time depends on the machine.
    return initial_layout(MEMORY[name], Rig(devices, host), CONTEXT, seconds=inf)


def _devices_of(layout: Layout) -> list[str]:
    return [run.device for run in layout.runs]


def test_without_devices_everything_is_on_the_cpu() -> None:
    layout = _layout()
    assert _devices_of(layout) == [CPU_ID]
    assert layout.output_device == CPU_ID


def test_a_host_that_is_too_small_still_gets_a_layout() -> None:
    tiny = make_host("host", MIB)
    layout = _layout(host=tiny)
    assert _devices_of(layout) == [CPU_ID]
    assert not make_report(MEMORY["llama-3.1-8b"], Rig((), tiny), layout, CONTEXT).fits


def test_one_device_that_holds_everything_gets_everything() -> None:
    assert _devices_of(_layout(_card("small", 2 * GIB), _card("big", NEED_8B))) == ["big"]


def test_of_several_the_one_with_most_free_memory() -> None:
    devices = (_card("full", 80 * GIB, free_bytes=7 * GIB), _card("free", 24 * GIB))
    assert _devices_of(_layout(*devices)) == ["free"]


def test_a_card_comes_before_an_integrated_one_before_a_worker() -> None:
    card, integrated, worker = _card("card", NEED_8B), _card("igpu", 64 * GIB, kind="igpu"), _worker("rpc", 64 * GIB)
    assert _devices_of(_layout(worker, integrated, card)) == ["card"]
    assert _devices_of(_layout(worker, integrated)) == ["igpu"]
    assert _devices_of(_layout(worker)) == ["rpc"]


def test_caps_and_margins_are_kept() -> None:
    assert CPU_ID in _devices_of(_layout(_card("capped", 24 * GIB, cap_bytes=3 * GIB)))
    assert CPU_ID in _devices_of(_layout(_card("reserved", 24 * GIB, margin_bytes=20 * GIB)))
    assert CPU_ID not in _devices_of(_layout(_card("free unknown", 24 * GIB, free_bytes=None)))


def test_devices_hold_the_last_layers_and_the_cpu_the_first() -> None:
    layout = _layout(_card("A", 2 * GIB), _card("B", 2 * GIB))
    assert _devices_of(layout) == [CPU_ID, "A", "B"]


@pytest.mark.parametrize("gibs", [(8,), (12, 6), (6, 12), (8, 8, 8), (5, 9, 3), (16, 4, 4, 4)])
@pytest.mark.parametrize("name", ["gemma-2-27b", "llama-3.1-8b"])
def test_it_is_what_strategy_fewest_finds_for_a_model_without_experts(name: str, gibs: tuple[int, ...]) -> None:
    memory = ModelMemory(truth_model(name))
    rig = Rig(tuple(_card(f"G{number}", gib * GIB) for number, gib in enumerate(gibs)), HOST)
    assert initial_layout(memory, rig, CONTEXT, seconds=inf) == fewest(memory, rig, CONTEXT, NO_CONSTRAINTS).layout


def test_only_experts_stay_on_the_cpu_where_that_is_faster_than_whole_layers() -> None:
    layout = _layout(_card("A", 5 * GIB), _card("B", 5 * GIB), name="qwen3-30b-a3b")
    assert {override.device for override in layout.overrides} >= {CPU_ID}
    assert _devices_of(layout) == ["A", "B"]


def test_several_devices_are_filled_evenly() -> None:
    rig = Rig((_card("A", 5 * GIB), _card("B", 5 * GIB), _card("C", 5 * GIB)), HOST)
    layout = initial_layout(MEMORY["llama-3.1-8b"], rig, CONTEXT, seconds=inf)
    assert _devices_of(layout) == ["A", "B"]
    needs = {row.id: row.need_bytes for row in make_report(MEMORY["llama-3.1-8b"], rig, layout, CONTEXT).rows}
    largest_layer = 250 * MIB
    assert abs(needs["A"] - needs["B"]) <= 2 * largest_layer


def test_workers_come_before_cards_so_that_the_output_is_local() -> None:
    layout = _layout(_card("card", 3 * GIB), _worker("rpc", 5 * GIB))
    assert _devices_of(layout) == ["rpc", "card"]
    assert layout.output_device == "card"


def test_a_device_too_small_for_a_layer_gets_none() -> None:
    layout = _layout(_card("tiny", 450 * MIB), _card("card", 3 * GIB))
    assert _devices_of(layout) == [CPU_ID, "card"]


def test_more_devices_than_the_engine_takes() -> None:
    devices = [_card(f"G{number}", GIB + 100 * MIB * (number % 3)) for number in range(30)]
    rig = Rig(tuple(devices), HOST)
    layout = initial_layout(MEMORY["qwen3-30b-a3b"], rig, CONTEXT)
    assert not violations(layout, truth_model("qwen3-30b-a3b"), rig, CONTEXT)
    assert len(layout.runs) <= 16


def test_an_unknown_architecture_keeps_a_reserve() -> None:
    memory = ModelMemory(replace(truth_model("llama-3.1-8b"), architecture="from-tomorrow"))
    card = _card("card", 5 * GIB)
    layout = initial_layout(memory, Rig((card,), HOST), CONTEXT)
    row = make_report(memory, Rig((card,), HOST), layout, CONTEXT).rows[0]
    assert 3 * GIB < row.need_bytes <= 4 * GIB


@given(
    sizes=st.lists(st.integers(0, 30 * GIB), max_size=6),
    kinds=st.lists(st.sampled_from(["card", "igpu", "rpc"]), min_size=6, max_size=6),
    margin_bytes=st.integers(0, GIB),
    n_ctx=st.sampled_from([512, 8192, 131072]),
    name=st.sampled_from(sorted(MEMORY)),
)
@pytest.mark.filterwarnings("error")
def test_no_device_is_short_and_no_layer_is_lost(
    sizes: list[int], kinds: list[str], margin_bytes: int, n_ctx: int, name: str
) -> None:
    devices = []
    for number, (size_bytes, kind) in enumerate(zip(sizes, kinds, strict=False)):
        device = _worker(f"D{number}", size_bytes) if kind == "rpc" else _card(f"D{number}", size_bytes)
        devices.append(replace(device, kind="igpu" if kind == "igpu" else "gpu", margin_bytes=margin_bytes))
    rig, context = Rig(tuple(devices), HOST), ContextSettings(n_ctx=n_ctx)
    layout = initial_layout(MEMORY[name], rig, context)
    check_cover(layout.n_layers, layout.runs)
    report = make_report(MEMORY[name], rig, layout, context)
    assert report.violations == ()
    assert all(row.shortfall_bytes <= 0 for row in report.rows[:-1] if row.need_bytes)
    assert CPU_ID not in _devices_of(layout)[1:]
