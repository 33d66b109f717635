"""The readings of the last hour are packed, and come back as they were."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import fields
from PySide6.QtCore import QObject, Signal

from app.models import device_history
from app.models.device_history import HISTORY_S, MAX_SAMPLES, DeviceHistory
from app.models.open_models import OpenModels
from app.rig.live_rig import LiveRig
from engine.base.values import replace
from engine.devices.telemetry.sample import CardState, Sample, gap

FULL = Sample(
    "GPU0", 1.5, 11 << 30, 24 << 30, own_bytes=5, utilization_percent=12.5, temperature_c=40.0, power_w=70.25,
    spilled_bytes=0, major_faults=7, card=CardState(300.0, 1500, 9000, 4, 16, ("heat",)),
)  # fmt: skip


class Live(QObject):
    samples_arrived = Signal(object)

    def as_shown(self, sample: Sample) -> Sample:
        return sample


@pytest.fixture
def live(qapp: object) -> Live:
    return Live()


@pytest.fixture
def history(live: Live) -> DeviceHistory:
    nobody = SimpleNamespace(all=(), added=SimpleNamespace(connect=lambda _: None))
    return DeviceHistory(cast(LiveRig, live), cast(OpenModels, nobody))


def test_readings_come_back_as_they_were(live: Live, history: DeviceHistory) -> None:
    readings = (FULL, replace(FULL, time_s=2.5), gap("GPU0", 3.5, "asleep"), replace(FULL, time_s=4.5, card=None))
    for each in readings:
        live.samples_arrived.emit((each,))
    assert history.samples("GPU0") == readings
    assert all(type(each.used_bytes) is int for each in history.samples("GPU0") if each.used_bytes is not None)
    assert history.samples("CPU") == ()


def test_every_field_is_kept(live: Live, history: DeviceHistory) -> None:
    assert None not in [getattr(FULL, each.name) for each in fields(Sample)]
    live.samples_arrived.emit((FULL,))
    assert history.samples("GPU0") == (FULL,)


def test_the_last_hour_is_kept_and_a_device_that_left_is_not(live: Live, history: DeviceHistory) -> None:
    for number in range(MAX_SAMPLES + 50):
        live.samples_arrived.emit((replace(FULL, time_s=float(number)),))
    assert [each.time_s for each in history.samples("GPU0")] == list(range(50, MAX_SAMPLES + 50))
    later_s = MAX_SAMPLES + 40 + HISTORY_S
    live.samples_arrived.emit((replace(FULL, time_s=later_s),))
    assert [each.time_s for each in history.samples("GPU0")] == [*range(MAX_SAMPLES + 40, MAX_SAMPLES + 50), later_s]
    live.samples_arrived.emit((replace(FULL, device="GPU1"),))
    assert history.samples("GPU0") == ()


def test_memory_does_not_grow_for_an_hour(live: Live, history: DeviceHistory) -> None:
    def come(first: int, last: int) -> None:
        for number in range(first, last):
            sample = replace(FULL, time_s=float(number), used_bytes=number << 30, power_w=number / 7, card=None)
            live.samples_arrived.emit((sample,))

    come(0, 100)
    tracemalloc.start()
    try:
        come(100, MAX_SAMPLES)
        grown_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(history.samples("GPU0")) == MAX_SAMPLES
    assert grown_bytes < 100_000


def test_all_numbers_of_a_reading_are_packed() -> None:
    rest: set[Any] = {each.name for each in fields(Sample)} - set(device_history._NUMBERS)
    assert rest == {"device", "note", "card"}
