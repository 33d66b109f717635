"""Low-memory warnings for a loaded model: early, once, with the processes that took the memory, and withdrawn."""

from __future__ import annotations

import os

import pytest

from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device
from engine.devices.telemetry.headroom import Alert, HeadroomWatch
from engine.devices.telemetry.processes import HostReader, swapped_bytes, total_of
from engine.devices.telemetry.processes import major_faults as read_major_faults
from engine.devices.telemetry.sample import Sample

TOTAL = 8 * GIB
GPU = Device(id="CUDA0", name="card", backend="CUDA", kind="gpu", total_bytes=TOTAL, margin_bytes=512 * MIB)
HOST = Device(id=CPU_ID, name="host", backend="CPU", kind="cpu", total_bytes=32 * GIB)


def reading(
    device: Device,
    time_s: float,
    free_bytes: int,
    *,
    own_bytes: int | None = None,
    spilled_bytes: int | None = None,
    major_faults: int | None = None,
) -> Sample:
    total_bytes = device.total_bytes
    return Sample(
        device.id, time_s, used_bytes=total_bytes - free_bytes, total_bytes=total_bytes,
        own_bytes=own_bytes, spilled_bytes=spilled_bytes, major_faults=major_faults,
    )  # fmt: skip


def watching(*devices: Device) -> HeadroomWatch:
    watch = HeadroomWatch()
    watch.begin(devices)
    return watch


def feed(watch: HeadroomWatch, device: Device, frees: list[int], start_s: float = 0.0) -> list[tuple[Alert, ...]]:
    return [watch.update((reading(device, start_s + at, free),)) for at, free in enumerate(frees)]


def kinds(alerts: tuple[Alert, ...]) -> list[str]:
    return [alert.kind for alert in alerts]


def test_room_enough_says_nothing() -> None:
    assert not any(feed(watching(GPU), GPU, [600 * MIB] * 10))


def test_half_of_the_margin_gone_is_low_after_two_readings() -> None:
    told = feed(watching(GPU), GPU, [600 * MIB, 250 * MIB, 250 * MIB])
    assert [kinds(alerts) for alerts in told] == [[], [], ["low"]]
    assert "CUDA0 has only 250.0 MiB of memory left" in told[2][0].message


def test_without_a_margin_a_small_floor_is_left() -> None:
    bare = replace(GPU, margin_bytes=0)
    assert not any(feed(watching(bare), bare, [130 * MIB] * 5))
    assert kinds(feed(watching(bare), bare, [100 * MIB] * 3)[-1]) == ["low"]


def test_a_small_worker_that_is_full_by_plan_is_no_reason_to_warn() -> None:
    worker = replace(GPU, id="RPC0", total_bytes=256 * MIB, margin_bytes=0)
    assert not any(feed(watching(worker), worker, [6 * MIB] * 10))


def test_one_odd_reading_neither_begins_nor_ends() -> None:
    watch = watching(GPU)
    assert not any(feed(watch, GPU, [600 * MIB, 100 * MIB, 600 * MIB, 600 * MIB]))
    feed(watch, GPU, [200 * MIB] * 3, start_s=100)
    assert kinds(feed(watch, GPU, [600 * MIB], start_s=103)[-1]) == ["low"]
    assert feed(watch, GPU, [600 * MIB] * 3, start_s=104)[-1] == ()


def test_memory_that_falls_fast_is_told_before_it_is_low() -> None:
    told = feed(watching(GPU), GPU, [2500 * MIB - at * 150 * MIB for at in range(6)])
    assert kinds(told[-1]) == ["falling"]
    assert "750.0 MiB more in use than 5 s ago" in told[-1][0].message
    assert not any(feed(watching(GPU), GPU, [6000 * MIB - at * 60 * MIB for at in range(6)]))


def test_who_took_it_is_said_where_readings_tell() -> None:
    watch = watching(GPU)
    before = reading(GPU, 0, 2 * GIB, own_bytes=5 * GIB)
    after = [reading(GPU, at, 100 * MIB, own_bytes=5 * GIB) for at in (30.0, 31.0)]
    watch.update((before,))
    watch.update((after[0],))
    (low,) = watch.update((after[1],))
    assert "Other programs took 1.90 GiB of memory since the model was loaded." in low.message


def test_our_own_growth_is_not_blamed_on_others() -> None:
    watch = watching(GPU)
    watch.update((reading(GPU, 0, 2 * GIB, own_bytes=5 * GIB),))
    for at in (30.0, 31.0):
        alerts = watch.update((reading(GPU, at, 100 * MIB, own_bytes=7 * GIB),))
    assert "Other programs" not in alerts[0].message


@pytest.mark.parametrize(("device", "where"), [(GPU, "to the computer's memory"), (HOST, "to swap")])
def test_what_was_moved_to_slower_memory_since_the_load_is_told(device: Device, where: str) -> None:
    watch = watching(device)
    for at, spilled in enumerate((300, 300, 400, 400)):
        alerts = watch.update((reading(device, at, 6 * GIB, spilled_bytes=spilled * MIB),))
    assert kinds(alerts) == ["spilled"]
    assert f"100.0 MiB of the model was moved from {device.id} {where}" in alerts[0].message


def test_reading_weights_again_and_again_needs_short_memory_to_be_told() -> None:
    for free_bytes, expected in ((10 * GIB, []), (1 * GIB, ["paging"])):
        watch = watching(HOST)
        for at in range(5):
            alerts = watch.update((reading(HOST, at, free_bytes, major_faults=at * 500),))
        assert kinds(alerts) == expected


def test_only_watched_devices_count_and_nothing_after_the_end() -> None:
    watch = watching(HOST)
    assert not any(feed(watch, GPU, [MIB] * 5))
    watch.begin((GPU,))
    assert feed(watch, GPU, [MIB] * 5)[-1]
    watch.begin(())
    assert not any(feed(watch, GPU, [MIB] * 5))


def test_a_gap_in_the_readings_changes_nothing() -> None:
    watch = watching(GPU)
    feed(watch, GPU, [100 * MIB] * 3)
    assert watch.update((Sample("CUDA0", 4.0, used_bytes=None, total_bytes=None),)) == ()
    assert kinds(feed(watch, GPU, [100 * MIB], start_s=5)[0]) == ["low"]


def test_the_system_tells_of_a_real_process() -> None:
    faults = read_major_faults(os.getpid())
    assert faults is not None
    assert faults >= 0
    assert swapped_bytes(os.getpid()) is not None
    assert total_of((os.getpid(), 2**22 + 1), read_major_faults) is not None
    assert total_of((2**22 + 1,), read_major_faults) is None
    assert HostReader(CPU_ID).read(0.0).spilled_bytes is not None
