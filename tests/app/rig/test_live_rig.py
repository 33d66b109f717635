"""Live memory of the rig: readings of workers by a child, and free memory beside loaded models."""

from __future__ import annotations

import pytest
from pytestqt.qtbot import QtBot

from app.rig.device_list import DeviceList, list_of_file
from app.rig.live_rig import FOLLOW_S, NOT_HERE, LiveRig
from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import Device, MeasuredChoice, Rig, make_host
from engine.devices.rig_file import encode_rig
from engine.devices.telemetry.sample import Sample
from engine.planning.fit.loaded_models import HeldModel
from engine.planning.fit.speed_book import EMPTY_BOOK, machine_key
from engine.runtime.protocol.messages import DeviceMemoryReading
from tests.support.load_specs import file_key, holding

HOST = make_host("host", 16 * GIB)
CARD = Device("CUDA0", "card", "CUDA", "gpu", 8 * GIB, 8 * GIB)


def loaded(name: str, *endpoints: str, **held_bytes: int) -> HeldModel:
    return HeldModel(file_key(name), name, held_bytes, frozenset(endpoints), idle_since_s=0.0)


REMOTE_MODEL = loaded("remote", "192.0.2.7:50052", RPC0=GIB)


@pytest.fixture
def live(qtbot: QtBot) -> LiveRig:
    return LiveRig()


def shown_used(live: LiveRig, used_bytes: int | None) -> int | None:
    """What the cards are told of RPC0 when its own reading is `used_bytes`."""
    seen: list[tuple[Sample, ...]] = []
    live.samples_arrived.connect(seen.append)
    live.take_samples((Sample("RPC0", 1.0, used_bytes, 8 * GIB if used_bytes is not None else None),))
    live.samples_arrived.disconnect(seen.append)
    return seen[-1][0].used_bytes


def test_a_gap_is_filled_by_the_child_that_holds_the_worker(live: LiveRig) -> None:
    assert shown_used(live, None) is None
    live.set_models([REMOTE_MODEL], REMOTE_MODEL)
    live.take_engine_readings([DeviceMemoryReading("RPC0", 5 * GIB, 8 * GIB)])
    assert shown_used(live, None) == 3 * GIB
    assert shown_used(live, 7 * MIB) == 7 * MIB
    live.set_models([], None)
    assert shown_used(live, None) is None


def test_all_of_it_free_is_no_reading(live: LiveRig) -> None:
    live.take_engine_readings([DeviceMemoryReading("RPC0", 8 * GIB, 8 * GIB)])
    assert shown_used(live, None) is None


def test_a_device_that_is_not_here_says_where_it_is_from(live: LiveRig) -> None:
    live.set_devices(list_of_file(Rig((CARD,), HOST), found=Rig((), HOST)))
    samples = (Sample("CUDA0", 1.0, None, None), Sample("CPU", 1.0, GIB, 16 * GIB))
    assert [live.as_shown(sample).note for sample in samples] == [NOT_HERE, ""]
    assert not live.is_real


def test_the_memory_of_another_host_is_not_shown_for_the_host_of_a_rig_file(live: LiveRig) -> None:
    imaginary = make_host("imaginary", 240 * GIB)
    here = Sample("CPU", 1.0, 8 * GIB, 24 * GIB)
    for host, note, total_bytes in (
        (imaginary, NOT_HERE, None),
        (make_host("this computer", 24 * GIB - 100 * MIB), "", 24 * GIB),
    ):
        live.set_devices(list_of_file(Rig((), host), found=Rig((), HOST)))
        shown = live.as_shown(here)
        assert (shown.note, shown.total_bytes) == (note, total_bytes)


def test_other_devices_are_told_before_the_rig_and_only_then(live: LiveRig) -> None:
    told: list[str] = []
    live.devices_changed.connect(lambda: told.append("devices"))
    live.rig_changed.connect(lambda _rig: told.append("rig"))
    live.set_devices(DeviceList(Rig((CARD,), HOST)))
    assert told == ["devices", "rig"]
    live.set_devices(live.devices.with_limits("CUDA0", GIB, 0))
    assert told == ["devices", "rig", "rig"]
    live.set_devices(live.devices)
    assert told == ["devices", "rig", "rig"]


# ---------------------------------------------------------------------- several models


def sampled(live: LiveRig, used_bytes: int, own_bytes: int = 0) -> None:
    live.take_samples(
        (
            Sample("CUDA0", 1.0, used_bytes, 8 * GIB),
            Sample("CPU", 1.0, GIB, live.rig.host.total_bytes, own_bytes=own_bytes),
        )
    )


def card_free(live: LiveRig) -> int | None:
    return live.rig.devices[0].free_bytes


def test_the_current_models_memory_counts_as_free_and_that_of_others_as_taken(live: LiveRig) -> None:
    live.set_devices(DeviceList(Rig((CARD,), HOST)))
    sampled(live, 5 * GIB)
    first, second = loaded("first", CUDA0=3 * GIB), loaded("second", CUDA0=GIB)
    live.set_models([first, second], first)
    sampled(live, 5 * GIB)
    assert card_free(live) == 6 * GIB
    assert live.rig.devices[0].holdings == (holding("second", GIB),)
    live.set_models([first, second], second)
    assert card_free(live) == 4 * GIB
    live.set_models([first, second], None)
    assert card_free(live) == 3 * GIB
    assert live.rig_without([first, second]).devices[0].free_bytes == 7 * GIB


def test_what_comes_and_goes_counts_before_the_next_sample(live: LiveRig) -> None:
    live.set_devices(DeviceList(Rig((CARD,), HOST)))
    sampled(live, GIB)
    model = loaded("model", CUDA0=3 * GIB)
    live.set_models([model], None)
    assert card_free(live) == 4 * GIB
    live.set_models([model], model)
    assert card_free(live) == 7 * GIB
    live.set_models([], None)
    assert card_free(live) == 7 * GIB


def test_what_a_sample_showed_in_the_middle_of_a_load_is_counted_once(live: LiveRig) -> None:
    live.set_devices(DeviceList(Rig((CARD,), HOST)))
    sampled(live, GIB)
    loading, model = loaded("model"), loaded("model", CUDA0=3 * GIB)
    live.set_models([loading], None)
    assert card_free(live) == 7 * GIB
    sampled(live, 3 * GIB)
    assert card_free(live) == 5 * GIB
    live.set_models([model], None)
    assert card_free(live) == 4 * GIB
    sampled(live, 4 * GIB)
    assert card_free(live) == 4 * GIB
    # loaded again: what it had comes back first, and samples show how
    live.set_models([loading], None)
    assert card_free(live) == 7 * GIB
    sampled(live, 2 * GIB)
    live.set_models([model], None)
    assert card_free(live) == 4 * GIB


def test_a_rig_file_knows_nothing_of_what_was_loaded_since(live: LiveRig) -> None:
    rig = Rig((replace(CARD, free_bytes=6 * GIB),), HOST)
    live.set_devices(list_of_file(rig, found=rig))
    other, current = loaded("other", CUDA0=GIB), loaded("current", CUDA0=2 * GIB)
    live.set_models([other, current], current)
    assert card_free(live) == 5 * GIB
    sampled(live, GIB)
    assert live.devices.rig.devices[0].free_bytes == 6 * GIB
    assert b"other" not in encode_rig(live.rig)


def test_what_is_left_on_a_small_worker_is_told(live: LiveRig) -> None:
    """A step that suits cards would hide it: the last guess of a load may be off by less."""
    worker = Device("RPC0", "worker", "RPC", "gpu", 160 * MIB, 0, endpoint="127.0.0.1:50052")
    live.set_devices(DeviceList(Rig((worker,), HOST)))
    live.take_samples((Sample("RPC0", 1.0, 150 * MIB, 160 * MIB),))
    assert live.devices.rig.devices[0].free_bytes == 10 * MIB


def test_small_changes_of_the_free_memory_are_followed_every_few_seconds(live: LiveRig) -> None:
    """Beside other programs it moves each second, and each change of the rig makes all forecasts anew."""
    live.set_devices(DeviceList(Rig((CARD,), HOST)))
    changes: list[Rig] = []
    live.rig_changed.connect(changes.append)

    def read(time_s: float, used_bytes: int) -> int:
        live.take_samples((Sample("CUDA0", time_s, used_bytes, CARD.total_bytes),))
        return len(changes)

    assert read(1.0, GIB) == 1
    assert [read(2.0 + number, GIB + (number + 1) * 20 * MIB) for number in range(4)] == [1, 1, 1, 1]
    assert read(1.0 + FOLLOW_S, GIB + 100 * MIB) == 2
    assert card_free(live) == 7 * GIB - 100 * MIB
    # What matters is told at once.
    assert read(1.5 + FOLLOW_S, 2 * GIB) == 3
    assert card_free(live) == 6 * GIB


def test_bytes_of_a_running_load_are_not_those_of_other_programs(live: LiveRig) -> None:
    live.set_devices(DeviceList(Rig((CARD,), HOST)))
    sampled(live, GIB)
    loading = loaded("loading")
    live.set_models([loading], loading)
    sampled(live, 6 * GIB)
    assert card_free(live) == 7 * GIB
    other = loaded("other")
    live.set_models([loading, other], other)
    assert card_free(live) == 2 * GIB


def test_choices_that_were_measured_here_are_the_hosts_and_not_those_of_a_rig_file(live: LiveRig) -> None:
    host = live.devices.rig.host
    choice = MeasuredChoice("threads", 3, 2, 1.2, 1.1, 1.3, machine_key(host))
    book = EMPTY_BOOK.with_choices([choice])
    live.set_speed_book(book)
    assert live.rig.host.choices == (choice,)
    live.set_devices(DeviceList(Rig((), host)))
    assert live.rig.host.choices == (choice,), "devices were searched again"
    live.set_speed_book(EMPTY_BOOK)
    assert not live.rig.host.choices
    live.set_speed_book(book)
    live.set_devices(DeviceList(Rig((), host), from_file=True))
    assert not live.rig.host.choices
