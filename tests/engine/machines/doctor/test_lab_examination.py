"""The examination of a lab rig with the real engine: loads against forecasts, speeds, and stored results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.base.cancellation import CancelToken
from engine.base.units import MIB
from engine.devices.device import Rig
from engine.machines.doctor.machine import Files, MachineSteps
from engine.machines.doctor.report import Progress, examine
from engine.machines.rigs.check_results import read_check_results
from engine.machines.rigs.discovery import host_device
from engine.machines.rigs.lab import LabRig
from engine.planning.fit.speed_book import read_speed_book
from tests.support.models import write_tiny_llama


@pytest.fixture
def files(tmp_path: Path) -> Files:
    model = write_tiny_llama(tmp_path / "tiny.gguf", n_layers=3, n_ctx_train=512)
    return Files(model, *(tmp_path / "data" / name for name in ("checks", "verdicts", "calibration", "speeds")))


@pytest.fixture
def rig() -> Iterator[Rig]:
    with LabRig([48 * MIB]) as lab:
        yield lab.rig


@pytest.mark.exhaustive
def test_loads_are_forecast_exactly_and_speeds_are_kept(
    rig: Rig, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No types of weights: each takes half a second of each device.
    monkeypatch.setattr("engine.machines.rigs.speeds._ENOUGH_S", 0.0)
    with MachineSteps(rig, files, CancelToken()) as machine:
        steps = [step for step in machine.steps() if step.name in ("device", "load", "speed")]
        report = examine(steps, lambda _progress: None, CancelToken())
    found = {(check.device, check.name): check for check in report.checks}
    assert report.is_sound, report.summary
    assert {("RPC0", "device"), ("RPC0", "load"), ("CPU", "load"), ("RPC0", "speed"), ("CPU", "speed")} <= set(found)
    forecasts = [check for check in report.checks if check.name == "forecast"]
    assert [(each.device, each.figures["row"]) for each in forecasts] == [
        ("RPC0", "RPC0"),
        ("RPC0", "CPU"),
        ("CPU", "CPU"),
    ]
    assert all("exact" in each.detail for each in forecasts)
    assert forecasts[0].figures["weights_measured_bytes"] == forecasts[0].figures["weights_forecast_bytes"] > 0  # type: ignore[operator]
    assert found["CPU", "load"].figures["free_during_bytes"]
    assert float(found["RPC0", "speed"].figures["round_trip_s"] or 0) > 0
    assert read_speed_book(files.speeds).devices


def test_a_device_that_is_held_is_left_alone(rig: Rig, files: Files) -> None:
    endpoint = rig.devices[0].endpoint
    assert endpoint is not None
    with MachineSteps(rig, files, CancelToken(), held=frozenset([endpoint])) as machine:
        assert {step.device for step in machine.steps()} == {None, "CPU"}


def test_a_cancel_ends_the_check_of_the_engine_and_leaves_nothing(files: Files) -> None:
    cancel = CancelToken()

    def stop(progress: Progress) -> None:
        if progress.words.startswith("Checking"):
            cancel.cancel()

    with MachineSteps(Rig((), host_device()), files, cancel) as machine:
        report = examine(machine.engine_steps(), stop, cancel)
    assert not report.is_whole
    assert report.checks == ()
    assert read_check_results(files.checks).devices == {}
