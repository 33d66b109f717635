"""Free memory beside our other loaded models, and the wait for memory that is being freed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Rig, make_host
from engine.planning.fit.loaded_models import (
    LIMIT_S,
    HeldModel,
    Recovery,
    begin_recovery,
    choose_victims,
    rig_after_unload,
    rows_fit,
)
from engine.planning.memory.estimate import DeviceMemory, Grade
from engine.planning.plan.report import DeviceRow, make_row
from tests.support.load_specs import file_key, holding, worker_device


def card(device_id: str, total: int, free: int | None) -> Device:
    return Device(device_id, "card", "CUDA", "gpu", total, free)


def model(name: str, endpoints: tuple[str, ...] = (), **held: int) -> HeldModel:
    return HeldModel(file_key(name), name, held, frozenset(endpoints), idle_since_s=0.0)


def row(device: Device, need: int) -> DeviceRow:
    return make_row(device, DeviceMemory(weights_bytes=need), Grade.ESTIMATED)


HOST = make_host("host", 4000, 3000)
RIG = Rig((card("CUDA0", 1000, 900), card("CUDA1", 2000, 1900)), HOST)
A, B = model("A", CUDA0=50, CUDA1=50), model("B", CUDA0=125, CUDA1=75)


def free(rig: Rig) -> dict[str, int | None]:
    return {device.id: device.free_bytes for device in rig.all_devices}


def test_a_device_has_no_more_than_what_we_leave_of_it() -> None:
    assert free(rig_after_unload(RIG, [A, B])) == {"CUDA0": 825, "CUDA1": 1875, CPU_ID: 3000}


def test_more_than_the_device_has_leaves_nothing() -> None:
    assert free(rig_after_unload(RIG, [model("huge", CUDA0=1200)]))["CUDA0"] == 0


def test_what_others_hold_is_less_than_reported_where_other_programs_take_more() -> None:
    rig = Rig((card("CUDA0", 1000, 300),), HOST)
    assert free(rig_after_unload(rig, [A]))["CUDA0"] == 300


def test_what_leaves_is_free_and_the_others_are_named() -> None:
    rig = Rig((card("CUDA0", 1000, 400), card("CUDA1", 2000, None)), HOST)
    beside = rig_after_unload(rig, [A, B], [A])
    assert free(beside) == {"CUDA0": 450, "CUDA1": 1925, CPU_ID: 3000}
    assert beside.devices[0].holdings == (holding("B", 125),)
    alone = rig_after_unload(rig, [A], [A])
    assert free(alone)["CUDA1"] is None
    assert alone.devices[0].holdings == ()


def test_a_cap_is_shared() -> None:
    rig = Rig((replace(card("CUDA0", 1000, 900), cap_bytes=500),), HOST)
    assert rig_after_unload(rig, [B]).devices[0].available_bytes == 375


def test_the_host_gives_back_what_our_processes_are_seen_to_hold() -> None:
    mine = model("mine", CPU=800)
    assert free(rig_after_unload(RIG, [mine], [mine], {CPU_ID: 200}))[CPU_ID] == 3200


def test_a_worker_that_another_model_holds_has_nothing_free() -> None:
    first, second = worker_device("RPC0", "attic:1", 500), replace(worker_device("RPC1", "attic:1"), endpoint_device=1)
    rig = Rig((first, second, worker_device("RPC2", "attic:2", 500)), HOST)
    beside = rig_after_unload(rig, [model("Y", ("attic:1",), RPC0=100)])
    assert [device.free_bytes for device in beside.devices] == [0, 0, 500]
    assert [device.holdings for device in beside.devices] == [(holding("Y", 100),), (holding("Y", 0),), ()]
    other = model("Y", ("attic:1",), RPC0=100)
    assert rig_after_unload(rig, [other], [other]).devices[0].free_bytes == 500


def test_rows_fit_with_the_margins_of_the_rig() -> None:
    rig = Rig((replace(card("CUDA0", 1000, 900), margin_bytes=100),), HOST)
    assert rows_fit([row(rig.devices[0], 800), row(rig.host, 0)], rig)
    assert not rows_fit([row(rig.devices[0], 801)], rig)
    full = Rig((replace(card("CUDA0", 1000, 0), margin_bytes=100),), HOST)
    assert rows_fit([row(full.devices[0], 0)], full)


def test_the_model_that_makes_room_is_found() -> None:
    rig = Rig((card("CUDA0", 1000, 825),), HOST)
    rows = [row(rig.devices[0], 900)]
    assert choose_victims([A, B], lambda leaving: rows_fit(rows, rig_after_unload(rig, [A, B], leaving))) == (B,)
    assert choose_victims([A], lambda leaving: rows_fit(rows, rig_after_unload(rig, [A, B], [B, *leaving]))) == ()


holds = st.integers(0, 3000)


@given(st.lists(holds, max_size=4), st.integers(0, 2000), st.integers(0, 4), st.none() | st.integers(1, 2500))
def test_unloading_never_takes_room_away(held: list[int], reported: int, count: int, cap: int | None) -> None:
    models = [model(f"m{index}", CUDA0=size) for index, size in enumerate(held)]
    rig = Rig((replace(card("CUDA0", 2000, reported), cap_bytes=cap),), HOST)
    some, more = models[:count], models[: count + 1]
    before, after = rig_after_unload(rig, models, some).devices[0], rig_after_unload(rig, models, more).devices[0]
    assert 0 <= before.available_bytes <= after.available_bytes <= min(2000, cap or 2000)
    staying = sum(held[count:])
    assert before.available_bytes <= max(0, 2000 - staying)


# ---------------------------------------------------------------------- memory that comes back


def begin(device: Device, held: int = 400, reading: int | None = 100) -> Recovery | None:
    readings = {} if reading is None else {device.id: reading}
    return begin_recovery(Rig((device,), HOST), readings, {device.id: held, CPU_ID: 50}, now_s=10.0)


def test_three_quarters_are_waited_for() -> None:
    recovery = begin(card("CUDA0", 1000, 100))
    assert recovery is not None
    assert recovery.devices == ("CUDA0",)
    assert not recovery.is_over({"CUDA0": 400}, 10.3)
    assert recovery.is_over({"CUDA0": 401}, 10.3)


def test_nobody_waits_longer_than_the_limit() -> None:
    recovery = begin(card("CUDA0", 1000, 100))
    assert recovery is not None
    assert not recovery.is_over({}, 10.0 + LIMIT_S - 0.1)
    assert recovery.is_over({}, 10.0 + LIMIT_S)


def test_every_device_is_waited_for() -> None:
    rig = Rig((card("CUDA0", 1000, 0), card("CUDA1", 1000, 0)), HOST)
    recovery = begin_recovery(rig, {"CUDA0": 0, "CUDA1": 0}, {"CUDA0": 100, "CUDA1": 100}, 0.0)
    assert recovery is not None
    assert not recovery.is_over({"CUDA0": 1000, "CUDA1": 75}, 1.0)
    assert recovery.is_over({"CUDA0": 76, "CUDA1": 76}, 1.0)


@pytest.mark.parametrize(
    "device",
    [replace(card("iGPU", 1000, 100), kind="igpu"), replace(card("Metal0", 1000, 100), backend="Metal"), HOST],
)
def test_shared_memory_is_not_waited_for(device: Device) -> None:
    assert begin(device) is None


def test_nothing_to_see_is_nothing_to_wait_for() -> None:
    assert begin(card("CUDA0", 1000, 100), reading=None) is None
    assert begin(card("CUDA0", 1000, 100), held=0) is None
