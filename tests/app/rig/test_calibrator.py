"""The calibrator: it learns from memory samples around a load, corrects the rig, and stores or forgets values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

from app.background import Background
from app.rig.calibrator import Calibrator
from app.rig.live_rig import LiveRig
from engine.base.units import GIB, MIB
from engine.devices.device import ComputingNeed, Device, Rig, make_host
from engine.devices.telemetry.sample import Sample
from engine.planning.fit.calibration import NO_CALIBRATION, read_calibration, write_calibration
from engine.planning.memory.estimate import DeviceMemory, Grade
from engine.planning.plan.report import make_row
from engine.runtime.session.events import Loaded

CARD = Device("CUDA0", "card", "CUDA", "gpu", 8 * GIB, pci_bus_id="0000:01:00.0")
RIG = Rig((CARD,), make_host("host", 8 * GIB))
FORECAST = (make_row(CARD, DeviceMemory(weights_bytes=GIB, overhead_bytes=400 * MIB), Grade.ESTIMATED),)
MEASURED = (make_row(CARD, DeviceMemory(weights_bytes=GIB), Grade.MEASURED),)
EVENT = Loaded(devices=MEASURED, forecast=FORECAST)


@pytest.fixture
def background(qtbot: QtBot) -> Iterator[Background]:
    background = Background()
    yield background
    background.close()


def sample(used_bytes: int) -> tuple[Sample, ...]:
    return (Sample("CUDA0", 0.0, used_bytes, 8 * GIB),)


def test_a_load_is_learned_from_kept_and_reset(qtbot: QtBot, background: Background, tmp_path: Path) -> None:
    live, path = LiveRig(), tmp_path / "calibration.json"
    calibrator = Calibrator(live, background, path)
    live.samples_arrived.emit(sample(MIB))
    calibrator.begin(nothing_loaded=True)
    calibrator.finish(RIG, EVENT)
    assert calibrator.calibration.overhead_bytes(CARD) is None
    live.samples_arrived.emit(sample(GIB + 601 * MIB))
    assert calibrator.calibration.overhead_bytes(CARD) == 600 * MIB
    qtbot.waitUntil(lambda: read_calibration(path) == calibrator.calibration)
    again = Calibrator(LiveRig(), background, path)
    assert again.calibration.overhead_bytes(CARD) == 600 * MIB
    again.reset()
    qtbot.waitUntil(lambda: read_calibration(path).overheads == {})


def test_a_load_over_another_model_tells_nothing_of_a_card(
    qtbot: QtBot, background: Background, tmp_path: Path
) -> None:
    calibrator = Calibrator(live := LiveRig(), background, tmp_path / "calibration.json")
    live.samples_arrived.emit(sample(GIB))
    calibrator.begin(nothing_loaded=False)
    calibrator.finish(RIG, EVENT)
    live.samples_arrived.emit(sample(2 * GIB))
    calibrator.begin(nothing_loaded=True)
    calibrator.finish(RIG, EVENT)
    calibrator.forget()
    live.samples_arrived.emit(sample(4 * GIB))
    calibrator.begin(nothing_loaded=True, forecast_is_whole=False)
    calibrator.finish(RIG, EVENT)
    live.samples_arrived.emit(sample(6 * GIB))
    assert calibrator.calibration.overheads == {}


def test_devices_are_corrected_as_they_come(qtbot: QtBot, background: Background, tmp_path: Path) -> None:
    calibrator = Calibrator(live := LiveRig(), background, tmp_path / "calibration.json")
    calibrator.begin(nothing_loaded=True)
    calibrator.finish(RIG, EVENT)
    live.samples_arrived.emit(())
    host = make_row(live.rig.host, DeviceMemory(weights_bytes=GIB), Grade.ESTIMATED)
    taken = make_row(live.rig.host, DeviceMemory(weights_bytes=GIB + 7 * MIB), Grade.MEASURED)
    calibrator.finish(live.rig, Loaded(devices=(taken,), forecast=(host,)))
    with qtbot.waitSignal(live.rig_changed):
        live.samples_arrived.emit(())
    assert live.rig.host.overhead_bytes == 7 * MIB
    with qtbot.waitSignal(live.rig_changed):
        calibrator.reset()
    assert live.rig.host.overhead_bytes is None


def need(device: str) -> ComputingNeed:
    return ComputingNeed(device, "model", 4096, 512, flash_attention=True, types=("f16", "f16"), overhead_bytes=GIB)


def test_what_a_command_learns_meanwhile_stays(qtbot: QtBot, background: Background, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    calibrator = Calibrator(LiveRig(), background, path)
    write_calibration(path, NO_CALIBRATION.with_need(need("CUDA0")))
    calibrator.learn_need(need("CUDA1"))
    qtbot.waitUntil(lambda: read_calibration(path).computing == (need("CUDA0"), need("CUDA1")))
    calibrator.reset()
    qtbot.waitUntil(lambda: read_calibration(path) == NO_CALIBRATION)
