"""Searches for devices: this machine's as they are judged, and those of one worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.devices.device import CPU_ID
from engine.errors import UnreachableError
from engine.rigs.lab import LabRig
from engine.rigs.search import find_devices, find_workers
from engine.rigs.self_test import SelfTest, keep_verdict
from engine.units import MIB
from tests.support.previews import make_gpu, make_rig


def test_verdicts_of_self_tests_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, verdicts = make_rig(make_gpu("CUDA0", 8)), tmp_path / "verdicts.json"
    monkeypatch.setattr("engine.rigs.search.discover", lambda _endpoints: rig)
    assert not find_devices(verdicts).devices[0].capabilities.repeatable
    keep_verdict(verdicts, rig.devices[0], SelfTest(rounds=1, different=0))
    assert find_devices(verdicts).devices[0].capabilities.repeatable


def test_the_devices_of_a_worker_are_found_by_themselves_or_beside_this_machines(tmp_path: Path) -> None:
    with LabRig([16 * MIB]) as lab:
        endpoint = lab.rig.devices[0].endpoint
        assert endpoint is not None
        assert [device.endpoint for device in find_workers(endpoint, tmp_path / "checks.json")] == [endpoint]
        found = find_devices(tmp_path / "none.json", (endpoint,))
    assert endpoint in {device.endpoint for device in found.devices}
    assert found.ids[-1] == CPU_ID
    with pytest.raises(UnreachableError):
        find_workers(endpoint, tmp_path / "checks.json")
