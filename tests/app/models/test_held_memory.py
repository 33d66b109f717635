"""Probes of the edit: none while a worker serves another model, and none for a rig file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

from app.rig.device_list import DeviceList
from app.settings import Settings
from app.wiring import Desk, make_desk
from engine.base.units import GIB
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Rig, make_host
from engine.model.gguf.model_file import FileIdentity
from engine.model.gguf.reader import read_model
from engine.planning.fit.loaded_models import HeldModel
from engine.planning.layout.layout import single_device
from engine.planning.plan.edit import Edit
from engine.planning.settings.context_settings import ContextSettings
from tests.support.models import write_tiny_llama

ENDPOINT = "192.0.2.7:50052"
WORKER = Device("RPC0", "attic", "RPC", "gpu", 8 * GIB, 8 * GIB, endpoint=ENDPOINT)
CARD = Device("CUDA0", "card", "CUDA", "gpu", 8 * GIB, 8 * GIB)
OTHER = HeldModel(FileIdentity(()), "other", {"RPC0": GIB}, frozenset({ENDPOINT}), idle_since_s=0.0)


@pytest.fixture
def desk(qtbot: QtBot, tmp_path: Path) -> Iterator[Desk]:
    made = make_desk(Settings(tmp_path / "settings.ini"))
    made.prober.close()
    made.document.edit_settled.disconnect()  # No probes: nothing of this is here.
    made.rig.live.set_devices(DeviceList(Rig((CARD, WORKER), make_host("host", 16 * GIB, 8 * GIB))))
    model = read_model(write_tiny_llama(tmp_path / "model.gguf", n_layers=4))
    made.document.open(model, made.rig.live.rig, Edit(single_device(4, "RPC0"), ContextSettings(n_ctx=256)))
    # What was opened is touched: it stays where it is, whatever happens to the devices.
    made.document.set_layout(single_device(4, CPU_ID), "move")
    made.document.set_layout(single_device(4, "RPC0"), "move back")
    yield made
    made.close()


def test_a_worker_that_serves_another_model_is_not_asked(desk: Desk) -> None:
    assert desk.held_memory.may_probe(desk.document)
    desk.rig.live.set_models([OTHER], None)
    assert not desk.held_memory.may_probe(desk.document)
    desk.document.set_layout(single_device(4, "CUDA0"), "move")
    assert desk.held_memory.may_probe(desk.document)


def test_devices_of_a_rig_file_that_are_not_here_cannot_be_asked(desk: Desk) -> None:
    live = desk.rig.live
    live.set_devices(replace(live.devices, from_file=True))
    assert live.missing_devices == ("CUDA0",)
    assert not desk.held_memory.may_probe(desk.document)
    live.set_devices(live.devices.without("CUDA0"))
    assert desk.held_memory.may_probe(desk.document)


def test_without_a_model_there_is_nothing_to_ask(qtbot: QtBot, tmp_path: Path) -> None:
    blank = make_desk(Settings(tmp_path / "blank.ini"))
    assert not blank.held_memory.may_probe(blank.document)
    blank.close()
