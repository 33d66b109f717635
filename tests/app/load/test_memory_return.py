"""The wait between an unload and the next load: until the memory of the devices is free again, or a limit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

from app.models.open_model import OpenModel
from app.rig.device_list import DeviceList
from app.settings import Settings
from app.wiring import make_desk
from engine.base.units import GIB
from engine.devices.device import Device, Rig, make_host
from engine.devices.telemetry.sample import Sample
from engine.model.gguf.model_file import FileIdentity, identify
from engine.model.gguf.reader import read_model
from engine.planning.fit.loaded_models import LIMIT_S, HeldModel
from tests.support.models import write_tiny_llama

CARD = Device("CUDA0", "card", "CUDA", "gpu", 24 * GIB, 4 * GIB)
HELD = HeldModel(FileIdentity(()), "ada", {"CUDA0": 8 * GIB, "CPU": GIB}, idle_since_s=0.0)


class Bench:
    """A desk in which a model seems to be loaded on a card."""

    def __init__(self, folder: Path) -> None:
        self.now_s = 50.0
        self.desk = make_desk(Settings(folder / "settings.ini"), clock=lambda: self.now_s)
        self.desk.rig.live.set_devices(DeviceList(Rig((CARD,), make_host("host", 64 * GIB, 60 * GIB))))
        self.begun: list[str] = []
        self.waits: list[str] = []
        self.memory_return = self.desk.loader.memory_return
        self.model: OpenModel = self.desk.models.current
        self.model.status_changed.connect(lambda status: self.waits.append(status.waits))
        self.read(used_bytes=20 * GIB)
        self.hold(HELD)

    def hold(self, held: HeldModel | None) -> None:
        self.model.held = held
        self.model.changed.emit()

    def read(self, used_bytes: int) -> None:
        self.desk.rig.live.take_samples((Sample("CUDA0", self.now_s, used_bytes, 24 * GIB),))

    def load_next(self) -> None:
        self.memory_return.then(self.model, lambda: self.begun.append("load"))


@pytest.fixture
def bench(qtbot: QtBot, tmp_path: Path) -> Iterator[Bench]:
    opened = Bench(tmp_path)
    yield opened
    opened.desk.close()


def test_without_an_unload_nothing_is_waited_for(bench: Bench) -> None:
    bench.load_next()
    assert bench.begun == ["load"]
    assert bench.waits == []


def test_a_load_waits_until_three_quarters_are_back(bench: Bench, qtbot: QtBot) -> None:
    bench.hold(None)
    bench.load_next()
    assert bench.begun == []
    assert bench.waits == ["Waiting until the memory of CUDA0 is free again"]
    bench.read(used_bytes=15 * GIB)
    bench.memory_return._on_poll()
    assert bench.begun == []
    bench.read(used_bytes=13 * GIB)
    qtbot.waitUntil(lambda: bench.begun == ["load"])
    assert bench.waits[-1] == ""
    assert not bench.memory_return.is_waiting


def test_what_does_not_come_back_is_not_waited_for_for_ever(bench: Bench, qtbot: QtBot) -> None:
    bench.hold(None)
    bench.load_next()
    bench.now_s += LIMIT_S
    qtbot.waitUntil(lambda: bench.begun == ["load"])


def test_the_model_that_waits_is_not_replaced_by_another_file(bench: Bench, tmp_path: Path) -> None:
    ada, bob = (read_model(write_tiny_llama(tmp_path / f"{name}.gguf")) for name in ("ada", "bob"))
    models = bench.desk.models
    models.place(ada, identify(ada.paths))
    bench.hold(None)
    bench.load_next()
    assert models.place(bob, identify(bob.paths)) is not bench.model
    assert bench.model.file is ada
    bench.desk.loader.cancel()
    assert models.place(bob, identify(bob.paths)) is bench.model


def test_a_wait_can_be_cancelled(bench: Bench) -> None:
    bench.hold(None)
    bench.load_next()
    bench.desk.loader.cancel()
    bench.now_s += LIMIT_S
    bench.memory_return._on_poll()
    assert bench.begun == []
    assert bench.waits[-1] == ""
    bench.load_next()
    assert bench.begun == ["load"]
