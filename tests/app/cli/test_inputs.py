"""The command line uses what the window has stored about this machine: calibrated overheads and self-tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.cli.inputs import this_machine
from app.paths import calibration_path, self_test_path
from engine.base.units import MIB
from engine.devices.device import device_key
from engine.machines.rigs.self_test import SelfTest, keep_verdict
from engine.planning.fit.calibration import Calibration, write_calibration
from tests.support.previews import make_gpu, make_rig


@pytest.fixture
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path


def test_overhead_of_earlier_loads_counts(data_folder: Path) -> None:
    host = this_machine().host
    assert host.overhead_bytes is None
    write_calibration(calibration_path(), Calibration({device_key(host): (7 * MIB,)}))
    assert this_machine().host.overhead_bytes == 7 * MIB


@pytest.mark.parametrize("passed", [True, False])
def test_a_self_test_counts_for_its_backend(passed: bool, data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(make_gpu("CUDA0", 8), make_gpu("CUDA1", 8))
    monkeypatch.setattr("engine.machines.rigs.discovery.discover", lambda _endpoints: rig)
    self_test_path().parent.mkdir(parents=True, exist_ok=True)
    keep_verdict(self_test_path(), rig.devices[0], SelfTest(rounds=1, different=0 if passed else 1))
    assert [device.capabilities.repeatable for device in this_machine().devices] == [passed, passed]
