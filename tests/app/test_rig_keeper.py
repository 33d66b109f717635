"""Live memory of the rig: what a child reads of workers that nobody else can read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

from app.background import Background
from app.rig_keeper import RigKeeper
from engine.devices.device import Device, Holding, Rig, make_host
from engine.devices.rig_file import encode_rig, read_rig, write_rig
from engine.fit.loaded_models import LoadedModel
from engine.gguf.identity import FileIdentity
from engine.runner.protocol import DeviceMemoryReading
from engine.telemetry.sample import Sample
from engine.units import GIB, MIB


def worker(device_id: str, host: str) -> Device:
    return Device(id=device_id, name=host, backend="RPC", kind="gpu", total_bytes=8 * GIB, endpoint=f"{host}:50052")


def loaded(name: str, *endpoints: str, **held_bytes: int) -> LoadedModel:
    return LoadedModel(FileIdentity(((1, hash(name), 0, 0),)), name, held_bytes, frozenset(endpoints), idle_since_s=0.0)


RIG = Rig((worker("RPC0", "192.168.1.7"), worker("RPC1", "127.0.0.1")), make_host("host", 16 * GIB))
CARD = Device("CUDA0", "card", "CUDA", "gpu", 8 * GIB, 8 * GIB)
REMOTE_MODEL = loaded("remote", "192.168.1.7:50052", RPC0=GIB)


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


def test_a_gap_is_filled_by_the_child_that_holds_the_worker(keeper: RigKeeper) -> None:
    assert shown_used(keeper, None) is None
    keeper.set_models([REMOTE_MODEL], REMOTE_MODEL)
    keeper.show_engine_memory([DeviceMemoryReading("RPC0", 5 * GIB, 8 * GIB)])
    assert shown_used(keeper, None) == 3 * GIB
    assert shown_used(keeper, 7 * MIB) == 7 * MIB
    keeper.set_models([], None)
    assert shown_used(keeper, None) is None


def test_all_of_it_free_is_no_reading(keeper: RigKeeper) -> None:
    keeper.show_engine_memory([DeviceMemoryReading("RPC0", 8 * GIB, 8 * GIB)])
    assert shown_used(keeper, None) is None


# ---------------------------------------------------------------------- several models


def sampled(keeper: RigKeeper, used_bytes: int, own_bytes: int = 0) -> None:
    keeper._on_sampled(
        (
            Sample("CUDA0", 1.0, used_bytes, 8 * GIB),
            Sample("CPU", 1.0, GIB, keeper.rig.host.total_bytes, own_bytes=own_bytes),
        )
    )


def card_free(keeper: RigKeeper) -> int | None:
    return keeper.rig.devices[0].free_bytes


def test_the_current_models_memory_counts_as_free_and_that_of_others_as_taken(keeper: RigKeeper) -> None:
    keeper._set_rig(Rig((CARD,), keeper.rig.host))
    sampled(keeper, 5 * GIB)
    first, second = loaded("first", CUDA0=3 * GIB), loaded("second", CUDA0=GIB)
    keeper.set_models([first, second], first)
    sampled(keeper, 5 * GIB)
    assert card_free(keeper) == 6 * GIB
    assert keeper.rig.devices[0].holdings == (Holding("second", GIB),)
    keeper.set_models([first, second], second)
    assert card_free(keeper) == 4 * GIB
    keeper.set_models([first, second], None)
    assert card_free(keeper) == 3 * GIB
    assert keeper.rig_without([first, second]).devices[0].free_bytes == 7 * GIB


def test_what_comes_and_goes_counts_before_the_next_sample(keeper: RigKeeper) -> None:
    keeper._set_rig(Rig((CARD,), keeper.rig.host))
    sampled(keeper, GIB)
    model = loaded("model", CUDA0=3 * GIB)
    keeper.set_models([model], None)
    assert card_free(keeper) == 4 * GIB
    keeper.set_models([model], model)
    assert card_free(keeper) == 7 * GIB
    keeper.set_models([], None)
    assert card_free(keeper) == 7 * GIB


def test_a_rig_file_knows_nothing_of_what_was_loaded_since(qtbot: QtBot, keeper: RigKeeper, tmp_path: Path) -> None:
    path = tmp_path / "rig.json"
    write_rig(path, Rig((replace(CARD, free_bytes=6 * GIB),), RIG.host))
    with qtbot.waitSignal(keeper.rig_changed):
        keeper.open_rig(path)
    other, current = loaded("other", CUDA0=GIB), loaded("current", CUDA0=2 * GIB)
    keeper.set_models([other, current], current)
    assert card_free(keeper) == 5 * GIB
    with qtbot.waitSignal(keeper.said):
        keeper.save_rig(path)
    assert read_rig(path).devices[0].free_bytes == 6 * GIB
    assert b"other" not in encode_rig(keeper.rig)
