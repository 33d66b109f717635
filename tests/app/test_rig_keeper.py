"""Live memory of the rig: what a child reads of workers that nobody else can read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pytestqt.qtbot import QtBot

from app.background import Background
from app.rig_keeper import RigKeeper
from engine.devices.device import Device, Rig, make_host
from engine.layout.layout import make_layout
from engine.runner.protocol import DeviceMemoryReading
from engine.telemetry.sample import Sample
from engine.units import GIB, MIB


def worker(device_id: str, host: str) -> Device:
    return Device(id=device_id, name=host, backend="RPC", kind="gpu", total_bytes=8 * GIB, endpoint=f"{host}:50052")


RIG = Rig((worker("RPC0", "192.168.1.7"), worker("RPC1", "127.0.0.1")), make_host("host", 16 * GIB))


@pytest.fixture
def keeper(qtbot: QtBot) -> Iterator[RigKeeper]:
    opened = RigKeeper(Background())
    yield opened
    opened.close()


def shown_used(keeper: RigKeeper, used_bytes: int | None) -> int | None:
    """What the cards are told of RPC0 when its own reading is `used_bytes`."""
    seen: list[tuple[Sample, ...]] = []
    keeper.samples_arrived.connect(seen.append)
    keeper._on_sampled((Sample("RPC0", 1.0, used_bytes, 8 * GIB if used_bytes is not None else None),))
    keeper.samples_arrived.disconnect(seen.append)
    return seen[-1][0].used_bytes


def test_only_workers_elsewhere_are_asked_for(keeper: RigKeeper) -> None:
    keeper.set_held_endpoints(RIG, make_layout(4, ["RPC1"] * 4))
    assert not keeper.holds_remote
    keeper.set_held_endpoints(RIG, make_layout(4, ["RPC0", "RPC0", "RPC1", "RPC1"]))
    assert keeper.holds_remote
    keeper.release_endpoints()
    assert not keeper.holds_remote


def test_a_gap_is_filled_by_the_child_that_holds_the_worker(keeper: RigKeeper) -> None:
    assert shown_used(keeper, None) is None
    keeper.show_engine_memory([DeviceMemoryReading("RPC0", 5 * GIB, 8 * GIB)])
    assert shown_used(keeper, None) == 3 * GIB
    assert shown_used(keeper, 7 * MIB) == 7 * MIB
    keeper.release_endpoints()
    assert shown_used(keeper, None) is None


def test_all_of_it_free_is_no_reading(keeper: RigKeeper) -> None:
    keeper.show_engine_memory([DeviceMemoryReading("RPC0", 8 * GIB, 8 * GIB)])
    assert shown_used(keeper, None) is None
